"""Signals to the gate: they end its sessions with it, once and to the end, unless whoever started it ignores them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from gefen_offload.ranks.kill import state
from support.checkout import ROOT, START

SUITE = """
import os, pathlib, signal, subprocess, time

def slowly(*_):
    pathlib.Path("ending").touch()
    time.sleep(0.7)
    os._exit(1)

def test_one():
    signal.signal(signal.SIGTERM, slowly)
    helper = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    pathlib.Path("pids.new").write_text(f"{os.getpid()} {helper.pid}")
    os.rename("pids.new", "pids")
    while not os.path.exists("go"):
        time.sleep(0.02)
    helper.kill()
    helper.wait()
"""


@contextmanager
def judged(folder, ignored=()):
    """A gate that judges the suite and has begun its test; and the test's processes, which end at the latest here."""
    (folder / "suite").mkdir()
    (folder / "suite" / "test_it.py").write_text(SUITE)
    (folder / "mandatory.txt").write_text("test_it.py::test_one\n")
    suite = ["--tests", str(folder / "suite"), "--mandatory", str(folder / "mandatory.txt")]
    # a child inherits what is ignored
    handlers = [(number, signal.signal(number, signal.SIG_IGN)) for number in ignored]
    gate = subprocess.Popen(
        [sys.executable, "-c", START, str(ROOT), "gate", "run", *suite, "--run-dir", str(folder / "run")],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for number, handler in handlers:
        signal.signal(number, handler)
    pids = []
    try:
        pids += map(int, waited_for(folder / "suite" / "pids").read_text().split())
        yield gate, pids
    finally:
        gate.kill()
        gate.communicate()
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def waited_for(path):
    """The path, once it is there."""
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit, f"{path} never came"
        time.sleep(0.02)
    return path


def alive(pid):
    """Whether a process runs; one that waits to be reaped does not."""
    return state(pid) not in ("zombie", "gone")


def test_a_second_signal_does_not_disturb_the_end(tmp_path):
    """While the gate ends its sessions further signals change nothing: no process is left, and the first one counts."""
    with judged(tmp_path) as (gate, pids):
        gate.terminate()
        waited_for(tmp_path / "suite" / "ending")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            gate.send_signal(number)
            time.sleep(0.05)
        output, _ = gate.communicate(timeout=60)
        assert gate.returncode == 128 + signal.SIGTERM
        assert "Traceback" not in output
        assert [pid for pid in pids if alive(pid)] == []


def test_sessions_die_with_a_gate_that_is_killed(tmp_path):
    """Nothing of a session, also what detached itself and dropped its environment, outlives a gate that is killed."""
    with judged(tmp_path) as (gate, pids):
        gate.kill()
        limit = time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < limit:
            time.sleep(0.02)
        assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=["nohup", "background"])
def test_a_signal_that_the_caller_ignores_ends_nothing(tmp_path, number):
    """Under nohup a hang-up, and in a shell's background an interrupt, leaves the run to its verdict."""
    with judged(tmp_path, ignored=(number,)) as (gate, _):
        gate.send_signal(number)
        (tmp_path / "suite" / "go").touch()
        output, _ = gate.communicate(timeout=60)
        assert (gate.returncode, output.partition(" (")[0].splitlines()[-1]) == (0, "PASS")

"""Ending recorded processes and what they started, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from gefen_offload.ranks.kill import TOKEN, Member, carriers, end, state
from support.child_pytest import wait_until

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], start_new_session=True)
forked = os.fork()
if forked:
    print(child.pid, forked, flush=True)
time.sleep(100)
"""


@pytest.fixture
def token() -> str:
    return uuid.uuid4().hex


def start(command: list[str], token: str | None, **more) -> subprocess.Popen:
    environ = {**os.environ, **({TOKEN: token} if token else {})}
    return subprocess.Popen(command, env=environ, start_new_session=True, **more)


def test_the_whole_family(token):
    """A process, its child in another session and its fork are ended; a neighbour is not."""
    neighbour = start(SLEEP, token + "x.")
    parent = start([sys.executable, "-S", "-c", FAMILY], token + ".", stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert end([Member.of(parent.pid)], [token + "."]) == []
    parent.wait()
    wait_until(lambda: all(state(pid) in ("gone", "zombie") for pid in pids), what=f"the end of {pids}")
    assert neighbour.poll() is None
    neighbour.kill(), neighbour.wait()


def test_a_reused_number(token):
    """A process that started later than the recorded one is not the recorded one."""
    process = start(SLEEP, None)
    past = Member(process.pid, Member.of(process.pid).started - 1)
    assert not past.alive
    assert end([past], [token]) == []
    assert process.poll() is None
    process.kill(), process.wait()


def test_shared_memory_of_the_dead(token):
    """Shared memory that an ended process had mapped is removed, unless a living one uses it."""
    code = f"import mmap, time; f = open('/dev/shm/gefen-{token}', 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9)"
    process = start(
        [sys.executable, "-S", "-c", f"{code}; print('ready', flush=True); time.sleep(100)"], token, stdout=-1
    )
    process.stdout.readline()
    with open(f"/dev/shm/gefen-{token}", "rb"):
        end([Member.of(process.pid)], [token])
        assert os.path.exists(f"/dev/shm/gefen-{token}")
    process.wait()
    os.unlink(f"/dev/shm/gefen-{token}")
    process = start(
        [sys.executable, "-S", "-c", f"{code}; print('ready', flush=True); time.sleep(100)"], token, stdout=-1
    )
    process.stdout.readline()
    end([Member.of(process.pid)], [token])
    process.wait()
    assert not os.path.exists(f"/dev/shm/gefen-{token}")


def test_carriers_of_nothing(token):
    """A token that nobody carries finds nobody."""
    assert carriers([token]) == set()

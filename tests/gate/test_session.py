"""A judged session: what reaches it, what its record holds, and what it may not leave."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from gefen_offload.gate import session
from gefen_offload.gate.record import Damage
from gefen_offload.gate.selftest.case import IDS, Suite
from gefen_offload.ranks.kill import state


def test_the_record_holds_every_phase(tmp_path):
    """Each test's three phases, its properties and the session's end are on record."""
    done = Suite({"test_it.py": "def test_one(record_property):\n    record_property('trajectory', {'a': [1.5]})\n"})
    found = done.session(tmp_path)
    assert found.damage == ()
    assert [(phase.when, phase.outcome) for phase in found.phases] == [
        ("setup", "passed"),
        ("call", "passed"),
        ("teardown", "passed"),
    ]
    assert found.noted("trajectory") == [(IDS[0], {"a": [1.5]})]
    assert (found.status, found.exit.code, found.exit.leftovers) == (0, 0, ())


def test_the_environment_cannot_choose_the_tests(tmp_path, monkeypatch):
    """PYTEST_ADDOPTS and PYTEST_PLUGINS of the caller do not reach the session."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing_is_called_this")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin_anywhere")
    assert [id for id, _ in Suite({}).session(tmp_path).selected] == list(IDS)


def test_the_current_folder_is_not_on_the_path(tmp_path):
    """Neither the folder that the session starts in nor the launcher's own is importable from."""
    suite = Suite(
        {
            "test_it.py": """
        import os, sys
        def test_one():
            assert os.getcwd() not in sys.path and "" not in sys.path
            assert not any(os.path.exists(os.path.join(folder, "recorder.py")) for folder in sys.path)
    """,
            "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
        }
    )
    found = suite.session(tmp_path)
    assert [phase.outcome for phase in found.phases] == ["passed"] * 3, found.phases[1].text


def test_no_variable_changes_what_python_does(tmp_path, monkeypatch):
    """Of the interpreter's own variables only those reach a session that change nothing that it runs."""
    for name in ("PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONBREAKPOINT", "PYTHONSAFEPATH", "PYTHON_OF_NEXT_YEAR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COVERAGE_PROCESS_START", "settings")
    monkeypatch.setenv("PYTHONUSERBASE", "/packages")
    found = session.environment(session.Plan("cpu", "python", tmp_path, (), 1.0), "n")
    python = {name for name in found if name.startswith(("PYTHON", "COV"))}
    assert "PYTHONUSERBASE" in python
    assert python <= {*session.PYTHON_KEPT, "PYTHONUNBUFFERED", "PYTHONPATH"}


def test_the_path_is_whole_where_python_adds_no_folder(tmp_path):
    """With a safe path (``-P``) there is no folder of the launcher's to take off, and the judged one stays."""
    text = """
        import sys
        def test_one():
            assert any(folder.endswith("/site") for folder in sys.path)
    """
    suite = Suite({"test_it.py": text}, package="imaginary", variables={"PYTHONSAFEPATH": "1"})
    assert [phase.outcome for phase in suite.session(tmp_path).phases] == ["passed"] * 3


def test_a_forked_child_writes_no_evidence(tmp_path):
    """A child that goes on inside pytest after a fork leaves nothing in the record."""
    found = Suite(
        {
            "test_it.py": """
        import os
        def test_one():
            if os.fork() == 0:
                return
            os.wait()
        def test_two():
            pass
    """
        }
    ).session(tmp_path)
    assert found.damage == ()
    assert len(found.phases) == 6


def test_a_helper_in_a_session_of_its_own_is_found_and_ended(tmp_path):
    """What a session leaves running is named with its command line and killed, however it detached."""
    found = Suite(
        {
            "test_it.py": """
        import subprocess
        def test_one():
            subprocess.Popen(["sleep", "1234"], start_new_session=True)
    """
        },
        grace=0.2,
    ).session(tmp_path)
    assert len(found.exit.leftovers) == 1
    assert "sleep 1234" in found.exit.leftovers[0]
    pid = int(found.exit.leftovers[0].split()[1].rstrip(":"))
    assert not alive(pid)


def alive(pid):
    """Whether a process still has a command line: one that waits to be reaped has none."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_an_interrupted_session_leaves_nothing(tmp_path):
    """A helper in a session of its own is ended too when the gate itself is stopped in the middle."""
    suite = Suite(
        {
            "test_it.py": """
        import subprocess, time
        def test_one():
            child = subprocess.Popen(["sleep", "777"], start_new_session=True)
            open("pid", "w").write(str(child.pid))
            time.sleep(600)
    """
        }
    )
    stopping = threading.Event()

    def stop_once_it_runs(records):
        if any(path.read_text() for path in tmp_path.rglob("pid")):
            stopping.set()

    with pytest.raises(session.StoppedError):
        suite.session(tmp_path, stop_once_it_runs, stopping)
    (pid,) = (int(path.read_text()) for path in tmp_path.rglob("pid"))
    assert state(pid) in ("zombie", "gone")


def test_a_hang_leaves_its_stack(tmp_path):
    """At the deadline the log holds the stack of the test that hung, and the record its name."""
    found = Suite(
        {
            "test_it.py": """
        import threading
        def test_one():
            threading.Event().wait()
    """
        },
        timeout=4.0,
    ).session(tmp_path)
    assert found.exit.expired
    assert [damage for damage, _ in found.damage] == [Damage.UNENDED]
    assert found.started == (IDS[0],)
    assert "in test_one" in (tmp_path / "cpu.log").read_text()


def test_the_path_keeps_other_packages_only(tmp_path, monkeypatch):
    """A folder of the caller's PYTHONPATH stays, after the judged one, unless it holds the judged package itself."""
    (tmp_path / "other").mkdir()
    (tmp_path / "checkout" / "widget").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'checkout'}:{tmp_path / 'other'}")
    plan = session.Plan("cpu", "python", tmp_path, (), 1.0, "widget", ("/judged",))
    assert session.environment(plan, "n")["PYTHONPATH"] == f"/judged:{tmp_path / 'other'}"


def test_marks_add_up_in_a_session_within_a_session(tmp_path, monkeypatch):
    """A session started from within a session carries both marks, so that the outer one finds what the inner left."""
    monkeypatch.setenv(session.MARK, "outer")
    plan = session.Plan("cpu", "python", tmp_path, (), 1.0)
    assert session.environment(plan, "inner")[session.MARK] == "outer:inner"


@pytest.mark.parametrize("line", ["not json", '{"chain": "x"}', "[]"], ids=["text", "no-body", "list"])
def test_a_line_that_is_no_event_is_damage(tmp_path, line):
    """Whatever stands in a record's line, reading it gives damage and no exception."""
    suite = Suite({})
    done = suite.session(tmp_path)
    path = tmp_path / "cpu.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
    again = session.read(path, "cpu", done.nonce, done.exit)
    assert [damage for damage, _ in again.damage] == [Damage.EDITED]
    assert json.loads(lines[0])["body"]


def test_a_worker_may_go_once_it_has_said_that_it_is_finished(tmp_path):
    """A worker's record is whole before its session hears that it is finished, and may end it."""
    ends = """
        import os, pytest
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_sessionfinish():
            yield
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(0)
    """
    found = Suite({"conftest.py": ends}, workers=2).session(tmp_path)
    assert (found.damage, found.lost, found.status) == ((), (), 0)

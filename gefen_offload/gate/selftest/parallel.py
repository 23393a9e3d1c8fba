"""Sessions spread over two workers of pytest-xdist, each of which writes a record of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gefen_offload.gate import session
from gefen_offload.gate.reason import Reason
from gefen_offload.gate.record import read
from gefen_offload.gate.selftest.case import SUITE, Case, Evidence, Suite, suite_case
from gefen_offload.gate.selftest.collection import MEDDLER
from gefen_offload.gate.selftest.endings import HANG
from gefen_offload.gate.selftest.evidence import Alter, joined
from gefen_offload.gate.selftest.outcomes import FALSE_PASS, HEAD, TWO

LOST = (Reason.WORKER_LOST, Reason.NO_END)


def spread(test: str = SUITE, conftest: str = "") -> Suite:
    """A suite on two workers."""
    return Suite({"test_it.py": HEAD + test, **({"conftest.py": conftest} if conftest else {})}, workers=2)


def worker_case(name: str, *expected: Reason, test: str = SUITE, conftest: str = "") -> Case:
    """A case whose both sides run on two workers."""
    return suite_case(name, *expected, broken=spread(test, conftest))


def worker_record_case(name: str, *expected: Reason, alter: Callable[[list[Path]], object]) -> Case:
    """A real session on two workers, whose workers' records are altered before they are read."""

    def make(change: Callable[[list[Path]], object] | None) -> Callable[[Path], Evidence]:
        def evidence(folder: Path) -> Evidence:
            suite = spread()
            done = suite.session(folder)
            if change is not None:
                change(session.records(folder / "cpu.jsonl")[1:])
            return Evidence(suite.manifest(folder), (read(folder / "cpu.jsonl", "cpu", done.nonce, done.exit),))

        return evidence

    return Case(name, frozenset(expected), make(alter), make(None))


def busy(paths: list[Path]) -> Path:
    """The record of a worker that ran a test."""
    return next(path for path in paths if '\\"start\\"' in path.read_text(encoding="utf-8"))


def rewritten(change: Alter) -> Callable[[list[Path]], object]:
    """An alteration of one worker's lines."""

    def alter(paths: list[Path]) -> object:
        path = busy(paths)
        return path.write_text(change(path.read_text(encoding="utf-8").splitlines()), encoding="utf-8")

    return alter


def without_end(lines: list[str]) -> str:
    """The lines up to the worker's end line."""
    assert json.loads(json.loads(lines[-1])["body"])["kind"] == "end"
    return joined(lines[:-1])


AT_EXIT = """
    import atexit, os
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        atexit.register(os._exit, 3)
"""
ABORTS = """
    import os
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish():
        yield
        if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
            os.abort()
"""
DIES = """
    def test_one():
        {how}
"""

CASES: list[Case] = [
    worker_case("a worker's test fails", Reason.FAILED, test=DIES.format(how="assert 1 + 1 == 3") + TWO),
    worker_case(
        "a worker's failure rewritten as a pass",
        Reason.FAILED,
        test=DIES.format(how="assert 1 + 1 == 3") + TWO,
        conftest=FALSE_PASS,
    ),
    worker_case("a worker is killed", *LOST, Reason.INTERRUPTED, test=DIES.format(how="os.kill(os.getpid(), 9)") + TWO),
    worker_case("a worker exits with status 0", *LOST, Reason.INTERRUPTED, test=DIES.format(how="os._exit(0)") + TWO),
    worker_case("a worker's process ends with 3 at its exit", Reason.WORKER_LOST, conftest=AT_EXIT),
    worker_case("a worker crashes once it has told that it is finished", Reason.WORKER_LOST, conftest=ABORTS),
    worker_case(
        "workers that select different tests",
        Reason.COLLECTION_ERROR,
        Reason.NOT_RUN,
        conftest="    import os\n" + MEDDLER.format(does="del items[: os.environ['PYTEST_XDIST_WORKER'] == 'gw1']"),
    ),
    worker_case(
        "every worker runs every test",
        Reason.RAN_TWICE,
        conftest="""
    def pytest_xdist_make_scheduler(config, log):
        from xdist.scheduler import EachScheduling
        return EachScheduling(config, log)
""",
    ),
    worker_case(
        "collected twice by every worker",
        Reason.DUPLICATED,
        conftest=MEDDLER.format(does="items.append(items[0])"),
    ),
    suite_case(
        "a worker hangs",
        Reason.DEADLINE,
        *LOST[1:],
        Reason.INTERRUPTED,
        broken=replace(HANG, workers=2, timeout=12.0),
    ),
    worker_record_case("a worker's record gone", Reason.NO_RECORD, alter=lambda paths: busy(paths).unlink()),
    worker_record_case("a worker's record without its end", Reason.NO_END, alter=rewritten(without_end)),
    worker_record_case(
        "a worker's record cut within its last line",
        Reason.RECORD_TRUNCATED,
        alter=rewritten(lambda lines: joined(lines[:-1]) + lines[-1][:20]),
    ),
    worker_record_case(
        "a worker's record edited",
        Reason.RECORD_EDITED,
        alter=rewritten(lambda lines: joined(lines).replace("test_one", "test_uno", 1)),
    ),
    worker_record_case(
        "a worker's record in the place of another's",
        Reason.RECORD_FOREIGN,
        alter=lambda paths: paths[0].write_bytes(paths[1].read_bytes()),
    ),
]
"""For an interpreter that has pytest-xdist."""

"""Ranks that fail or vanish while they start: in the interpreter's own start, and in the import of torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.child_pytest import ChildPytest, run_child

pytestmark = pytest.mark.timeout(600)  # the first test waits for the suite
SUITE = Path(__file__).parent / "suites" / "start_suite.py"
SITECUSTOMIZE = """
import os, signal, sys, time

way = os.environ.get("BROKEN_START", "none") if "GEFEN_RANKS_RUN" in os.environ else "none"

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            if way == "raise":
                raise ImportError("libcudart.so.99: cannot open shared object file")
            if way == "exit":
                os._exit(5)
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

if way == "exit-at-start":
    os._exit(6)
if way != "none":
    sys.meta_path.insert(0, Finder())
"""
WAYS = {
    "raise": "raised ImportError: libcudart.so.99: cannot open shared object file in stage 'import torch'",
    "exit": "exited with code 5 and no outcome in stage 'import torch'",
    "kill": "was killed by SIGKILL (9) in stage 'import torch'",
    "hang": "did not finish (process sleeping) in stage 'import torch'",
    "exit-at-start": "exited with code 6 and no outcome in stage 'start'",
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory) -> ChildPytest:
    """The suite, run once; its ranks begin with a sitecustomize that breaks them."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = ChildPytest.path(str(folder / "site"))
    return run_child(folder, str(SUITE), "--ranks-no-spare", PYTHONPATH=path)


@pytest.mark.parametrize("way", WAYS)
def test_the_end_of_a_start(starts, way):
    """However a rank ends before it has a place, its own words, its stage and the way it ended are told."""
    report = starts.report(f"test_start[{way}]")
    assert report.outcome == "failed"
    assert f"first cause: rank {report.text.partition('first cause: rank ')[2][0]} {WAYS[way]}" in report.text
    assert report.seconds < 20  # a hang ends before pytest-timeout cuts the test off


def test_a_good_start_after_bad_ones(starts):
    """The next ranks start as if nothing had been."""
    assert starts.report("test_start[none]").outcome == "passed", starts.report("test_start[none]").text
    assert starts.left_behind() == []

"""What the plugin costs a run without ranks, and its options and proofs in one with ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gefen_offload.ranks import RankGroup
from support.child_pytest import run_child

WITHOUT_RANKS = """
import sys
def test_nothing_was_imported():
    loaded = [m for m in sys.modules if m == "torch" or m.startswith("gefen_offload.ranks.")]
    assert sorted(loaded) == ["gefen_offload.ranks.plugin", "gefen_offload.ranks.tier"]
"""
CASES = """
import os, pytest
from dataclasses import dataclass

@dataclass(frozen=True)
class Case:
    name: str

def worker(context, case, tmp):
    assert isinstance(case, Case)
    files = sorted(p.name for p in context.tmp_path.iterdir())
    return case.name, context.digest(case.name), files, os.environ["FROM_TEST"]

@pytest.mark.gloo2
@pytest.mark.parametrize("case", [Case("one"), Case("two")], ids=lambda c: c.name)
def test_case(ranks, case, tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_TEST", case.name)
    result = ranks.options(backend=None).run(worker, case, tmp_path)
    assert result.identical()
    assert result.values[0][0] == case.name
    assert result.values[0][2:] == ([], case.name)

@pytest.mark.gloo2
def test_unknown_option(ranks):
    ranks.options(timout=3)
"""
TIMED = """
import time, pytest

def work(context):
    time.sleep(0.2)

@pytest.mark.gloo2
@pytest.mark.parametrize("number", range(2))
def test_timed(ranks, number):
    ranks.options(backend=None).run(work)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one-process", "xdist"])
def test_the_summary_says_what_a_rank_did(tmp_path, workers):
    """The line at the end begins with the ranks, and not with the names of a class and of the test again."""
    text = "import pytest\ndef work(context):\n    assert context.rank != 1\n@pytest.mark.gloo2\ndef test_it(ranks):\n"
    (tmp_path / "test_it.py").write_text(text + "    ranks.options(backend=None).run(work)\n")
    output = run_child(tmp_path, "test_it.py", *workers, COLUMNS="200").output
    assert "FAILED test_it.py::test_it - rank 1 of 2 failed; rank 1 raised AssertionError" in output


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one-process", "xdist"])
def test_timing(tmp_path, workers):
    """--ranks-timing says for each test what the start of ranks, the body and the rest took; bodies add up."""
    (tmp_path / "test_it.py").write_text(TIMED)
    lines = run_child(tmp_path, "test_it.py", "--ranks-timing", *workers).output.splitlines()
    words = next(line.split() for line in lines if line.split()[:2] == ["test", "boot"])
    rows = {
        line.split()[-1]: dict(zip(words, map(float, line.split()[:8]), strict=True))
        for line in lines
        if "  test_" in line
    }
    total = next(
        dict(zip(words, map(float, line.split()[:8]), strict=True)) for line in lines if line.endswith("  2 tests")
    )
    assert sorted(rows) == ["test_it.py::test_timed[0]", "test_it.py::test_timed[1]"]
    for row in rows.values():
        assert 200 <= row["body"] <= row["test"]
        assert sum(row[word] for word in words[1:]) <= row["test"]
    assert rows["test_it.py::test_timed[1]"]["boot"] < rows["test_it.py::test_timed[0]"]["boot"]
    assert total["body"] == pytest.approx(sum(row["body"] for row in rows.values()), abs=0.2)


TWO_TIERS = """
import pytest

pytestmark = pytest.mark.gloo2

@pytest.mark.gloo4
def test_two_tiers(ranks):
    pass

def test_other():
    pass
"""


def test_a_run_without_ranks_pays_nothing(tmp_path):
    """Without a test on ranks neither torch nor the harness is imported."""
    (tmp_path / "test_it.py").write_text(WITHOUT_RANKS)
    child = run_child(tmp_path, "test_it.py")
    assert child.process.returncode == 0, child.output


@pytest.mark.parametrize("mode", ["importlib", "prepend", "append"])
def test_import_modes(tmp_path, mode):
    """Workers and argument types of a test file are found under every import mode, in a folder without a package."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "test_cases.py").write_text(CASES)
    child = run_child(tmp_path, f"--import-mode={mode}", "deep/er/test_cases.py")
    for name in ("test_case[one]", "test_case[two]"):
        assert child.report(name).outcome == "passed", child.report(name).text
    proofs = child.report("test_case[one]", "teardown").properties
    assert proofs[0][0] == "ranks"
    assert {"world": 2, "devices": ["cpu", "cpu"], "finished": [0, 1]}.items() <= proofs[0][1].items()
    json.dumps(proofs)
    assert "ranks.options() knows no timout; it knows timeout" in child.report("test_unknown_option").text


def test_two_tiers_are_a_mistake(tmp_path):
    """A test with two tiers is a usage error that names them, before any test runs and without a traceback."""
    (tmp_path / "test_it.py").write_text(TWO_TIERS)
    child = run_child(tmp_path, "test_it.py")
    assert "ERROR: test_it.py::test_two_tiers has several tiers: gloo2, gloo4; a test has one" in child.output
    assert "Traceback" not in child.output
    assert child.reports == []
    assert child.process.returncode == pytest.ExitCode.USAGE_ERROR
    assert run_child(tmp_path, "test_it.py", "-k", "other").process.returncode == 0


PROGRAM = """
import sys
from gefen_offload.ranks import RankFailure, RankGroup

def worker(context, number):
    return number + context.rank

if __name__ == "__main__":
    group = RankGroup(2).options(backend=None)
    print(group.run(worker, 5).values)
    try:
        group.run(worker, "text")
    except RankFailure as failure:
        print(failure.first.failure.type)
"""


def test_as_a_library(tmp_path):
    """A plain program uses the harness without pytest, with workers of its own main module."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["[5, 6]", "TypeError"], done.stderr


def test_a_worker_without_a_file(tmp_path):
    """A worker typed at a prompt or piped in is refused before anything starts: a rank could not read it."""
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=PROGRAM, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "TypeError: ranks.run(): the worker must be" in done.stderr
    assert "worker stands in <stdin>, which is no file" in done.stderr


def test_faults_of_ranks_that_are_not_there():
    """A fault for a rank outside the world is refused."""
    from gefen_offload.ranks import faults

    with pytest.raises(ValueError, match="kill rank 2 at mark x: the ranks are 0 to 1"):
        RankGroup(2).options(faults=[faults.kill(2, "x")])
    with pytest.raises(ValueError, match="only a collective has a tensor"):
        faults.corrupt(0, faults.mark("x"))


def test_doctor():
    """The doctor says what it found; without a smoke test it starts nothing."""
    command = [sys.executable, "-m", "gefen_offload.ranks", "doctor", "--no-smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "pidfd_open: True" in done.stdout
    assert "smoke" not in done.stdout

"""The same tests on ranks that a launcher started: torchrun on one machine, and on two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gefen_offload.ranks.attach import Launch, launched
from support.child_pytest import TESTS, run_child, wait_until
from support.machines import free_port, two_machines

SUITE = Path(__file__).parent / "suites" / "attached_suite.py"
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, str(SUITE), "-v"]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", **more}


def torchrun(folder: Path, *arguments: str, **more: str) -> tuple[int, str]:
    """One machine, two ranks; exit status and output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [*PYTEST, "--rootdir", str(folder), *arguments]
    temp = folder / "temp"
    temp.mkdir()
    environ = environment(TMPDIR=str(temp), **more)
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    wait_until(lambda: not list(temp.glob("gefen-ranks-*")), what="the removal of the ranks' folders")
    return done.returncode, done.stdout + done.stderr


def test_who_is_launched():
    """A place is read from the variables of torchrun, SLURM and MPI; a world of one, or none, is no launch."""
    assert launched({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}) == Launch(1, 4, 0)
    assert launched({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}) == Launch(3, 4, 1)
    assert launched({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}) == Launch(2, 3, 2)
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert launched({}) is None


def test_under_torchrun(tmp_path):
    """Two ranks of torchrun run the tests for two, skip those for four, leave out the others; one of them reports."""
    status, output = torchrun(tmp_path, "-k", "adds or arguments or another or expected or without_ranks or says_it")
    assert status == 0, output
    assert "5 passed, 1 skipped" in output
    assert output.count("test session starts") == 1
    assert "left behind" not in output


def test_sizes_under_torchrun(tmp_path):
    """Arguments and results of 0 B to 100 MB come through, and rank 0 alone writes the report's file."""
    status, output = torchrun(tmp_path, "-k", "sizes", "--junitxml", str(tmp_path / "report.xml"))
    assert status == 0, output
    assert "3 passed" in output
    assert 'tests="3"' in (tmp_path / "report.xml").read_text()


def test_one_report_under_torchrun(tmp_path):
    """What fails on one rank alone, in a fixture, before a run or after it, fails the test in the one report."""
    status, output = torchrun(tmp_path, "-k", "adds or fixture_of or leaves or after", "--ranks-timeout", "30")
    assert status != 0
    assert "2 failed, 3 passed" in output, output
    assert "1 error" in output
    assert "rank 1: LookupError: the fixture has no data on rank 1" in output
    assert "its test failed before this run: LookupError: rank 1 goes another way" in output
    assert "rank 1: AssertionError: the check after the run" in output


def test_artifacts_under_torchrun(tmp_path):
    """A failing test leaves the folder that it leaves on spawned ranks, with every rank's output."""
    torchrun(tmp_path, "-k", "test_says_and_raises", "--ranks-artifacts", str(tmp_path / "attached"))
    (tmp_path / "spawned").mkdir()
    run_child(tmp_path / "spawned", str(SUITE), "-k", "test_says_and_raises")
    attached, spawned = (left(f) for f in (tmp_path / "attached", tmp_path / "spawned" / "artifacts"))
    assert sorted(attached) == sorted(spawned)
    for name in ("run0/rank0.out", "run0/rank0.err", "run0/rank1.out", "run0/rank1.err"):
        assert attached[name] == spawned[name], name
    assert "only on rank 1" in attached["report.txt"]
    assert "said by rank 0" in attached["run0/report.txt"]


def left(folder: Path) -> dict[str, str]:
    """The files of the only test's folder."""
    (test,) = (p for p in folder.iterdir() if p.is_dir())
    return {str(p.relative_to(test)): p.read_text() for p in test.rglob("*") if p.is_file()}


def test_a_failure_under_torchrun(tmp_path):
    """A rank that raises fails the test on every rank with its traceback, and later tests run."""
    status, output = torchrun(tmp_path, "-k", "test_raises or adds", "--deselect", f"{SUITE.name}::test_hangs", "-x")
    assert status != 0
    assert "2 passed" in output
    assert "first cause: rank 1 raised ValueError: only on rank 1 in stage 'body'" in output


@pytest.mark.parametrize(
    ("name", "folder", "cause"),
    [
        ("waiting_peer", "test_raises_beside_a_waiting_peer", "first cause: rank 1 raised ValueError: only on rank 1"),
        ("hangs", "test_hangs", "never entered all_reduce (number 1), where rank 0 waited: rank 1 (entered 0 before)"),
        ("setup and store", "test_fault_in_setup-store", "InjectedError: injected in stage 'store'"),
    ],
    ids=["raises", "hangs", "setup"],
)
def test_a_stuck_rank_under_torchrun(tmp_path, name, folder, cause):
    """A rank that is stuck cannot be replaced there: the run ends, and rank 0 has said why."""
    status, output = torchrun(tmp_path, "-k", name)
    assert status != 0
    assert cause in output
    assert cause in (tmp_path / ".ranks" / folder / "run0" / "report.txt").read_text()


def test_ranks_that_collect_differently(tmp_path):
    """Ranks that collected different tests stop before the first one, and say which."""
    status, output = torchrun(tmp_path, "-k", "adds", DISAGREE="1")
    assert status != 0
    assert "the ranks collected different tests" in output
    assert "test_adds[2]" in output


def test_across_two_machines(tmp_path):
    """Two launchers with one rank each, on separate network stacks where allowed: one report, and one folder."""
    with two_machines() as machines:
        port = str(free_port())
        started = []
        for number, machine in enumerate(machines):
            command = [*machine.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--node-rank", str(number), "--nproc-per-node", "1", "--master-port", port]
            command += [
                "--master-addr",
                machines[0].address,
                *PYTEST,
                "--rootdir",
                str(tmp_path),
                "-k",
                "adds or expected or says_and_raises",
            ]
            output = open(tmp_path / f"machine{number}", "w")  # noqa: SIM115 (the child's)
            started.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment(**machine.environ), stdout=output, stderr=subprocess.STDOUT
                )
            )
        codes = [process.wait(200) for process in started]
    first, second = ((tmp_path / f"machine{n}").read_text() for n in (0, 1))
    assert codes != [0, 0], first + second
    assert "1 failed, 3 passed" in first
    assert "passed" not in second
    files = left(tmp_path / ".ranks")
    assert [files[f"run0/rank{rank}.out"] for rank in (0, 1)] == ["said by rank 0\n", "said by rank 1\n"]

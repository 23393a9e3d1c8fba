"""The same tests on ranks that a launcher started: torchrun on one machine, and on two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gefen_offload.ranks.attach import Launch, launched
from support.child_pytest import TESTS, wait_until
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
    status, output = torchrun(tmp_path, "-k", "adds or arguments or another or expected or without")
    assert status == 0, output
    assert "4 passed, 1 skipped, 4 deselected" in output
    assert output.count("test session starts") == 1


def test_a_failure_under_torchrun(tmp_path):
    """A rank that raises fails the test on every rank with its traceback, and later tests run."""
    status, output = torchrun(tmp_path, "-k", "test_raises or adds", "--deselect", f"{SUITE.name}::test_hangs", "-x")
    assert status != 0
    assert "2 passed" in output
    assert "first cause: rank 1 raised ValueError: only on rank 1 in stage 'body'" in output


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("waiting_peer", "first cause: rank 1 raised ValueError: only on rank 1"),
        ("hangs", "never entered all_reduce (number 1), where rank 0 waited: rank 1 (entered 0 before)"),
    ],
    ids=["raises", "hangs"],
)
def test_a_stuck_rank_under_torchrun(tmp_path, name, cause):
    """A rank that is stuck cannot be replaced there: the run ends, and rank 0 has said why."""
    status, output = torchrun(tmp_path, "-k", name)
    assert status != 0
    assert cause in output


def test_ranks_that_collect_differently(tmp_path):
    """Ranks that collected different tests stop before the first one, and say which."""
    status, output = torchrun(tmp_path, "-k", "adds", DISAGREE="1")
    assert status != 0
    assert "the ranks collected different tests" in output
    assert "test_adds[2]" in output


def test_across_two_machines(tmp_path):
    """Two launchers with one rank each, on separate network stacks where that is allowed: one report for both."""
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
                "adds or expected",
            ]
            output = open(tmp_path / f"machine{number}", "w")  # noqa: SIM115 (the child's)
            started.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment(**machine.environ), stdout=output, stderr=subprocess.STDOUT
                )
            )
        codes = [process.wait(200) for process in started]
    first, second = ((tmp_path / f"machine{n}").read_text() for n in (0, 1))
    assert codes == [0, 0], first + second
    assert "3 passed" in first
    assert "passed" not in second

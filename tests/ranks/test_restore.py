"""What counts as left behind by a test, and how many spare ranks replace those of a retired pool."""

from __future__ import annotations

import os

import pytest

from gefen_offload.ranks import harness, restore

PIPE, SOCKET, CUDA = "pipe:[7]", "socket:[8]", "/dev/nvidiactl"


def held(files, groups=0):
    return restore._Holdings(None, groups, set(), set(), files, 0)


@pytest.mark.parametrize(
    ("added", "groups", "told"),
    [
        ([PIPE, SOCKET], 0, [f"open file {PIPE}", f"open file {SOCKET}"]),
        ([CUDA, PIPE, PIPE, SOCKET, "/tmp/kept"], 0, ["open file /tmp/kept"]),
        ([SOCKET], 1, ["1 process group(s)"]),
    ],
    ids=["its-own", "of-cuda", "of-a-group"],
)
def test_pipes_and_sockets_of_libraries_are_theirs(added, groups, told):
    """CUDA, which a first backward on a CPU rank starts too, and a group open some for good; a test's own are told."""
    before = ["/dev/null", "pipe:[1]"]
    assert held(before).compared_with(held(before + added, groups), sockets=True) == told


@pytest.mark.parametrize(("cores", "workers", "sets"), [(2, 1, 1), (8, 1, 2), (32, 1, 4), (32, 4, 2)])
def test_spare_ranks_are_as_many_as_the_machine_affords(monkeypatch, cores, workers, sets):
    """One set for every four cores, which the processes of pytest-xdist share; from one to four."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    assert harness._spare_sets() == sets


def test_the_oldest_spare_ranks_are_taken_first(monkeypatch):
    """They have had the most time to import."""
    monkeypatch.setattr(harness, "_spare_sets", lambda: 2)
    run, key = harness.Harness(), harness.Key(1, "gloo")
    try:
        pool, _ = run.take(key)
        run.retire(pool, refill=True)
        first, second = (spare.pid for spare in run._spares)
        pool, _ = run.take(key)
        assert [process.pid for process in pool.processes] == [first]
        run.retire(pool, refill=True)
        assert run._spares[0].pid == second
    finally:
        run.close()


def test_ranks_that_made_room_are_replaced(monkeypatch, tmp_path):
    """An idle pool that gives its GPUs to a test with new processes is wanted again after it: spare ranks wait."""
    monkeypatch.setattr(harness, "_spare_sets", lambda: 2)
    simulated = tmp_path / "gpus.json"
    simulated.write_text('["SIM-0"]')
    monkeypatch.setenv("GEFEN_RANKS_INVENTORY", str(simulated))
    monkeypatch.setenv("GEFEN_RANKS_LEASES", str(tmp_path / "locks"))
    run, key = harness.Harness(), harness.Key(1, "gloo", gpus=1)
    try:
        pool, _ = run.take(key)
        run.give(pool)
        private, _ = run.take(key, fresh=True)
        assert pool.retired
        assert len(run._spares) == 1  # of two: the test took the other one
        run.retire(private)
    finally:
        run.close()

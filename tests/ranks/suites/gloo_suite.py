"""Broken on purpose: ranks that fail or vanish while their peers wait in a collective. Run by test_failures.py."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

from gefen_offload.ranks import faults as f
from gefen_offload.ranks import identical

LONG = 60
SIZES = {"small": 1, "large": 25_000_000}


def reduce(context, size, times=3):
    """Worker: a few all-reduces, a mark before each."""
    value = torch.ones(size)
    for number in range(times):
        context.step(number)
        dist.all_reduce(value)
    return float(value[0])


def reduce_without_rank_one(context):
    dist.all_reduce(torch.ones(1))
    if context.rank == 1:
        time.sleep(LONG)
    dist.all_reduce(torch.ones(1))


def pollute(context):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.rand(7), random.random()


def surroundings(context):
    group_count = len(dist.distributed_c10d._world.pg_map)
    drawn = torch.rand(3)
    return torch.get_default_dtype(), torch.is_grad_enabled(), drawn, random.random(), group_count, os.getpid()


def sharded_sum(context):
    """Worker: the sum of a tensor sharded over a mesh whose group is this run's own, and stays."""
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor  # seconds, which no other test here has

    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    return float((distribute_tensor(torch.ones(6), mesh, [Shard(0)]) + 1).sum().full_tensor())


def value_and_pid(context, value):
    return value, os.getpid()


ENDINGS = {
    "throw": f.throw,
    "kill": f.kill,
    "leave": f.leave,
}


@pytest.mark.gloo2
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_peer_in_a_collective(ranks, ending, size):
    ranks.options(faults=[ENDINGS[ending](1, f.collective("all_reduce", 2))]).run(reduce, SIZES[size])


@pytest.mark.gloo2
def test_hang_in_a_collective(ranks):
    ranks.options(timeout=3).run(reduce_without_rank_one)


@pytest.mark.gloo2
def test_stopped_in_a_collective(ranks):
    ranks.options(stall=1.5, faults=[f.stop(0, f.collective(nth=2))]).run(reduce, 1)


@pytest.mark.gloo2
@pytest.mark.parametrize("stage", ["device", "store", "process group"])
def test_fault_before_the_group(ranks, stage):
    ranks.options(faults=[f.throw(1, f.stage(stage), "before the group")]).run(reduce, 1)


@pytest.mark.gloo2
def test_corrupt(ranks):
    assert ranks.run(reduce, 8).values == [8.0, 8.0]
    ranks.options(faults=[f.corrupt(1, f.collective("all_reduce", 3))]).run(reduce, 8)


@pytest.mark.gloo2
def test_pollutes(ranks):
    first = ranks.run(surroundings).values
    assert ranks.run(pollute).leaks == ()
    again = ranks.run(surroundings).values
    for rank, (one, other) in enumerate(zip(first, again, strict=True)):
        assert identical(one[:5], other[:5]), rank


@pytest.mark.gloo2
def test_leaves_a_group(ranks):
    for _ in range(2):  # torch remembers the mesh of the first run, which is equal to that of the second
        result = ranks.run(sharded_sum)
        assert result.values == [12.0, 12.0]
        assert result.leaks == ("rank 0: 1 process group(s)", "rank 1: 1 process group(s)")


def destroy_the_default_group(context):
    dist.destroy_process_group()


@pytest.mark.gloo2
def test_destroys_the_default_group(ranks):
    leaks = ranks.run(destroy_the_default_group).leaks
    assert leaks == tuple(f"rank {r}: another default process group, or none, than the harness made" for r in (0, 1))
    assert ranks.run(reduce, 1).values == [8.0, 8.0]


VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_FR_BUFFER_SIZE", "TZ", "TMPDIR", "OF_ONE_TEST")


def environment(context):
    return [os.environ.get(name) for name in VARIABLES], time.tzname, tempfile.gettempdir(), float(torch.tensor(1e-40))


def denormals_are_zero(context):
    torch.set_flush_denormal(True)
    return environment(context)


@pytest.mark.gloo2
def test_environment_of_one_test(ranks, monkeypatch, tmp_path):
    before = ranks.run(environment).values
    with monkeypatch.context() as patch:
        for name, value in zip(VARIABLES, ("3", "7", "9", "Asia/Tokyo", str(tmp_path), "yes"), strict=True):
            patch.setenv(name, value)
        changed = ranks.run(denormals_are_zero).values[0]
    assert changed[0][:4] == ["3", "7", "9", "Asia/Tokyo"]
    assert (changed[1], changed[3]) == (("JST", "JST"), 0.0)
    again = ranks.run(environment).values
    assert [value[:2] for value in again] == [value[:2] for value in before]
    assert [value[3] for value in again] == [value[3] for value in before] != [0.0, 0.0]
    assert [value[2] for value in again] == [value[2] for value in before]


@pytest.mark.gloo2
def test_stays_warm(ranks):
    assert ranks.run(value_and_pid, 1).values[0][1] == ranks.run(value_and_pid, 2).values[0][1]


@pytest.mark.gloo2
def test_new_group(ranks):
    assert ranks.options(new_group=True).run(reduce, 1).values == [8.0, 8.0]
    assert ranks.run(reduce, 1).values == [8.0, 8.0]


@pytest.mark.gloo2
def test_killed_by_an_alarm(ranks):
    ranks.run(reduce_until_alarm)


def reduce_until_alarm(context):
    if context.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    while True:
        dist.all_reduce(torch.ones(1000))

"""Tests that also run on a launcher's ranks. Run by test_attach.py."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from gefen_offload.ranks import expect_failure
from gefen_offload.ranks import faults as f

COLLECTED = range(2 + (os.environ.get("DISAGREE") == os.environ.get("RANK", "none")))


def add(context, number):
    value = torch.full((3,), float(context.rank + number))
    dist.all_reduce(value)
    return value, os.getpid()


def same_argument(context, path):
    return path


def rank_one_raises(context, peer_waits):
    if context.rank == 1:
        raise ValueError("only on rank 1")
    if peer_waits:
        dist.all_reduce(torch.ones(1))


def say_and_raise(context):
    print(f"said by rank {context.rank}")
    os.write(2, f"cried by rank {context.rank}\n".encode())
    if context.rank == 1:
        raise ValueError("only on rank 1")
    return context.rank


def say(context):
    print(f"said by rank {context.rank}")


def many_bytes(context, data):
    return data


def rank_one_stays_away(context):
    if context.rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def test_without_ranks():
    raise AssertionError("must not run under a launcher")


@pytest.mark.gloo2
@pytest.mark.parametrize("number", COLLECTED)
def test_adds(ranks, number):
    result = ranks.run(add, number)
    assert [value.tolist() for value, _ in result.values] == [[1.0 + 2 * number] * 3] * 2
    assert os.getpid() in [pid for _, pid in result.values]


@pytest.mark.gloo2
def test_arguments_of_rank_zero(ranks, tmp_path):
    first, second = ranks.run(same_argument, str(tmp_path)).values
    assert first == second


@pytest.mark.gloo4
def test_of_another_world(ranks):
    raise AssertionError("must not run with two ranks")


@pytest.mark.gloo2
def test_expected(ranks):
    with expect_failure(rank=1, exception=ValueError, message="only on rank 1"):
        ranks.run(rank_one_raises, False)
    assert ranks.run(add, 0).values[0][0].tolist() == [1.0] * 3


@pytest.mark.gloo2
def test_raises(ranks):
    ranks.run(rank_one_raises, False)


@pytest.mark.gloo2
def test_raises_beside_a_waiting_peer(ranks):
    ranks.run(rank_one_raises, True)


@pytest.mark.gloo2
def test_hangs(ranks):
    ranks.options(timeout=3).run(rank_one_stays_away)


@pytest.mark.gloo2
def test_says_it(ranks):
    result = ranks.run(say)
    assert [result.stdout(rank) for rank in (0, 1)] == ["said by rank 0\n", "said by rank 1\n"]


@pytest.mark.gloo2
def test_says_and_raises(ranks):
    ranks.run(say_and_raise)


@pytest.mark.gloo2
@pytest.mark.parametrize("size", [0, 1, 100_000_000], ids=str)
def test_sizes(ranks, size):
    assert ranks.run(many_bytes, bytes(size)).values == [bytes(size)] * 2


@pytest.fixture
def broken_on_rank_one():
    if os.environ.get("RANK") == "1":
        raise LookupError("the fixture has no data on rank 1")


@pytest.mark.gloo2
def test_fixture_of_rank_one(broken_on_rank_one, ranks):
    ranks.run(add, 0)


@pytest.mark.gloo2
def test_leaves_before_a_run(ranks):
    if os.environ.get("RANK") == "1":
        raise LookupError("rank 1 goes another way")
    ranks.run(say)


@pytest.mark.gloo2
def test_after_it(ranks):
    assert ranks.run(add, 5).values[0][0].tolist() == [11.0] * 3


@pytest.mark.gloo2
def test_check_after_the_run(ranks):
    ranks.run(add, 0)
    assert os.environ.get("RANK") == "0", "the check after the run"


@pytest.mark.gloo2
@pytest.mark.parametrize("stage", ["device", "store", "process group"])
def test_fault_in_setup(ranks, stage):
    ranks.options(faults=[f.throw(1, f.stage(stage))]).run(add, 0)

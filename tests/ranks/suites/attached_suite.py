"""Tests that also run on a launcher's ranks. Run by test_attach.py."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from gefen_offload.ranks import expect_failure

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

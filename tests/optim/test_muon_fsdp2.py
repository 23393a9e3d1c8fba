"""GefenMuon on FSDP2 shards: whole matrices are gathered, momentum stays with its rank."""

from __future__ import annotations

import pytest
import torch

from support.sharded_muon import refuse_offload, resume, train

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_steps(ranks, name):
    """Every rank ends with the same whole matrices, and they are the ones worked out on one rank."""
    result = ranks.run(train, DTYPES[name], 5)
    assert result.identical()
    for stepped, expected in result.values:
        for ours, theirs in zip(stepped, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.gloo2
@pytest.mark.parametrize("name", DTYPES)
def test_steps_on_two_ranks_are_those_of_whole_matrices(ranks, name):
    """Uneven shards, and one without a row, step as the whole matrix with each rank's momentum does."""
    check_steps(ranks, name)


@pytest.mark.gloo4
def test_steps_on_four_ranks_are_those_of_whole_matrices(ranks):
    """The same on four ranks, where one matrix leaves three of them without a row."""
    check_steps(ranks, "float32")


@pytest.mark.gpu2
@pytest.mark.parametrize("name", DTYPES)
def test_steps_on_two_gpus_are_those_of_whole_matrices(ranks, name):
    """The same through NCCL."""
    check_steps(ranks, name)


@pytest.mark.gloo2
def test_a_rank_local_checkpoint_resumes(ranks):
    """Three steps, each rank's own checkpoint and three more are six steps, to the bit."""
    for straight, continued in ranks.run(resume, torch.float32).values:
        for a, b in zip(straight, continued, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gloo2
def test_offload_is_refused_on_every_rank(ranks):
    """No rank activates it, and none waits for another."""
    for reason, active in ranks.run(refuse_offload).values:
        assert reason in ("dtensor", "optimizer")
        assert not active

"""GefenMuon and the hybrid in distributed training, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from support.muon_runs import hybrid_on_ddp, hybrid_on_fsdp2, moved_back, muon_on_zero_redundancy, twice

BACKENDS = ("gefen", "adamw")


def check_replicas(ranks, worker, *args):
    """Every rank holds the same finite parameters."""
    result = ranks.run(worker, *args)
    assert result.identical()
    assert all(bool(torch.isfinite(value).all()) for value in result.values[0])


@pytest.mark.gloo2
@pytest.mark.parametrize("backend", BACKENDS)
def test_ddp_replicas_agree(ranks, backend):
    """After steps on batches that differ between ranks, DDP's replicas are equal to the bit."""
    check_replicas(ranks, hybrid_on_ddp, backend)


@pytest.mark.gloo2
@pytest.mark.parametrize("backend", BACKENDS)
def test_fsdp2_ranks_agree(ranks, backend):
    """On FSDP2 shards both sides of the hybrid step, and every rank gathers the same parameters."""
    check_replicas(ranks, hybrid_on_fsdp2, backend)


@pytest.mark.gloo2
def test_zero_redundancy_ranks_agree(ranks):
    """ZeroRedundancyOptimizer gives each rank whole matrices, and the replicas stay equal."""
    check_replicas(ranks, muon_on_zero_redundancy)


@pytest.mark.gpu2
@pytest.mark.parametrize("worker", [hybrid_on_ddp, hybrid_on_fsdp2], ids=["ddp", "fsdp2"])
def test_ranks_agree_on_gpus(ranks, worker):
    """The same through NCCL."""
    check_replicas(ranks, worker, "gefen")


@pytest.mark.gpu1
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gpu_run_is_reproducible(ranks, backend):
    """Two equal trainings on one GPU give the same bits."""
    for first, second in ranks.run(twice, backend).values:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu1
@pytest.mark.parametrize("backend", BACKENDS)
def test_state_moves_back_to_the_gpu(ranks, backend):
    """State that something moved to the CPU returns beside its parameters, and training goes on to the same bits."""
    for where, straight, continued in ranks.run(moved_back, backend).values:
        assert where == ["cuda"]
        assert all(torch.equal(a, b) for a, b in zip(straight, continued, strict=True))

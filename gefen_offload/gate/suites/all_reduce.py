"""The first session of a run: two ranks all-reduce a known value, on two GPUs where there are two."""

from __future__ import annotations

import pytest

from gefen_offload.ranks import RankContext, RankGroup

EXPECTED = 3.0


def summed(context: RankContext) -> tuple[float, float]:
    """Worker: least and greatest element of the sum over ranks of rank + 1, on the rank's own device."""
    import torch
    import torch.distributed as dist

    value = torch.full((4096,), float(context.rank + 1), device=context.device)
    dist.all_reduce(value)
    return value.min().item(), value.max().item()


@pytest.mark.gpu2
def test_two_gpus(ranks: RankGroup) -> None:
    """Two GPUs agree on the sum over NCCL."""
    assert ranks.run(summed).values == [(EXPECTED, EXPECTED)] * 2


@pytest.mark.gloo2
def test_two_processes(ranks: RankGroup) -> None:
    """Two CPU ranks agree on the sum over Gloo."""
    assert ranks.run(summed).values == [(EXPECTED, EXPECTED)] * 2

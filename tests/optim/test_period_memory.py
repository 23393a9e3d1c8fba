"""The period of a very large gradient is found in bounded memory."""

from __future__ import annotations

import numpy as np
import torch

from gefen_offload.optim.codebook import block_histogram
from gefen_offload.optim.period import divisor_errors, divisors_of
from support.allocations import PeakBytes

MIB = 2**20


def test_a_hundred_million_elements_in_64_mib() -> None:
    """10^8 bfloat16 elements need under 64 MiB beside the gradient, and divisors of every size get their error."""
    gradient = torch.empty(10**8, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(0))
    with PeakBytes() as memory:
        errors = dict(zip(divisors_of(10**8), divisor_errors(gradient), strict=True))
    assert 4 * MIB < memory.peak <= 64 * MIB
    for divisor in (2, 5**5, 2 * 10**6, 5 * 10**7):
        assert abs(errors[divisor] - _direct_error(gradient, divisor)) <= 1e-11 * max(errors.values())


def test_a_histogram_of_ten_million_elements_in_64_mib() -> None:
    """Neither short blocks nor one block longer than a chunk need 64 MiB beside the gradient."""
    gradient = torch.empty(10**7, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(0))
    for period in (1000, 5 * 10**6):
        with PeakBytes() as memory:
            counts = block_histogram(gradient, period)
        assert counts.sum() == 10**7
        assert 4 * MIB < memory.peak <= 64 * MIB


def _direct_error(gradient: torch.Tensor, divisor: int) -> float:
    """err(d) from the variance of each block about its own mean, a few blocks at a time."""
    total = 0.0
    for part in gradient.split(max(divisor, 10**6 // divisor * divisor)):
        total += float(np.square(part.float().numpy()).astype(np.float64).reshape(-1, divisor).var(1).sum())
    return float(np.sqrt(total * divisor / gradient.numel()))

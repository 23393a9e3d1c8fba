"""Gradients to read with the kernels of a first step and with torch's operations, and how far apart the results are.

`python -m support.interpreted support.first_kernels` compares the small cases on the CPU and prints one JSON
object a line.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from gefen_offload.optim.codebook import block_histogram
from gefen_offload.optim.fused.first_step import FirstStep
from gefen_offload.optim.period import divisor_errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LITTLE = (  # elements and period
    (2**14, 8),  # more doublings than one launch takes
    (3 * 2**11, 48),
    (3 * 1031, 1031),  # an odd divisor that no thread reads alone
    (2 * 8209, 1),
    (5 * 7 * 9, 315),
)
LARGE = (
    (2**18, 8),
    (96 * 4000, 40),
    (3 * 9001, 9001),
    (131 * 2**10, 131 * 2**7),
    (3 * 2**22, 3 * 2**21),  # a block longer than one launch counts
    (509 * 2**12, 509),
)


def case_name(n: int, period: int, dtype: torch.dtype) -> str:
    """For a test id."""
    return f"{str(dtype).removeprefix('torch.')}-{n}-{period}"


def compare(n: int, period: int, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Whether the histograms are equal, how far apart the errors are, and whether a second reading has their bits."""
    first, gradient = FirstStep(device), _gradient(n, period, dtype).to(device)
    counts = first.queue_counts([(gradient, period), (gradient[:period], period)])
    errors = first.queue_errors([gradient, gradient[: n // 2], gradient])
    expected = block_histogram(gradient, period) + block_histogram(gradient[:period], period)
    ours, _, again = errors()
    theirs = divisor_errors(gradient)
    return {
        "name": case_name(n, period, dtype),
        "same_counts": torch.equal(counts(), expected.cpu()),
        "apart": max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(theirs),
        "same_again": ours == again,
    }


def _gradient(n: int, period: int, dtype: torch.dtype) -> Tensor:
    """Heavy-tailed, with a block of zeros at its end unless it is one block."""
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(n)) ** 3
    gradient[max(period, n - period) :] = 0
    return gradient.to(dtype)


if __name__ == "__main__":
    for case in LITTLE:
        for kind in DTYPES:
            print(json.dumps(compare(*case, kind, torch.device("cpu"))), flush=True)

"""Gradients so small that they are read on the host, whatever device they are on.

[Note: small] A small model would spend its first step on compiling kernels, and on waiting for the device once for each
parameter. The size alone decides, so that every path decides alike. Up to 2**15 elements torch does not split a sum
among threads: their number does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from gefen_offload.optim.codebook import BINS, block_histogram
from gefen_offload.optim.period import divisor_errors_of_rows

SMALL = 2**15  # elements of the largest
TOGETHER = 128  # gradients copied at once, which bounds the device memory that this takes


class SmallGradients:
    """Reads gradients on the host, equal ones together."""

    def queue_errors(self, gradients: Sequence[Tensor]) -> Callable[[], list[list[float]]]:
        """Bring the gradients to the host; what is returned gives `period.divisor_errors` of each."""
        here = bring(gradients)
        return lambda: _errors(here)

    def queue_counts(self, gradients: Sequence[tuple[Tensor, int]]) -> Callable[[], Tensor]:
        """Bring the gradients to the host; what is returned gives the sum of `codebook.block_histogram` of each."""
        here = bring([gradient for gradient, _ in gradients])
        return lambda: _counts(here, [period for _, period in gradients])


def bring(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The flat gradients, on the host, those of one device and dtype in few copies; its own stay as they are."""
    here = list(gradients)
    for alike in _alike((gradient.device, gradient.dtype) for gradient in gradients):
        if gradients[alike[0]].device.type == "cpu":
            continue
        for first in range(0, len(alike), TOGETHER):
            members = alike[first : first + TOGETHER]
            together = torch.cat([gradients[i] for i in members]).cpu()
            for i, part in zip(members, torch.split(together, [gradients[i].numel() for i in members]), strict=True):
                here[i] = part
    return here


def _errors(gradients: Sequence[Tensor]) -> list[list[float]]:
    errors: dict[int, list[float]] = {}
    for alike in _alike((gradient.numel(), gradient.dtype) for gradient in gradients):
        rows = torch.stack([gradients[i] for i in alike])
        errors.update(zip(alike, divisor_errors_of_rows(rows), strict=True))
    return [errors[i] for i in range(len(gradients))]


def _counts(gradients: Sequence[Tensor], periods: Sequence[int]) -> Tensor:
    counts = torch.zeros(BINS, dtype=torch.int64)
    for alike in _alike((period, gradient.dtype) for gradient, period in zip(gradients, periods, strict=True)):
        counts += block_histogram(torch.cat([gradients[i] for i in alike]), periods[alike[0]])
    return counts


def _alike(keys: Iterable[Hashable]) -> list[list[int]]:
    """The positions of equal keys, together."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())

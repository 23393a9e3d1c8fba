"""The codebook: 256 levels in [-1, 1], learnt from a histogram of gradients scaled by the largest of their block.

[Note: ties] The optimal codebook is not unique, so the order of the arithmetic is part of the definition: segment costs
come from float64 prefix sums of w, w x and w x^2, and the first of equal minima wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BINS = 4096
LEVELS = 256
CHUNK = 2**20  # gradient elements binned at once

_Floats = npt.NDArray[Any]  # float64
_Indices = npt.NDArray[Any]  # int64


# --- the histogram --------------------------------------------------------------------------------------------------


def block_histogram(gradient: Tensor, period: int) -> Tensor:
    """Counts, int64 (4096,), of the flat gradient's elements divided by the absmax of their block of `period` elements.

    Bin i holds [-1 + 2i/4096, -1 + 2(i+1)/4096), the last one 1 as well. In float32, on the gradient's device, in
    bounded memory. A block of zeros counts as zeros, and so does what is not a number after the division.
    """
    if period < 1 or gradient.numel() % period:
        raise ValueError(f"the period {period} does not divide a gradient of {gradient.numel()} elements")
    counts = torch.zeros(BINS, dtype=torch.int64, device=gradient.device)
    for rows, largest in block_pieces(gradient.detach().reshape(-1), period, CHUNK):
        counts += torch.bincount(_bins(rows.float(), largest), minlength=BINS)
    return counts


def block_pieces(gradient: Tensor, period: int, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The flat gradient in pieces of at most `chunk` elements, (k, ...), each with its blocks' largest |g|.

    The rows are blocks, or one row is a part of a block longer than a chunk. The largest are float32, (k, 1).
    """
    if period <= chunk:
        for piece in torch.split(gradient, chunk // period * period):
            yield piece.view(-1, period), _largest(piece.view(-1, period))
        return
    for block in torch.split(gradient, period):
        parts = [part.view(1, -1) for part in torch.split(block, chunk)]
        largest = torch.cat([_largest(part) for part in parts]).amax(0, keepdim=True)
        for part in parts:
            yield part, largest


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(1, keepdim=True).float()


def _bins(rows: Tensor, largest: Tensor) -> Tensor:
    scaled = (rows / largest).nan_to_num_(nan=0.0)
    return scaled.add_(1).mul_(BINS // 2).clamp_(0, BINS - 1).int().view(-1)  # of what is not negative, the floor


# --- the levels -----------------------------------------------------------------------------------------------------


def solve_codebook(counts: Tensor) -> Tensor:
    """The 256 levels, float32 on the CPU, ascending, for a histogram of 4096 counts.

    The exact weighted k-means, in one dimension, of the centres of the non-empty bins in 256 segments, where the first
    level is held at -1 and the last at 1. With fewer non-empty bins than levels: their centres, the last one repeated.
    """
    weights = counts.detach().cpu().numpy().astype(np.float64)
    if weights.shape != (BINS,):
        raise ValueError(f"a histogram has the shape ({BINS},), not {weights.shape}")
    filled = np.flatnonzero(weights)
    if not len(filled):
        raise ValueError("a codebook cannot be learnt from a histogram without a count")
    centres = -1 + (filled + 0.5) * (2 / BINS)
    return torch.from_numpy(fit_levels(centres, weights[filled], LEVELS).astype(np.float32))


def fit_levels(points: _Floats, weights: _Floats, levels: int) -> _Floats:
    """The ascending levels, two or more, the first -1 and the last 1, that fit ascending weighted points."""
    if len(points) < levels:
        inner = np.concatenate([points, np.full(levels - len(points), points[-1])])
    else:
        sums = _PrefixSums(points, weights)
        bounds = _segment_bounds(sums, levels)
        inner = sums.means(bounds[:-1], bounds[1:])
    inner[0], inner[-1] = -1.0, 1.0
    return inner


class _PrefixSums:
    """Costs and means of segments [i, j) of the points, from sums over all points before each."""

    def __init__(self, points: _Floats, weights: _Floats) -> None:
        self._w, self._wx, self._wxx = (
            np.concatenate([[0.0], np.cumsum(terms)])
            for terms in (weights, weights * points, weights * points * points)
        )
        self.count = len(points)

    def inner_costs(self, i: _Indices, j: _Indices) -> _Floats:
        """The weighted squared distance of each segment from its mean."""
        s = self._wx[j] - self._wx[i]
        costs: _Floats = (self._wxx[j] - self._wxx[i]) - s * s / (self._w[j] - self._w[i])
        return costs

    def first_costs(self) -> _Floats:
        """The weighted squared distance from -1 of the segments [0, j), for each j."""
        costs: _Floats = self._wxx + 2 * self._wx + self._w
        return costs

    def last_costs(self) -> _Floats:
        """The weighted squared distance from 1 of the segments [i, end), for each i."""
        s, w = self._wx[-1] - self._wx, self._w[-1] - self._w
        costs: _Floats = (self._wxx[-1] - self._wxx) - 2 * s + w
        return costs

    def means(self, i: _Indices, j: _Indices) -> _Floats:
        """The weighted mean of each segment."""
        means: _Floats = (self._wx[j] - self._wx[i]) / (self._w[j] - self._w[i])
        return means


def _segment_bounds(sums: _PrefixSums, levels: int) -> _Indices:
    """The ends of the optimal segments: `levels` + 1 indices from 0 to the number of points."""
    best = sums.first_costs()
    choices = []
    for segments in range(2, levels):
        best, choice = _add_segment(sums, best, segments, sums.count - (levels - segments))
        choices.append(choice)
    last = best + sums.last_costs()
    bounds = [sums.count, levels - 1 + int(np.argmin(last[levels - 1 : sums.count]))]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return np.array([*bounds, 0][::-1])


def _add_segment(sums: _PrefixSums, best: _Floats, segments: int, end: int) -> tuple[_Floats, _Indices]:
    """The best cost of the points before j in `segments` segments, and where its last segment begins, for j <= end.

    `best` is that cost for one segment fewer. The first best beginning never moves left as j grows, so each j need only
    look between those of two neighbours found before it. [Note: all columns of one spacing are searched together]
    """
    cost = np.full(sums.count + 1, np.inf)
    choice = np.full(sums.count + 2, end - 1, dtype=np.int64)
    choice[segments - 1] = segments - 1
    spacing = 1 << (end - segments + 1).bit_length()
    while spacing > 1:
        j = np.arange(segments - 1 + spacing // 2, end + 1, spacing)
        low = choice[j - spacing // 2]
        high = np.minimum(choice[np.minimum(j + spacing // 2, end + 1)], j - 1)
        cost[j], choice[j] = _first_minima(sums, best, j, low, high)
        spacing //= 2
    return cost, choice[:-1]


def _first_minima(
    sums: _PrefixSums, best: _Floats, j: _Indices, low: _Indices, high: _Indices
) -> tuple[_Floats, _Indices]:
    """For each j the least `best[i]` + cost of [i, j) over low <= i <= high, and the first such i."""
    lengths = high - low + 1
    starts = np.cumsum(lengths) - lengths
    i = np.arange(lengths.sum()) + np.repeat(low - starts, lengths)
    totals = best[i] + sums.inner_costs(i, np.repeat(j, lengths))
    least = np.minimum.reduceat(totals, starts)
    where = np.flatnonzero(totals == np.repeat(least, lengths))
    return least, i[where[np.searchsorted(where, starts)]]


# --- its use --------------------------------------------------------------------------------------------------------


def nearest_level(x: Tensor, levels: Tensor) -> Tensor:
    """The index, uint8, of the level nearest to each x, by float32 distances.

    The choice is between the last level below x and the first at or above it; equal distances go to the one below, so
    repeated levels keep their own indices. Beyond the ends the end level is taken.
    """
    x = x.float()
    above = torch.searchsorted(levels, x.contiguous()).clamp_(max=LEVELS - 1)
    below = (above - 1).clamp_(min=0)
    nearer_above = levels[above] - x < x - levels[below]
    return torch.where(nearer_above, above, below).to(torch.uint8)


def requantise_map(old: Tensor, new: Tensor) -> Tensor:
    """For each index of the levels `old` the index, uint8 (256,), of the nearest of the levels `new`."""
    return nearest_level(old, new)

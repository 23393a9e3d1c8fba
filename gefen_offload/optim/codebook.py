"""The codebook: 256 levels in [-1, 1], learnt from a histogram of gradients scaled by the largest of their block.

[Note: ties] The optimal codebook is not unique, so the order of the arithmetic is part of the definition: segment costs
come from float64 prefix sums of w, w x and w x^2, and the first of equal minima wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BINS = 4096
LEVELS = 256
CHUNK = 2**20  # gradient elements binned at once
FAN = 8  # how many times closer together the columns of a round are than those of the one before

_Floats = npt.NDArray[Any]  # float64
_Indices = npt.NDArray[Any]  # int64
_Round = tuple[_Indices, _Indices, _Indices]  # columns, and their neighbours on the left and on the right


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
    """Sums of w, w x and w x^2 over all points before each, (3, points + 1), and what segments [i, j) cost by them."""

    def __init__(self, points: _Floats, weights: _Floats) -> None:
        terms = np.stack([weights, weights * points, weights * points * points])
        self.table = np.concatenate([np.zeros((3, 1)), np.cumsum(terms, axis=1)], axis=1)
        self.count = len(points)

    def first_costs(self) -> _Floats:
        """The weighted squared distance from -1 of the segments [0, j), for each j."""
        w, wx, wxx = self.table
        costs: _Floats = wxx + 2 * wx + w
        return costs

    def last_costs(self) -> _Floats:
        """The weighted squared distance from 1 of the segments [i, end), for each i."""
        w, wx, wxx = self.table[:, -1:] - self.table
        costs: _Floats = wxx - 2 * wx + w
        return costs

    def means(self, i: _Indices, j: _Indices) -> _Floats:
        """The weighted mean of each segment."""
        w, wx, _ = self.table[:, j] - self.table[:, i]
        means: _Floats = wx / w
        return means


def _segment_bounds(sums: _PrefixSums, levels: int) -> _Indices:
    """The ends of the optimal segments: `levels` + 1 indices from 0 to the number of points.

    With k segments the last one ends at k + x and begins at k - 1 + y, where 0 <= y <= x < `columns`: each segment has
    a point, and so do those that follow.
    """
    columns = sums.count - levels + 1
    best = sums.first_costs()[1 : 1 + columns]
    choices = [np.zeros(columns, dtype=np.int64)]
    rounds = _rounds(columns)
    for k in range(2, levels):
        best, choice = _add_segment(sums.table[:, k - 1 :], best, choices[-1], rounds)
        choices.append(choice)
    y = int(np.argmin(best + sums.last_costs()[levels - 1 : sums.count]))
    bounds = [sums.count, levels - 1 + y]
    for k in range(levels - 1, 1, -1):
        y = int(choices[k - 1][y])
        bounds.append(k - 1 + y)
    return np.array([*bounds, 0][::-1])


def _add_segment(table: _Floats, best: _Floats, before: _Indices, rounds: Sequence[_Round]) -> tuple[_Floats, _Indices]:
    """The best cost of every x with one segment more, and the first best y, the position where that segment begins.

    `best[y]` is the cost with one segment fewer, whose choices were `before`; `table` has the prefix sums from y = 0.
    [Note: monotone choices] The first best beginning never moves left, neither as the end moves right nor, at one end,
    as there are more segments. So each x need only look between those of its neighbours found in earlier rounds, and
    not left of the one before.
    """
    columns = len(best)
    cost = np.empty(columns)
    choice = np.full(columns + 1, columns, dtype=np.int64)  # the last one stands right of all
    choice[0] = 0
    least = np.append(before[1:], before[-1]) - 1
    for x, left, right in rounds:
        low = np.maximum(choice[left], least[x])
        cost[x], choice[x] = _first_minima(table, best, x, low, np.minimum(choice[right], x))
    return cost, choice[:-1]


def _first_minima(
    table: _Floats, best: _Floats, x: _Indices, low: _Indices, high: _Indices
) -> tuple[_Floats, _Indices]:
    """For each x the least `best[y]` + cost of the segment from y to x over low <= y <= high, and the first such y."""
    lengths = high - low + 1
    starts = np.cumsum(lengths) - lengths
    y = np.arange(lengths.sum()) + np.repeat(low - starts, lengths)
    w, wx, wxx = (np.repeat(sums[x + 1], lengths) - sums[y] for sums in table)
    totals = best[y] + (wxx - wx * wx / w)
    least = np.minimum.reduceat(totals, starts)
    where = np.flatnonzero(totals == np.repeat(least, lengths))
    return least, y[_firsts(where, np.repeat(np.arange(len(x)), lengths)[where], len(x))]


def _firsts(values: _Indices, owners: _Indices, count: int) -> _Indices:
    """For each of `count` owners, ascending, the first of its values."""
    firsts = np.empty(count, dtype=np.int64)
    firsts[owners[::-1]] = values[::-1]  # the last to be written stays
    return firsts


def _rounds(columns: int) -> list[_Round]:
    """All columns, in rounds of ever closer ones, each with its nearest neighbours in earlier rounds.

    Of x = 0 the left one is itself, and where there is none on the right it is `columns`. A few long rounds cost less
    than many short ones that look at less.
    """
    spacing = FAN
    while spacing < columns:
        spacing *= FAN
    rounds = [(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, columns))]
    while spacing > 1:
        x = np.arange(0, columns, spacing // FAN)
        x = x[x % spacing > 0]
        left = x // spacing * spacing
        if len(x):
            rounds.append((x, left, np.minimum(left + spacing, columns)))
        spacing //= FAN
    return rounds


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

"""The algorithm written as plainly as its description: slow, in numpy float64 where that is fair, one step at a time.

Nothing here is imported by the package, and nothing here imports the package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

# --- the period -----------------------------------------------------------------------------------------------------


def period_errors(gradient: Tensor) -> list[float]:
    """err(d), for each proper divisor d of the element count, from every block's own variance."""
    squares = np.square(gradient.float().flatten().numpy()).astype(np.float64)
    return [math.sqrt(squares.reshape(-1, d).var(axis=1).mean()) for d in proper_divisors(squares.size)]


def period_by_definition(gradient: Tensor, shape: tuple[int, ...]) -> int:
    """The period, by trying every divisor."""
    n = gradient.numel()
    if n == 1:
        return 1
    errors = period_errors(gradient)
    scores = [1e-12] + [errors[i] - errors[i - 1] for i in range(1, len(errors))]
    best = min(scores)
    winner = min(d for d, score in zip(proper_divisors(n), scores, strict=True) if score - best <= 1e-9 * max(errors))
    if winner >= 8:
        return winner
    if n < 8:
        return 1
    fallbacks = [max(d for d in range(1, 2049) if n % d == 0)]
    if len(shape) >= 2:
        fallbacks.append(shape[-1])
    return max([1] + [d for d in fallbacks if d >= 8])


def proper_divisors(n: int) -> list[int]:
    """The divisors of n in ascending order, without n."""
    return [d for d in range(1, n) if n % d == 0]


# --- the codebook ---------------------------------------------------------------------------------------------------


def histogram_by_definition(gradient: Tensor, period: int) -> Any:
    """Counts of 4096 bins, one element at a time."""
    counts = np.zeros(4096, dtype=np.int64)
    for block in gradient.float().flatten().numpy().reshape(-1, period):
        largest = np.abs(block).max()
        for value in block:
            scaled = value / largest if largest > 0 else np.float32(0)
            counts[min(max(math.floor((scaled + np.float32(1)) / np.float32(2 / 4096)), 0), 4095)] += 1
    return counts


def levels_by_dynamic_programming(points: Any, weights: Any, levels: int) -> Any:
    """The optimal levels by the full table: every count of segments, every end, every beginning."""
    n = len(points)
    w, wx, wxx = (np.concatenate([[0.0], np.cumsum(t)]) for t in (weights, weights * points, weights * points * points))

    def cost(i: int, j: int, segment: int) -> float:
        q, s, m = wxx[j] - wxx[i], wx[j] - wx[i], w[j] - w[i]
        if segment == 0:
            return q + 2 * s + m
        return q - 2 * s + m if segment == levels - 1 else q - s * s / m

    best = np.full((levels + 1, n + 1), np.inf)
    begin = np.zeros((levels + 1, n + 1), dtype=int)
    best[0, 0] = 0.0
    for k in range(1, levels + 1):
        for j in range(k, n + 1):
            for i in range(k - 1, j):
                total = best[k - 1, i] + cost(i, j, k - 1)
                if total < best[k, j]:
                    best[k, j], begin[k, j] = total, i
    result, j = np.empty(levels), n
    for k in range(levels, 0, -1):
        i = begin[k, j]
        result[k - 1] = (wx[j] - wx[i]) / (w[j] - w[i])
        j = i
    result[0], result[-1] = -1.0, 1.0
    return np.sort(result)


def codebook_cost(points: Any, weights: Any, levels: Any) -> float:
    """The weighted squared distance of the points from the levels nearest to them."""
    return float((weights * np.square(points[:, None] - levels[None, :]).min(axis=1)).sum())


# --- the index ------------------------------------------------------------------------------------------------------


def nearest_index(x: np.float32, levels: Any) -> int:
    """The nearer of the last level below x and the first at or above it, the one below when they are equally far."""
    below = [i for i in range(len(levels)) if levels[i] < x]
    above = [i for i in range(len(levels)) if levels[i] >= x]
    if not below or not above:
        return above[0] if above else below[-1]
    lo, hi = below[-1], above[0]
    return hi if levels[hi] - x < x - levels[lo] else lo


def as_float32(x: Tensor) -> Any:
    """The tensor as a numpy float32 array."""
    return x.detach().to(torch.float32).numpy()

"""The algorithm written as plainly as its description: slow, in numpy float64 where that is fair, one step at a time.

Nothing here is imported by the package, and nothing here imports the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


# --- one step -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """What a value may be: float64 arrays, `tolerance` to be added on both sides."""

    expected: Any
    tolerance: Any

    def admit(self, found: Tensor) -> bool:
        """Whether every element found is within the bounds."""
        difference = np.abs(as_float64(found).reshape(self.expected.shape) - self.expected)
        return bool((difference <= self.tolerance).all())


def levels_from_centres(counts: Any) -> Any:
    """The 256 levels of a histogram with at most 256 filled bins: their centres, the last repeated, the ends fixed."""
    filled = np.flatnonzero(counts)
    centres = -1 + (filled + 0.5) * (2 / 4096)
    levels = np.concatenate([centres, np.full(256 - len(centres), centres[-1])])
    levels[0], levels[-1] = -1, 1
    return np.sort(levels).astype(np.float32)


def stored_momentum(
    indices: Tensor, magnitude: Tensor, levels: Tensor, dtype: torch.dtype, narrow: bool = False
) -> Any:
    """What indices and magnitudes stand for, (blocks, period); `narrow` has the magnitudes rounded to the dtype too."""
    scale = magnitude.to(dtype) if narrow else magnitude
    return as_float64(levels.to(dtype))[indices.numpy()] * as_float64(scale)


def averaged(before: Any, gradient: Any, beta1: float, dtype: torch.dtype) -> Bounds:
    """beta1 m + (1 - beta1) g, to four roundings, in the dtype of the arithmetic, of what goes into it."""
    expected = beta1 * before + (1 - beta1) * gradient
    return Bounds(expected, 4 * torch.finfo(dtype).eps * (np.abs(before) + np.abs(gradient)))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of Gefen's arithmetic on the momentum of `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def largest(momentum: Bounds) -> Bounds:
    """Each block's largest magnitude, which is stored in float32."""
    expected = np.abs(momentum.expected).max(axis=1, keepdims=True)
    rounding = 4 * np.finfo(np.float32).eps * expected
    return Bounds(expected, momentum.tolerance.max(axis=1, keepdims=True) + rounding)


def index_range(momentum: Bounds, magnitude: Tensor, levels: Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    """The least and greatest index that the nearest level may have, each element's quotient moved by its tolerance.

    The quotient is of `dtype`, and four units in its last place may lie between it and ours.
    """
    scale = as_float64(magnitude)
    safe = np.where(scale == 0, 1, scale)
    quotient = np.where(scale == 0, 0, momentum.expected / safe)
    eps = max(torch.finfo(dtype).eps, np.finfo(np.float32).eps)
    spread = momentum.tolerance / safe * 2 + 4 * eps * np.abs(quotient)
    table = as_float64(levels).astype(np.float32)
    pick = np.vectorize(lambda x: nearest_index(np.float32(x), table), otypes=[int])
    return pick(quotient - spread), pick(quotient + spread)


def moved(indices: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """The indices of the levels `old` as those of the nearest of the levels `new`."""
    if torch.equal(old, new):
        return indices
    table = [nearest_index(x, as_float32(new)) for x in as_float32(old)]
    return torch.tensor(table, dtype=torch.uint8)[indices.long()]


def block_moment(vmean: Tensor, gradient: Any, beta2: float, dtype: torch.dtype) -> Bounds:
    """beta2 v + (1 - beta2) mean(g^2) for each block; a bfloat16 mean is a bfloat16."""
    mean = np.square(gradient).mean(axis=1, keepdims=True)
    relative = 2.0**-6 if dtype is torch.bfloat16 else 1e-6
    before = beta2 * as_float64(vmean)
    return Bounds(before + (1 - beta2) * mean, 1e-6 * before + relative * (1 - beta2) * mean + 1e-44)


def factored_moment(before: Tensor, gradient: Any, beta2: float, axis: int) -> Bounds:
    """The row (axis 1) or column (axis 0) average of g^2 of a matrix."""
    expected = beta2 * as_float64(before) + (1 - beta2) * np.square(gradient).mean(axis=axis)
    return Bounds(expected, 1e-6 * expected + 1e-44)


def block_stepsize(vmean: Tensor, step: int, age: int, beta1: float, beta2: float, eps: float) -> Any:
    """1/bc1 / (sqrt(v) / sqrt(bc2) + eps)."""
    root = np.sqrt(as_float64(vmean)) / math.sqrt(1 - beta2**age)
    return 1 / (1 - beta1**step) / (root + eps)


def factored_stepsize(rows: Tensor, cols: Tensor, step: int, age: int, beta1: float, beta2: float, eps: float) -> Any:
    """1/bc1 / (sqrt(V / bc2) + eps) with V = outer(r, c) / mean(r)."""
    r, c = as_float64(rows), as_float64(cols)
    square = np.outer(r, c) / max(r.mean(), float(np.finfo(np.float32).tiny))
    return 1 / (1 - beta1**step) / (np.sqrt(square / (1 - beta2**age)) + eps)


def applied(parameter: Tensor, update: Any, lr: float, decay: float) -> Bounds:
    """p (1 - lr wd) - lr update, to four units in the last place of the parameter's dtype."""
    shrunk = as_float64(parameter) * (1 - lr * decay)
    expected = shrunk - lr * update.reshape(shrunk.shape)
    eps = torch.finfo(parameter.dtype).eps
    tolerance = 4 * eps * np.maximum(np.abs(expected), np.abs(shrunk)) + 1e-5 * lr * np.abs(update).reshape(
        shrunk.shape
    )
    return Bounds(expected, tolerance + torch.finfo(parameter.dtype).smallest_normal * eps)


def orthogonalised(matrix: Any, steps: list[tuple[float, float, float]], eps: float) -> Any:
    """Newton-Schulz by singular values, in float64: each goes through a x + b x^3 + c x^5, step by step."""
    u, s, vh = np.linalg.svd(matrix / max(np.linalg.norm(matrix), eps), full_matrices=False)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


def as_float32(x: Tensor) -> Any:
    """The tensor as a numpy float32 array."""
    return x.detach().to(torch.float32).numpy()


def as_float64(x: Tensor) -> Any:
    """The tensor as a numpy float64 array."""
    return x.detach().to(torch.float64).numpy()

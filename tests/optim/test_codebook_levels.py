"""The codebook is the exact optimum, with the published choice among equal ones."""

from __future__ import annotations

import time
from itertools import combinations

import numpy as np
import pytest
import torch

from gefen_offload.optim.codebook import BINS, LEVELS, block_histogram, fit_levels, solve_codebook
from support.first_step import FLOAT_TYPES, drawn_gradient, published_first_step
from support.reference import codebook_cost, levels_by_dynamic_programming


def _centres(filled: np.ndarray) -> np.ndarray:
    return -1 + (filled + 0.5) * (2 / BINS)


def _drawn_histogram(draw: np.random.Generator, points: int) -> tuple[np.ndarray, np.ndarray]:
    filled = np.sort(draw.choice(BINS, points, replace=False))
    heaviest = int(draw.choice([2, 20, 10**6]))
    return _centres(filled), draw.integers(1, heaviest, points).astype(np.float64)


@pytest.mark.parametrize("seed", range(4))
def test_small_histograms_get_the_levels_of_the_full_table(seed: int) -> None:
    """Five hundred histograms of up to 14 points and 2 to 7 levels: the very levels of the full dynamic programme."""
    draw = np.random.default_rng(seed)
    for _ in range(500):
        points, weights = _drawn_histogram(draw, int(draw.integers(7, 15)))
        levels = int(draw.integers(2, 8))
        expected = levels_by_dynamic_programming(points, weights, levels)
        np.testing.assert_array_equal(fit_levels(points, weights, levels), expected)


def test_no_segmentation_costs_less() -> None:
    """Of all ways to cut nine points in four segments, the first at level -1 and the last at 1, none costs less."""
    draw = np.random.default_rng(0)
    for _ in range(100):
        points, weights = _drawn_histogram(draw, 9)
        found = codebook_cost(points, weights, fit_levels(points, weights, 4))
        assert found <= min(_cost_of_cut(points, weights, cut) for cut in combinations(range(1, 9), 3)) * (1 + 1e-9)


def _cost_of_cut(points: np.ndarray, weights: np.ndarray, cut: tuple[int, ...]) -> float:
    parts = np.split(np.arange(len(points)), cut)
    levels = [-1.0, *(np.average(points[p], weights=weights[p]) for p in parts[1:-1]), 1.0]
    return sum(float((weights[p] * (points[p] - x) ** 2).sum()) for p, x in zip(parts, levels, strict=True))


@pytest.mark.parametrize("points", [120, 300])
def test_larger_histograms_cost_what_the_full_table_costs(points: int) -> None:
    """With 16 levels over hundreds of points, even weights included, the cost is the full table's."""
    draw = np.random.default_rng(points)
    for weights in (np.ones(points), draw.integers(1, 1000, points).astype(np.float64)):
        centres = _centres(np.sort(draw.choice(BINS, points, replace=False)))
        expected = codebook_cost(centres, weights, levels_by_dynamic_programming(centres, weights, 16))
        assert codebook_cost(centres, weights, fit_levels(centres, weights, 16)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_the_levels_are_the_published_ones(seed: int, dtype: torch.dtype) -> None:
    """From gradients of several shapes and characters, the codebook equals the published one to the bit."""
    shapes = [(32, 24), (180,), (5, 7, 3)]
    gradients = [drawn_gradient(shape, dtype, 3 * seed + i) for i, shape in enumerate(shapes)]
    periods, expected = published_first_step(gradients)
    counts = sum(block_histogram(g.flatten(), p) for g, p in zip(gradients, periods, strict=True))
    assert torch.equal(solve_codebook(counts), expected)


@pytest.mark.parametrize("filled", [1, 2, 255, 256, 257])
def test_few_bins_are_their_own_levels(filled: int) -> None:
    """Up to 256 filled bins: their centres, the last one repeated, the ends at -1 and 1; one more is fitted."""
    where = np.random.default_rng(filled).choice(BINS, filled, replace=False)
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[where] = 3
    levels = solve_codebook(counts).numpy()
    centres = _centres(np.sort(where)).astype(np.float32)
    assert levels.shape == (LEVELS,)
    assert levels[0] == -1
    assert levels[-1] == 1
    assert (np.diff(levels) >= 0).all()
    if filled <= LEVELS:
        inner = np.concatenate([centres, np.full(LEVELS - filled, centres[-1])])[1:-1]
        np.testing.assert_array_equal(levels[1:-1], inner)
    else:
        assert len(np.intersect1d(levels, centres)) >= filled - 4


def test_an_empty_histogram_is_refused() -> None:
    """No count, or another number of bins, is an error that says so."""
    with pytest.raises(ValueError, match="without a count"):
        solve_codebook(torch.zeros(BINS, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(4096,\), not \(7,\)"):
        solve_codebook(torch.ones(7, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["even", "bell", "random"])
def test_a_full_histogram_takes_seconds_at_most(kind: str) -> None:
    """All 4096 bins filled, the worst case, takes at most 3 s of processor time (about 0.2 s where it was written)."""
    weights = {
        "even": np.ones(BINS),
        "bell": np.exp(-(((np.arange(BINS) - 2048) / 300) ** 2)) * 1e6 + 1,
        "random": np.random.default_rng(0).integers(1, 2**24, BINS),
    }[kind]
    began = time.process_time()
    levels = solve_codebook(torch.from_numpy(weights.astype(np.int64)))
    assert time.process_time() - began < 3
    assert levels.unique().numel() == LEVELS

"""Histograms count every element once, and an index names the nearest level."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gefen_offload.optim import codebook as module
from gefen_offload.optim.codebook import BINS, LEVELS, block_histogram, nearest_level, requantise_map, solve_codebook
from support.first_step import FLOAT_TYPES, drawn_gradient
from support.reference import histogram_by_definition, nearest_index


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("period", [1, 8, 45, 360])
def test_the_histogram_follows_the_definition(period: int, seed: int, dtype: torch.dtype) -> None:
    """Every element falls in the bin that counting one by one puts it in."""
    gradient = drawn_gradient((720,), dtype, seed)
    np.testing.assert_array_equal(block_histogram(gradient, period).numpy(), histogram_by_definition(gradient, period))


@pytest.mark.parametrize("period", [1, 8, 45, 360, 720])
def test_the_histogram_does_not_depend_on_the_chunk(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks shorter than a block, than a row of blocks, or longer than all give the same counts."""
    gradient = drawn_gradient((720,), torch.float32, 3)
    whole = block_histogram(gradient, period)
    for chunk in (7, 50, 361):
        monkeypatch.setattr(module, "CHUNK", chunk)
        assert torch.equal(block_histogram(gradient, period), whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_counted_once(value: float) -> None:
    """A gradient with a non-finite element still counts each element exactly once."""
    gradient = drawn_gradient((64,), torch.float32, 0)
    gradient[3] = value
    assert block_histogram(gradient, 16).sum() == 64


def test_zeros_are_counted_as_zeros() -> None:
    """A block of zeros falls in the bin that begins at 0."""
    counts = block_histogram(torch.zeros(24), 8)
    assert counts[BINS // 2] == 24
    assert counts.dtype == torch.int64


def test_a_period_that_does_not_divide_is_refused() -> None:
    """The error names the period and the number of elements."""
    for period in (0, 7):
        with pytest.raises(ValueError, match=f"period {period} does not divide a gradient of 24 elements"):
            block_histogram(torch.zeros(24), period)


def _levels(seed: int, distinct: int) -> torch.Tensor:
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[torch.randperm(BINS, generator=torch.Generator().manual_seed(seed))[:distinct]] = 1
    return solve_codebook(counts)


@pytest.mark.parametrize("distinct", [1, 40, 1000])
def test_the_nearest_level_follows_the_definition(distinct: int) -> None:
    """Random values, the levels themselves, their midpoints and float32 neighbours get the defined index."""
    levels = _levels(distinct, distinct)
    draw = torch.Generator().manual_seed(0)
    middle = (levels[1:] + levels[:-1]) / 2
    inf = torch.tensor(float("inf"))
    x = torch.cat(
        [torch.rand(500, generator=draw) * 2 - 1, levels, middle, middle.nextafter(inf), middle.nextafter(-inf)]
    )
    expected = [nearest_index(value, levels.numpy()) for value in x.numpy()]
    found = nearest_level(x, levels)
    assert found.dtype == torch.uint8
    assert found.tolist() == expected


def test_equal_distances_and_repeats_go_to_the_level_below() -> None:
    """Half way between two levels the lower wins; a value above repeated levels takes the last of them."""
    levels = torch.full((LEVELS,), 0.25)
    levels[0], levels[-1] = -1, 1
    x = torch.tensor([-1.0, -0.375, 0.25, 0.3, 0.625, 0.7, 1.0])
    assert nearest_level(x, levels).tolist() == [0, 0, 1, 254, 254, 255, 255]


def test_values_beyond_the_ends_take_the_end_levels() -> None:
    """A quotient rounded past an end, or not a number, still has a valid index."""
    levels = _levels(0, 1000)
    assert nearest_level(torch.tensor([-1.5, 1.5, float("inf"), -float("inf")]), levels).tolist() == [0, 255, 255, 0]
    assert nearest_level(torch.tensor([float("nan")]), levels).dtype == torch.uint8


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_the_shape_is_kept_and_distances_are_float32(dtype: torch.dtype) -> None:
    """A matrix of any float type gets the indices of its float32 cast, in its shape."""
    levels = _levels(0, 1000)
    x = (torch.rand(9, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2 - 1).to(dtype).t()
    assert torch.equal(nearest_level(x, levels), nearest_level(x.float().contiguous(), levels))
    assert nearest_level(x, levels).shape == (8, 9)


def test_requantising_to_the_same_levels_changes_nothing() -> None:
    """The map between equal, distinct levels is the identity, and between others it names the nearest."""
    old, new = _levels(0, 1000), _levels(1, 300)
    assert requantise_map(old, old).tolist() == list(range(LEVELS))
    moved = requantise_map(old, new)
    assert moved.shape == (LEVELS,)
    assert moved.dtype == torch.uint8
    distances = (old[:, None] - new[None, :]).abs()
    assert torch.equal(distances.gather(1, moved.long()[:, None])[:, 0], distances.amin(1))

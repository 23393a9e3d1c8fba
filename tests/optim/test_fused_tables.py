"""The thresholds that the kernels look indices up with are the nearest level's, ties and repeated levels included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_offload.optim.codebook import nearest_level
from gefen_offload.optim.fused.tables import (
    CELLS,
    FINENESS,
    MOST_STEPS,
    SCALE,
    THRESHOLDS,
    build_tables,
    cell_of,
    thresholds_of,
)


def drawn_levels(seed: int, kinds: int) -> torch.Tensor:
    """256 ascending levels from -1 to 1, of which `kinds` differ."""
    draw = torch.Generator().manual_seed(seed)
    inner = (torch.rand(kinds, generator=draw) * 2 - 1) ** 3
    levels = torch.cat([inner, inner[-1:].expand(256 - kinds)])
    levels[0], levels[-1] = -1, 1
    return levels.sort().values


def around(levels: torch.Tensor) -> torch.Tensor:
    """Every threshold and level with its float32 neighbours, and a grid."""
    points = np.concatenate([thresholds_of(levels.numpy()), levels.numpy(), np.linspace(-1, 1, 4097, dtype=np.float32)])
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(-2)), np.nextafter(points, np.float32(2)), [0, -0.0]]
    )
    return torch.from_numpy(points.astype(np.float32)).clamp(-1, 1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), kinds=st.sampled_from([1, 3, 100, 255, 256]))
def test_thresholds_below_are_the_index(seed: int, kinds: int) -> None:
    """The number of thresholds below x is the index of its nearest level."""
    levels = drawn_levels(seed, kinds)
    x = around(levels)
    counted = np.searchsorted(thresholds_of(levels.numpy()), x.numpy(), side="left")
    assert torch.equal(torch.from_numpy(counted.astype(np.uint8)), nearest_level(x, levels))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), kinds=st.sampled_from([1, 3, 100, 255, 256]))
def test_cells_lead_to_the_index(seed: int, kinds: int) -> None:
    """The thresholds below a cell, and those of the next few that are below x, are all that are below x."""
    levels = drawn_levels(seed, kinds)
    tables = build_tables(levels)
    x, table = around(levels), tables.levels[torch.float32]
    entries = tables.cells[torch.from_numpy(cell_of(x.numpy(), int(table[SCALE])).astype(np.int64))]
    below, after = entries >> 32, entries.to(torch.int32).view(torch.float32)
    bounds = table[THRESHOLDS:]
    assert torch.equal(after, bounds[below])
    if tables.steps:
        found = below + sum((x > bounds[below + step]).long() for step in range(tables.steps))
        assert torch.equal(found.to(torch.uint8), nearest_level(x, levels))
    else:  # the kernels search: some cell has too many, however narrow
        assert np.bincount(cell_of(thresholds_of(levels.numpy()), FINENESS[-1])).max() > MOST_STEPS


def test_cells_are_as_wide_as_one_threshold_allows() -> None:
    """Levels far apart take wide cells, of one threshold each; levels that lie closer take narrower ones."""
    found = [build_tables(torch.linspace(-width, width, 256)) for width in (1, 0.4, 0.2)]
    assert [int(tables.levels[torch.float32][SCALE]) for tables in found] == [256, 512, 1024]
    assert [tables.steps for tables in found] == [1, 1, 1]


def test_what_is_no_number_stays_inside() -> None:
    """The cells that no x of [-1, 1] has say 255 thresholds, so that whatever ends there has an index of a level."""
    cells = build_tables(drawn_levels(0, 256)).cells
    assert cells.shape == (CELLS,)
    assert ((cells[2 * FINENESS[-1] + 1 :] >> 32) == 255).all()


def test_levels_rounded_to_the_gradient() -> None:
    """Each table holds the levels as the gradient's dtype has them."""
    levels = drawn_levels(0, 256)
    for dtype, table in build_tables(levels).levels.items():
        assert torch.equal(table[:256], levels.to(dtype).float())


@pytest.mark.parametrize(
    ("in_one_cell", "steps"), [(1, 1), (2, MOST_STEPS), (MOST_STEPS, MOST_STEPS), (MOST_STEPS + 1, 0)]
)
def test_few_values_of_steps(in_one_cell: int, steps: int) -> None:
    """However many thresholds one cell has, `steps` is one of three values, and enough."""
    levels = (
        torch.linspace(-128, 127, 256, dtype=torch.float64) / 1024
    )  # every second cell has a threshold, in its middle
    levels[100 : 101 + in_one_cell] = levels[100] + torch.arange(in_one_cell + 1) * 2.0**-16
    levels[0], levels[-1] = -1, 1
    levels = levels.float()
    assert np.bincount(cell_of(thresholds_of(levels.numpy()), FINENESS[-1])).max() == in_one_cell
    assert build_tables(levels).steps == steps

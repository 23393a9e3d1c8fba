"""The thresholds that the kernels look indices up with are the nearest level's, ties and repeated levels included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_offload.optim.codebook import nearest_level
from gefen_offload.optim.fused.tables import CELLS, MOST_STEPS, THRESHOLDS, build_tables, cell_of, thresholds_of


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
    x = around(levels)
    found = tables.cells[torch.from_numpy(cell_of(x.numpy()).astype(np.int64))].long()
    bounds = tables.levels[torch.float32][THRESHOLDS:]
    if tables.steps:
        found = found + sum((x > bounds[found + step]).long() for step in range(tables.steps))
        assert torch.equal(found.to(torch.uint8), nearest_level(x, levels))
    else:  # the kernels search: some cell has too many
        assert np.bincount(cell_of(thresholds_of(levels.numpy()))).max() > MOST_STEPS


def test_levels_rounded_to_the_gradient() -> None:
    """Each table holds the levels as the gradient's dtype has them, the last one repeated."""
    levels = drawn_levels(0, 256)
    tables = build_tables(levels)
    assert tables.cells.shape == (CELLS,)
    for dtype, table in tables.levels.items():
        assert torch.equal(table[:256], levels.to(dtype).float())
        assert (table[256:THRESHOLDS] == 1).all()


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
    assert np.bincount(cell_of(thresholds_of(levels.numpy()))).max() == in_one_cell
    assert build_tables(levels).steps == steps

"""The codebook as the kernels use it.

[Note: thresholds] The nearest level is the lower neighbour lo of x as long as fl(x - lo) <= fl(hi - x). The left side
never falls and the right side never rises as x grows, so between two levels there is a greatest float32 for which it
holds: the threshold. The index of the nearest level is the number of thresholds below x, ties and repeated levels
included: exactly `codebook.nearest_level`, which a search on rounded midpoints is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

CELLS = 2**13  # what is not a number ends up in one of the last, which say 255
FINENESS = (256, 512, 1024, 2048)  # cells of a unit: [-1, 1] takes 2 x fineness + 1, the first centred on -1
SCALE = 256  # where the fineness is in a table of levels, and after it what turns a product into a cell
THRESHOLDS = 264  # where they begin in a table of levels
MOST_STEPS = 4

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LevelTables:
    """Device copies. `levels`, float32, for each gradient dtype: the levels rounded to it, from `SCALE` on the numbers
    that find a cell, and from `THRESHOLDS` on the thresholds, infinity after the last.

    `cells`, int64, of each cell: how many thresholds lie below it, and in the low half the bits of the next one.
    `steps` is how many thresholds of a cell are to be compared with one after the other: 1 or `MOST_STEPS`, or 0 where
    some cell has more. The kernels are compiled for each value, so that there are no others.
    """

    levels: dict[torch.dtype, Tensor]
    cells: Tensor
    steps: int


def build_tables(levels: Tensor) -> LevelTables:
    """The tables of a codebook, float32 (256,), ascending. Reads it on the host, so it waits for the device.

    The cells are the widest that hold one threshold at most; small tables stay in the nearest cache.
    """
    host = levels.detach().cpu()
    bounds = thresholds_of(host.numpy())
    for fineness in FINENESS:
        cells = cell_of(bounds, fineness)
        most = int(np.bincount(cells).max())
        if most == 1:
            break
    after = np.append(bounds, np.float32(np.inf))
    below = np.searchsorted(cells, np.arange(CELLS), side="left")
    packed = below.astype(np.int64) << 32 | after[below].view(np.uint32).astype(np.int64)
    tables = {}
    for dtype in _DTYPES:
        table = torch.full((2 * THRESHOLDS,), torch.inf)
        table[:256] = host.to(dtype)
        table[SCALE], table[SCALE + 1] = fineness, 2**23 + fineness
        table[THRESHOLDS : THRESHOLDS + len(bounds)] = torch.from_numpy(bounds)
        tables[dtype] = table.to(levels.device)
    return LevelTables(tables, torch.from_numpy(packed).to(levels.device), _steps(most))


def _steps(most: int) -> int:
    return next((steps for steps in (1, MOST_STEPS) if most <= steps), 0)


def cell_of(x: Any, fineness: int) -> Any:
    """The cell of each float32 x of [-1, 1], as the kernels compute it."""
    scale = np.float32(fineness)
    return (x * scale + (np.float32(2**23) + scale)).astype(np.float32).view(np.int32) & (CELLS - 1)


def thresholds_of(levels: Any) -> Any:
    """For each two neighbouring levels, the greatest float32 whose nearest level is the lower one: float32 (255,)."""
    low, high = levels[:-1], levels[1:]
    left, right = _ordinal(low), _ordinal(high)  # the lower level holds at left, and no longer at right
    while np.any(right - left > 1):
        middle = (left + right) // 2
        x = _from_ordinal(middle)
        lower = x - low <= high - x
        left, right = np.where(lower, middle, left), np.where(lower, right, middle)
    return _from_ordinal(left)


def _ordinal(x: Any) -> Any:
    """Integers that order as the float32 values do, next to each other where those are; -0 and 0 are one."""
    bits = (x + np.float32(0)).astype(np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _from_ordinal(ordinal: Any) -> Any:
    bits = np.where(ordinal < 0, -ordinal | 0x80000000, ordinal).astype(np.uint32)
    return bits.view(np.float32)

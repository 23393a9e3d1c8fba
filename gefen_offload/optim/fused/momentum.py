"""The fused momentum of GefenMuon, matrix by matrix."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gefen_offload.optim.fused import DTYPES
from gefen_offload.optim.fused.momentum_kernels import largest_momenta, store_momenta
from gefen_offload.optim.fused.tables import LevelTables, build_tables

TILES = (1024, 512, 256, 128)  # elements of a program: the first that divides the period, else the longest
MOST = 2**31 - max(TILES)  # elements of a matrix


class FusedMomentum:
    """Moves the momentum of matrices on one device on, with the bits of the plain path there while they are finite."""

    def __init__(self) -> None:
        self._levels: Tensor | None = None
        self._tables: LevelTables | None = None

    def fits(self, gradient: Tensor) -> bool:
        """Whether there are kernels for this flat gradient."""
        return gradient.dtype in DTYPES and gradient.is_contiguous() and 0 < gradient.numel() <= MOST

    def __call__(
        self, gradient: Tensor, indices: Tensor, magnitude: Tensor, levels: Tensor, momentum: float, nesterov: bool
    ) -> Tensor:
        """Update indices, (blocks, period), and magnitudes, (blocks, 1), in place from a flat gradient.

        Returns what is to be orthogonalised, flat, in bfloat16.
        """
        tables, count, period = self._tables_of(levels), gradient.numel(), indices.shape[1]
        whole = next((tile for tile in TILES if period % tile == 0), 0)
        tile = whole or TILES[0]
        largest = torch.zeros_like(magnitude)
        update = torch.empty_like(gradient, dtype=torch.bfloat16)
        common = (gradient, indices, magnitude, tables.levels[gradient.dtype])
        weight = float(np.float32(1 - momentum))
        numbers, near = (count, period, weight), weight < 0.5
        grid, shape = (-(-count // tile),), {"WHOLE": whole > 0, "TILE": tile, "num_warps": max(1, tile // 256)}
        with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call, unused-ignore]
            largest_momenta[grid](*common, largest.view(torch.int32), *numbers, near, **shape, enable_fp_fusion=False)
            looked_up = (largest, tables.cells, update)
            constants = (near, nesterov, tables.steps)
            store_momenta[grid](*common, *looked_up, *numbers, momentum, *constants, **shape, enable_fp_fusion=False)
        magnitude.copy_(largest)
        return update

    def _tables_of(self, levels: Tensor) -> LevelTables:
        if levels is not self._levels or self._tables is None:
            self._levels, self._tables = levels, build_tables(levels)
        return self._tables

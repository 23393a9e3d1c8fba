"""The fused update: staged pieces are described in a table, and a few launches step them all.

[Note: order] What a launch computes for a piece depends on the piece's parameter, not on its neighbours, nor on where
its parameter was cut. So a resident step in few launches and an offloaded one, window by window, agree to the bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gefen_offload.optim.fused import factors, kernels, plan
from gefen_offload.optim.fused.describe import DTYPES, ROW_WORDS, Description, FactorKind, Group, Outlines, StepKind
from gefen_offload.optim.fused.launch import Kernel, Scratch, Table
from gefen_offload.optim.fused.tables import LevelTables, build_tables
from gefen_offload.optim.update import plain_update
from gefen_offload.optim.work import StagedPiece

PIECES = 256  # of one launch
SCRATCH_FLOATS = 2**23  # what has been described is launched before its sums take much more than this
FIRST_FLUSH = 2**26  # elements described before the first launches; doubled each time: the device starts early
TABLES = 8  # calls that may be under way at once

_NEVERS = array("i", [0x7FFFFFFF] * PIECES)

_square_partials = Kernel(factors.square_partials, 80)
_finish_rows = Kernel(factors.finish_rows, 80)
_finish_columns = Kernel(factors.finish_columns, 80)
_step_single = Kernel(kernels.step_single, 64)
_step_short = {True: Kernel(kernels.step_short, 56), False: Kernel(kernels.step_short, 64)}  # factored or not
_long_partials = Kernel(kernels.long_partials, 64)
_long_blocks = Kernel(kernels.long_blocks, 64)
_step_long = Kernel(kernels.step_long, 64)


class FusedUpdate:
    """Steps staged pieces on one device with the fused kernels. Tables and scratch are kept from call to call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._tables = [Table(device) for _ in range(TABLES)]
        self._turn = 0
        self._scratch = Scratch(device, 2**18)
        self._outlines: Outlines = {}
        self._levels: Tensor | None = None
        self._level_tables: LevelTables | None = None
        self._stream = 0
        self._done: Any = None

    def __call__(self, staged: Sequence[StagedPiece], levels: Tensor) -> None:
        """Step every piece, on the current stream; `levels` is the codebook, float32 (256,), on this device.

        Pieces whose dtypes the kernels do not have (float64) take the plain path. A parameter that is not contiguous is
        stepped in a copy of the piece.
        """
        if not self._cuda:
            self._step(staged, levels)
            return
        with torch.cuda.device(self._device):
            self._follow()
            self._step(staged, levels)

    def _step(self, staged: Sequence[StagedPiece], levels: Tensor) -> None:
        if levels is not self._levels or self._level_tables is None:
            self._levels, self._level_tables = levels, build_tables(levels)
        plain = []
        limit = FIRST_FLUSH
        description = Description(self._scratch, self._outlines)
        for piece in staged:
            work = piece.piece.work
            if work.parameter.dtype not in DTYPES or work.gradient.dtype not in DTYPES:
                plain.append(piece)
                continue
            description.add(piece)
            if description.elements >= limit or self._scratch.used >= SCRATCH_FLOATS:
                self._launch(description, self._level_tables)
                description = Description(self._scratch, self._outlines)
                limit *= 2
        self._launch(description, self._level_tables)
        if plain:
            plain_update(plain, levels)

    def _follow(self) -> None:
        """Order this call after the last one, whose scratch it reuses, where that ran on another stream."""
        stream = torch.cuda.current_stream()
        if self._done is not None and stream.cuda_stream != self._stream:
            stream.wait_event(self._done)
        self._stream = stream.cuda_stream

    # --- launching ---

    def _launch(self, description: Description, levels: LevelTables) -> None:
        if not description.elements:
            return
        self._scratch.fit()
        table = self._tables[self._turn]
        self._turn = (self._turn + 1) % TABLES
        launches = _Launches()
        for matrices in description.factors.items():
            launches.add(*matrices)
        for pieces in description.steps.items():
            launches.add(*pieces)
        content = launches.content()
        for each in self._tables:  # all grow at once: one warm step, and no later one allocates
            each.reserve(len(content))
        table.upload(content)
        for kind, numbers, programs, warps in launches.calls():
            if isinstance(kind, FactorKind):
                self._average(kind, table, numbers, programs, warps)
            else:
                self._update(kind, table, numbers, programs, warps, levels)
        table.release()
        self._done = table.event
        description.finish()

    def _average(
        self, kind: FactorKind, table: Table, numbers: list[tuple[int, int]], programs: list[int], warps: int
    ) -> None:
        buffers = (*table.buffers, self._scratch.tensor)
        if programs[0]:
            constants = (DTYPES[kind.gradient], kind.height, kind.width, kind.aligned)
            _square_partials(programs[0], buffers, numbers[0], constants, warps)
        _finish_rows(programs[1], buffers, numbers[1], (), 4)
        _finish_columns(programs[2], buffers, numbers[2], (), 4)

    def _update(
        self,
        kind: StepKind,
        table: Table,
        numbers: list[tuple[int, int]],
        programs: list[int],
        warps: int,
        levels: LevelTables,
    ) -> None:
        buffers = (
            *table.buffers,
            levels.levels[kind.gradient],
            levels.cells,
            self._scratch.tensor,
        )
        gradient = DTYPES[kind.gradient]
        both = (DTYPES[kind.parameter], gradient)
        shape = (kind.width, kind.blocks, kind.moment)
        look = (kind.aligned, levels.steps, kind.near, kind.decays, plan.TILES)
        if kind.width == 1:
            constants = (*both, kind.blocks, min(kind.moment, 1), *look)
            _step_single(programs[0], buffers, numbers[0], constants, warps)
        elif not kind.long:
            _step_short[kind.moment != 0](programs[0], buffers, numbers[0], (*both, *shape, kind.exact, *look), warps)
        else:
            part = (gradient, *shape, kind.exact, kind.aligned, kind.near, plan.TILES)
            _long_partials(programs[0], buffers, numbers[0], part, warps)
            _long_blocks(programs[1], buffers, numbers[1], (gradient, kind.moment, 1024), 4)
            _step_long(programs[0], buffers, numbers[0], (*both, *shape, kind.exact, *look), warps)


class _Launches:
    """The content of one table: all rows, then for each launch the first program of each of its pieces."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._starts = array("i")
        self._calls: list[tuple[StepKind | FactorKind, int, list[int], list[int], int]] = []

    def add(self, kind: StepKind | FactorKind, group: Group) -> None:
        for first in range(0, len(group.rows), PIECES):
            rows, programs = group.rows[first : first + PIECES], group.programs[first : first + PIECES]
            begins, totals = [], []
            for counts in zip(*programs, strict=True):
                begins.append(len(self._starts))
                sums = list(accumulate(counts, initial=0))
                totals.append(sums.pop())
                self._starts.extend(sums)
                self._starts.extend(_NEVERS[len(sums) :])
            self._calls.append((kind, len(self._rows), begins, totals, group.warps))
            self._rows += rows

    def content(self) -> bytes:
        return b"".join(self._rows) + self._starts.tobytes()

    def calls(self) -> list[tuple[StepKind | FactorKind, list[tuple[int, int]], list[int], int]]:
        """For each group of pieces: its kind, the (row, start) of each of its launches, their programs, the warps."""
        base = 2 * ROW_WORDS * len(self._rows)
        return [
            (kind, [(row, base + begin) for begin in begins], totals, warps)
            for kind, row, begins, totals, warps in self._calls
        ]

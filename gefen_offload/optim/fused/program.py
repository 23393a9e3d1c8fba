"""The launches of a step, prepared once for all of its windows and started again with other gradients.

[Note: order] What a launch computes for a piece depends on the piece's parameter, not on its neighbours, nor on where
its parameter was cut. So a resident step in few launches and an offloaded one, window by window, agree to the bit.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gefen_offload.optim.fused import factors, kernels, plan
from gefen_offload.optim.fused.describe import (
    DTYPES,
    ROW_WORDS,
    SCALAR_WORDS,
    Description,
    FactorKind,
    Group,
    Outlines,
    Row,
    StepKind,
    nearer_to_momentum,
    pack_scalars,
)
from gefen_offload.optim.fused.launch import Kernel, Scratch, Start, Table
from gefen_offload.optim.fused.tables import LevelTables
from gefen_offload.optim.work import Scalars, StagedPiece, Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECES = 256  # of one launch
SCRATCH_FLOATS = 2**23  # what has been described is launched before its sums take much more than this

_NEVERS = array("i", [0x7FFFFFFF] * PIECES)

_square_partials = {  # with the largest |m| or without
    True: Kernel(factors.square_partials, 128),
    False: Kernel(factors.square_partials, 80),
}
_finish_rows = Kernel(factors.finish_rows, 80)
_finish_columns = Kernel(factors.finish_columns, 80)
_step_single = Kernel(kernels.step_single, 64)
_step_short = Kernel(kernels.step_short, 64)
_long_partials = Kernel(kernels.long_partials, 64)
_long_blocks = Kernel(kernels.long_blocks, 64)
_step_long = Kernel(kernels.step_long, 64)


Placed = tuple[StagedPiece, int]
"""A piece, and the address of its elements: in the parameter, or in a copy of them."""


@dataclass
class Shared:
    """What all programs of a device share: scratch, outlines of pieces, and the stream that used the scratch last."""

    scratch: Scratch
    outlines: Outlines = field(default_factory=dict)
    stream: Any = None

    def follow(self, stream: Any) -> None:
        """Order what comes on `stream` after the last use of the scratch, whichever stream that was on."""
        if self.stream is None or self.stream != stream:
            if self.stream is not None:
                stream.wait_stream(self.stream)
            self.scratch.tensor.record_stream(stream)
        self.stream = stream


class Program:
    """`launch(i)` steps the pieces of window i on the current stream; window 0 comes first, as it brings the table.

    It stands as long as parameters and staged tensors stay where they are. `renew` gives it the next step's gradients.
    """

    def __init__(
        self, device: torch.device, windows: Sequence[Sequence[Placed]], levels: LevelTables, shared: Shared
    ) -> None:
        self._device = device
        self._levels = levels
        self._shared = shared
        sections = [_describe(window, shared.outlines) for window in windows]
        self._floats = max((part.floats for section in sections for part in section), default=0)
        lists = _Lists()
        calls = [[lists.add(part) for part in section] for section in sections]
        self._table = Table(device, b"".join(row.content for row in lists.rows), lists.starts.tobytes())
        self._renewal = _Renewal([piece.piece.work for window in windows for piece, _ in window], lists.rows)
        self._calls = [[call for part in section for call in part] for section in calls]
        self._bound_to: Tensor | None = None
        self._starts: list[list[Start]] = []
        self._here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        self._stream: Any = None

    def renew(self, addresses: Sequence[int], scalars: Sequence[Scalars]) -> bool:
        """Take the next step's gradients and hyper-parameters, in the order of the works and of `Scalars` at first.

        The addresses must be aligned as the first ones were. False, with nothing changed, where the hyper-parameters
        need other kernels.
        """
        return self._renewal.apply(self._table, addresses, scalars)

    def launch(self, index: int) -> None:
        """Step window `index`, on the device's current stream."""
        with self._here:
            if index == 0:
                self._begin()
            starts, stream = self._starts[index], 0 if self._stream is None else self._stream.cuda_stream
            Kernel.launches += len(starts)
            for start in starts:
                start(stream)

    def _begin(self) -> None:
        self._shared.scratch.fit(self._floats)
        if self._device.type == "cuda":
            self._move_to(torch.cuda.current_stream(self._device))
        if self._bound_to is not self._shared.scratch.tensor:
            self._bind()
        self._table.upload()

    def _move_to(self, stream: Any) -> None:
        """[Note: streams] Memory of torch's allocator must be told of each stream that uses it beside its own."""
        self._shared.follow(stream)
        if self._stream is None or stream != self._stream:
            self._stream = stream
            levels = self._levels
            for tensor in (self._table.buffers[0], levels.cells, *levels.levels.values()):
                tensor.record_stream(stream)

    # --- binding ---

    def _bind(self) -> None:
        """Compile what is not yet compiled, and fix every argument; again where the scratch has grown since."""
        self._starts = [[start for call in section for start in self._start(call)] for section in self._calls]
        self._bound_to = self._shared.scratch.tensor  # last: the starts of an interrupted attempt are not complete

    def _start(self, call: _Call) -> list[Start]:
        if isinstance(call.kind, FactorKind):
            return self._averages(call, call.kind)
        return self._updates(call, call.kind)

    def _averages(self, call: _Call, kind: FactorKind) -> list[Start]:
        buffers = (*self._table.buffers, self._shared.scratch.tensor)
        stages = plan.FACTOR_STAGES[kind.momentum]
        shape = (kind.height, kind.width, kind.exact, kind.aligned)
        constants = (DTYPES[kind.gradient], *shape, kind.momentum, kind.near, stages)
        looked_up = (*self._table.buffers, self._levels.levels[kind.gradient], self._shared.scratch.tensor)
        programs, numbers = call.programs, [(call.row, start + self._base) for start in call.starts]
        squares = _square_partials[kind.momentum]
        return [
            *([squares.bind(programs[0], looked_up, numbers[0], constants, call.warps)] if programs[0] else []),
            _finish_rows.bind(programs[1], buffers, numbers[1], (), 4),
            _finish_columns.bind(programs[2], buffers, numbers[2], (), 4),
        ]

    def _updates(self, call: _Call, kind: StepKind) -> list[Start]:
        levels, programs, warps = self._levels, call.programs, call.warps
        numbers = [(call.row, start + self._base) for start in call.starts]
        buffers = (*self._table.buffers, levels.levels[kind.gradient], levels.cells, self._shared.scratch.tensor)
        gradient = DTYPES[kind.gradient]
        both = (DTYPES[kind.parameter], gradient)
        look = (kind.aligned, levels.steps, kind.near, plan.TILES)
        if kind.width == 1:
            constants: tuple[Any, ...] = (*both, kind.blocks, min(kind.moment, 1), *look)
            return [_step_single.bind(programs[0], buffers, numbers[0], constants, warps)]
        if not kind.long:
            whole = (*both, kind.width, kind.blocks, kind.moment, kind.exact, *look)
            return [_step_short.bind(programs[0], buffers, numbers[0], whole, warps)]
        shape = (kind.width, kind.moment, kind.exact)
        part = (gradient, *shape, kind.aligned, kind.near, plan.TILES)
        return [
            *([_long_partials.bind(programs[0], buffers, numbers[0], part, warps)] if programs[0] else []),
            _long_blocks.bind(programs[1], buffers, numbers[1], (gradient, kind.moment, 1024), 4),
            _step_long.bind(programs[2], buffers, numbers[2], (*both, *shape, *look), warps),
        ]

    @property
    def _base(self) -> int:
        """Where the first programs of the launches begin in the table, in half words."""
        return 2 * len(self._table.words)


def _describe(window: Sequence[Placed], outlines: Outlines) -> list[Description]:
    """A window in one description, or in several that use the scratch one after another."""
    parts = [Description(outlines)]
    for piece, address in window:
        if parts[-1].floats >= SCRATCH_FLOATS:
            parts.append(Description(outlines))
        parts[-1].add(piece, address)
    return parts


# --- the content of the table -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One group of at most `PIECES` pieces: its first row, and for each of its launches where its starts are."""

    kind: StepKind | FactorKind
    row: int
    starts: list[int]
    programs: list[int]
    warps: int


@dataclass
class _Lists:
    """All rows, and for each launch the first program of each of its pieces."""

    rows: list[Row] = field(default_factory=list)
    starts: array[int] = field(default_factory=lambda: array("i"))

    def add(self, description: Description) -> list[_Call]:
        groups: list[tuple[StepKind | FactorKind, Group]] = [*description.factors.items(), *description.steps.items()]
        return [
            self._call(kind, group, slice(first, first + PIECES))
            for kind, group in groups
            for first in range(0, len(group.rows), PIECES)
        ]

    def _call(self, kind: StepKind | FactorKind, group: Group, part: slice) -> _Call:
        begins, totals = [], []
        for counts in zip(*group.programs[part], strict=True):
            begins.append(len(self.starts))
            sums = list(accumulate(counts, initial=0))
            totals.append(sums.pop())
            self.starts.extend(sums)
            self.starts.extend(_NEVERS[len(sums) :])
        call = _Call(kind, len(self.rows), begins, totals, group.warps)
        self.rows += group.rows[part]
        return call


class _Renewal:
    """Which words of the table change from step to step."""

    def __init__(self, works: Sequence[Work], rows: Sequence[Row]) -> None:
        order = {key: index for index, key in enumerate(dict.fromkeys(map(id, works)))}
        scalars = {id(work.scalars): work.scalars for work in works}
        count = range(len(rows))
        self._words = _array(ROW_WORDS * index + row.word for index, row in zip(count, rows, strict=True))
        self._offsets = _array(row.offset for row in rows)
        self._sources = _array(order[id(row.work)] for row in rows)
        self._near = [nearer_to_momentum(each) for each in scalars.values()]
        self._members: list[tuple[int, bool, Any]] = []
        for position, key in enumerate(scalars):
            for factored in (False, True):
                at = [i for i in count if id(rows[i].work.scalars) == key and rows[i].work.factored is factored]
                if at:
                    self._members.append((position, factored, _array(at)))

    def apply(self, table: Table, addresses: Sequence[int], scalars: Sequence[Scalars]) -> bool:
        if [nearer_to_momentum(each) for each in scalars] != self._near:
            return False
        table.words[self._words] = _array(addresses)[self._sources] + self._offsets
        floats = table.floats.reshape(-1, 2 * ROW_WORDS)
        for position, factored, rows in self._members:
            floats[rows, 2 * SCALAR_WORDS :] = np.frombuffer(pack_scalars(scalars[position], factored), np.float32)
        return True


def _array(values: Any) -> NDArray[np.int64]:
    return np.array(list(values), np.int64)

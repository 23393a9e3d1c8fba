"""The fused update on one device: what all of its programs share, and steps that no program is kept for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gefen_offload.optim import flat
from gefen_offload.optim.fused.describe import DTYPES
from gefen_offload.optim.fused.launch import Scratch
from gefen_offload.optim.fused.program import Placed, Program, Shared
from gefen_offload.optim.fused.tables import LevelTables, build_tables
from gefen_offload.optim.update import plain_update
from gefen_offload.optim.work import Piece, StagedPiece, Work

COPIED = 2**24  # elements of parameters that are not contiguous, copied at once


class FusedUpdate:
    """Steps staged pieces on one device with the fused kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._shared = Shared(Scratch(device, 2**18))
        self._levels: Tensor | None = None
        self._level_tables: LevelTables | None = None

    def program(self, windows: Sequence[Sequence[StagedPiece]], levels: Tensor) -> Program | None:
        """The launches that step every window; None where some piece cannot be stepped by kernels in place.

        `levels` is the codebook, float32 (256,), on this device.
        """
        if not all(_in_place(piece) for window in windows for piece in window):
            return None
        return self._program([[(piece, _address(piece)) for piece in window] for window in windows], levels)

    def __call__(self, staged: Sequence[StagedPiece], levels: Tensor) -> None:
        """Step every piece, on the current stream.

        Pieces whose dtypes the kernels do not have (float64) take the plain path. A parameter that is not contiguous is
        stepped in a copy of the piece.
        """
        plain = [piece for piece in staged if not _has_kernels(piece)]
        ready = [piece for piece in staged if _in_place(piece)]
        if ready:
            self._program([[(piece, _address(piece)) for piece in ready]], levels).launch(0)
        for some in _batches([piece for piece in staged if _has_kernels(piece) and not _in_place(piece)]):
            self._step_copies(some, levels)
        if plain:
            plain_update(plain, levels)

    def _step_copies(self, staged: Sequence[StagedPiece], levels: Tensor) -> None:
        works = {id(piece.piece.work): _tight(piece.piece.work) for piece in staged}
        copies = [flat.read(piece.piece.work.parameter, *_extent(piece.piece)) for piece in staged]
        tight = [
            (StagedPiece(replace(each.piece, work=works[id(each.piece.work)]), each.tensors), copy.data_ptr())
            for each, copy in zip(staged, copies, strict=True)
        ]
        self._program([tight], levels).launch(0)
        for each, copy in zip(staged, copies, strict=True):
            flat.write(each.piece.work.parameter, _extent(each.piece)[0], copy)

    def _program(self, windows: Sequence[Sequence[Placed]], levels: Tensor) -> Program:
        with torch.cuda.device(self._device) if self._cuda else contextlib.nullcontext():
            return Program(self._device, windows, self._tables_of(levels), self._shared)

    def _tables_of(self, levels: Tensor) -> LevelTables:
        if levels is not self._levels or self._level_tables is None:
            self._levels, self._level_tables = levels, build_tables(levels)
        return self._level_tables


def _has_kernels(staged: StagedPiece) -> bool:
    work = staged.piece.work
    return work.parameter.dtype in DTYPES and work.gradient.dtype in DTYPES


def _in_place(staged: StagedPiece) -> bool:
    work = staged.piece.work
    return _has_kernels(staged) and flat.lies_flat(work.parameter) and flat.lies_flat(work.gradient)


def _extent(piece: Piece) -> tuple[int, int]:
    """The piece's elements."""
    return piece.first * piece.work.period, piece.last * piece.work.period


def _address(staged: StagedPiece) -> int:
    parameter = staged.piece.work.parameter
    return parameter.data_ptr() + _extent(staged.piece)[0] * parameter.itemsize


def _tight(work: Work) -> Work:
    return work if work.gradient.is_contiguous() else replace(work, gradient=work.gradient.contiguous())


def _batches(staged: Sequence[StagedPiece]) -> Iterator[list[StagedPiece]]:
    """Pieces of about `COPIED` elements together."""
    batch: list[StagedPiece] = []
    elements = 0
    for piece in staged:
        batch.append(piece)
        elements += (piece.piece.last - piece.piece.first) * piece.piece.work.period
        if elements >= COPIED:
            yield batch
            batch, elements = [], 0
    if batch:
        yield batch

"""Pieces that are stepped together: equal in everything but their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gefen_offload.optim import flat
from gefen_offload.optim.work import PIECE_ELEMENTS, Scalars, StagedPiece


def batches(staged: Sequence[StagedPiece], elements: int = PIECE_ELEMENTS) -> Iterator[Batch]:
    """The pieces in batches of at most `elements` elements, or of one piece; pieces of one key keep their order."""
    waiting: dict[tuple[Any, ...], list[StagedPiece]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for piece in staged:
        size = (piece.piece.last - piece.piece.first) * piece.piece.work.period
        key = _key(piece)
        if key in waiting and sizes[key] + size > elements:
            yield Batch(tuple(waiting.pop(key)))
        if key not in waiting:
            waiting[key], sizes[key] = [], 0
        waiting[key].append(piece)
        sizes[key] += size
    for pieces in waiting.values():
        yield Batch(tuple(pieces))


def _key(staged: StagedPiece) -> tuple[Any, ...]:
    """Equal keys can be stepped as one matrix. Scalars are shared by those that are equal, so identity is enough."""
    work = staged.piece.work
    parameter = work.parameter
    return (id(work.scalars), work.period, work.factored, work.gradient.dtype, parameter.dtype, parameter.device)


@dataclass(frozen=True)
class Batch:
    """Pieces seen as one matrix of blocks, (blocks, period): one piece in place, several copied together."""

    pieces: tuple[StagedPiece, ...]

    @property
    def scalars(self) -> Scalars:
        """The hyper-parameters that all of the pieces share."""
        return self.pieces[0].piece.work.scalars

    @property
    def period(self) -> int:
        """The length of every block."""
        return self.pieces[0].piece.work.period

    @property
    def factored(self) -> bool:
        """Whether the pieces have row and column vectors for a second moment."""
        return self.pieces[0].piece.work.factored

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor for the pieces' tensors, in their order."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def gradients(self) -> list[Tensor]:
        """Each piece's gradient, (blocks, period)."""
        return [staged.piece.work.gradient[slice(*_range(staged))].view(-1, self.period) for staged in self.pieces]

    def gradient(self) -> Tensor:
        """The gradient, (blocks, period)."""
        return self.join(self.gradients())

    def tensor(self, name: str) -> Tensor:
        """The state tensor `name`, which is cut by blocks."""
        return self.join([staged.tensors[name] for staged in self.pieces])

    def store(self, name: str, values: Tensor) -> None:
        """Write the state tensor `name` back, where it is not already there."""
        self._scatter([staged.tensors[name] for staged in self.pieces], values)

    def parameter(self) -> Tensor:
        """The parameters' values, (blocks, period)."""
        parts = [flat.read(staged.piece.work.parameter, *_range(staged)) for staged in self.pieces]
        return self.join([part.view(-1, self.period) for part in parts])

    def store_parameter(self, values: Tensor) -> None:
        """Write the parameters' values back, where they are not already there."""
        contiguous = [flat.view(staged.piece.work.parameter, *_range(staged)) for staged in self.pieces]
        if all(part is not None for part in contiguous):
            self._scatter([part.view(-1, values.shape[1]) for part in contiguous if part is not None], values)
            return
        for staged, part in zip(self.pieces, self._split(values), strict=True):
            flat.write(staged.piece.work.parameter, _range(staged)[0], part.reshape(-1))

    def _scatter(self, targets: list[Tensor], values: Tensor) -> None:
        if len(targets) > 1:
            torch._foreach_copy_(targets, self._split(values))
        elif targets[0].data_ptr() != values.data_ptr():
            targets[0].copy_(values)

    def _split(self, values: Tensor) -> list[Tensor]:
        return list(torch.split(values, [staged.piece.last - staged.piece.first for staged in self.pieces]))


def _range(staged: StagedPiece) -> tuple[int, int]:
    piece, period = staged.piece, staged.piece.work.period
    return piece.first * period, piece.last * period

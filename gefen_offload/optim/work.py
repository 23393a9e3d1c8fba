"""What one step works on: the parameter with its gradient, and the block ranges it is cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

PIECE_ELEMENTS = 2**19  # a piece of the plain path: its ten or so float32 transients are 2 MiB each


@dataclass(frozen=True, slots=True)
class Scalars:
    """The hyper-parameters of one group for parameters of one age, read once a step and shared by them.

    Python floats; under `capturable` `bias1`, `bias2` and, where the group's `lr` is a tensor, `lr` and `decay` are 0-d
    tensors on the parameter's device instead.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    decay: float | Tensor  # 1 - lr * weight_decay
    bias1: float | Tensor  # 1 - beta1 ** step
    bias2: float | Tensor  # 1 - beta2 ** (the age of the second moment)


@dataclass(frozen=True, slots=True)
class Work:
    """One parameter that steps now. `gradient` is its flat row-major gradient, (n,); the period divides n.

    Under FSDP2 `parameter` is the local shard. `state` is the live `state[p]`.
    """

    parameter: Tensor
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    name: str
    period: int
    blocks: int
    factored: bool
    scalars: Scalars


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks [first, last) of one parameter. The pieces of a parameter are consecutive, in order, and cover it."""

    work: Work
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """A piece with the state tensors to update in place, on the parameter's device.

    Tensors whose schema entry is cut by blocks are views of rows [first, last); the others are whole, and stay the same
    memory from the parameter's first piece to its last.
    """

    piece: Piece
    tensors: dict[str, Tensor]


def cut(works: Sequence[Work], elements: int | None = PIECE_ELEMENTS) -> list[Piece]:
    """The pieces of `works`, in order: whole blocks, at most `elements` elements but at least one block each.

    With `elements=None` every parameter is one piece.
    """
    return list(_pieces(works, elements))


def _pieces(works: Sequence[Work], elements: int | None) -> Iterator[Piece]:
    for work in works:
        blocks = work.blocks if elements is None else max(1, elements // work.period)
        if blocks >= work.blocks:
            yield Piece(work, 0, work.blocks)
            continue
        for first in range(0, work.blocks, blocks):
            yield Piece(work, first, min(first + blocks, work.blocks))

"""What one step works on: the parameter with its gradient, and the block ranges it is cut into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """One parameter that steps now. `gradient` is its flat row-major gradient, (n,); the period divides n."""

    parameter: Tensor
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    name: str
    period: int
    blocks: int
    factored: bool


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


Update = Callable[[Sequence[StagedPiece]], None]

"""What the engine asks of the work an optimizer hands it, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Work(Protocol):
    """One parameter that steps now."""

    @property
    def parameter(self) -> Tensor: ...
    @property
    def state(self) -> dict[str, Any]: ...
    @property
    def blocks(self) -> int: ...


class Piece(Protocol):
    """Blocks [first, last) of one parameter; the pieces of a parameter are consecutive, in order, and cover it."""

    @property
    def work(self) -> Work: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


class Staged(NamedTuple):
    """A piece with the state tensors to update in place, on the parameter's device."""

    piece: Any
    tensors: dict[str, Tensor]


Update = Callable[[Sequence[Any]], None]
Shapes = dict[str, tuple[tuple[int, ...], Any]]

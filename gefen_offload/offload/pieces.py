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


Launch = Callable[[int], None]
"""Steps the pieces of a window, by its number, on the current stream; the windows of a step in order, from 0."""

Prepare = Callable[[Sequence[Sequence[Any]]], Launch]
"""Gets the staged pieces of every window before any of them is there, and returns what will step them."""


class Again(Protocol):
    """A step that has been run, to be run again on the same tensors with what its `Launch` was told in between."""

    @property
    def valid(self) -> bool:
        """Whether the memory it was prepared for still is the state's."""

    def __call__(self) -> None:
        """Run it."""


Shapes = dict[str, tuple[tuple[int, ...], Any]]

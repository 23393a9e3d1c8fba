"""Where the windows of a step are staged, and whom each has to wait for. Pure.

The staging memory is a ring. A window lies behind the one before it, or at the start again where the rest is too short
for it, so one that is larger than the others, as a single block may be, takes the place of several; only one that is
larger than the ring makes it larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gefen_offload.offload.slab import aligned

ABREAST = 3
"""Full windows that the ring holds: one on its way in, one that is updated, one on its way out."""


@dataclass(frozen=True)
class Turn:
    """Where a window begins in the ring, and the last one before it in any of its bytes: its copies out come first."""

    start: int
    after: int = -1
    """The window's number; -1 for none."""


@dataclass(frozen=True)
class _Held:
    """Bytes of the ring that a window was the last to lie in."""

    start: int
    end: int
    window: int


def ring_bytes_for(sizes: Sequence[int], capacity: int) -> int:
    """The bytes of a ring for windows of these sizes, those of a single large block above `capacity`."""
    largest = max(sizes, default=0)
    return max(_room(largest), min(ABREAST * _room(min(largest, capacity)), sum(map(_room, sizes))))


def take_turns(sizes: Sequence[int], ring_bytes: int) -> list[Turn]:
    """The turn of each window, in order; none is larger than the ring."""
    held: list[_Held] = []
    turns: list[Turn] = []
    end = 0
    for index, size in enumerate(sizes):
        start = end if end + _room(size) <= ring_bytes else 0
        end = start + _room(size)
        under = [old.window for old in held if old.start < end and start < old.end]
        turns.append(Turn(start, max(under, default=-1)))
        # the windows behind `start` are of this lap, so an older one can only stick out at the other end
        held = [old if old.end <= start else _Held(max(old.start, end), old.end, old.window) for old in held]
        held = [*(old for old in held if old.start < old.end), _Held(start, end, index)]
    return turns


def _room(size: int) -> int:
    """The bytes that a window takes up: something even if it has nothing of its own to stage."""
    return aligned(max(1, size))

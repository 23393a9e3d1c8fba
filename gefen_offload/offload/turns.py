"""Where the windows of a step are staged, and whom each has to wait for. Pure.

The staging memory is a ring. A window lies behind the one before it, or at the start again where the rest is too short
for it, so one that is larger than the others, as a single block may be, takes the place of several; only one that is
larger than the ring makes it larger. What lay in its bytes before has to be copied out first: byte by byte, so that a
window begins to arrive while the last of those it displaces is still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gefen_offload.offload.slab import aligned

ABREAST = 3
"""Full windows that the ring holds: one on its way in, one that is updated, one on its way out."""


@dataclass(frozen=True)
class Stretch:
    """The bytes of a window up to `end`, from the stretch before: `after` was the last window to lie there, -1 none."""

    end: int
    after: int


@dataclass(frozen=True)
class Turn:
    """Where a window begins in the ring, and which windows were there before, in the order of its bytes."""

    start: int
    stretches: tuple[Stretch, ...]

    @property
    def after(self) -> int:
        """The last window of those before; -1 for none."""
        return max(stretch.after for stretch in self.stretches)


@dataclass(frozen=True)
class _Held:
    """Bytes of the ring that a window was the last to lie in."""

    start: int
    end: int
    window: int


def ring_bytes_for(sizes: Sequence[int], capacity: int) -> int:
    """The bytes of a ring for windows of these sizes, those of a single large block above `capacity`."""
    rooms = list(map(_room, sizes))
    return max(*rooms, min(ABREAST * _room(capacity), sum(rooms))) if rooms else 0


def take_turns(sizes: Sequence[int], ring_bytes: int) -> list[Turn]:
    """The turn of each window, in order; none is larger than the ring."""
    held = [_Held(0, ring_bytes, -1)]  # in the order of their bytes, without gaps
    turns: list[Turn] = []
    end = 0
    for index, size in enumerate(sizes):
        start = end if end + _room(size) <= ring_bytes else 0
        end = start + _room(size)
        under = [old for old in held if old.start < end and start < old.end]
        turns.append(Turn(start, tuple(Stretch(min(old.end, end) - start, old.window) for old in under)))
        before = [_Held(old.start, min(old.end, start), old.window) for old in held if old.start < start]
        behind = [_Held(max(old.start, end), old.end, old.window) for old in held if end < old.end]
        held = [*before, _Held(start, end, index), *behind]
    return turns


def _room(size: int) -> int:
    """The bytes that a window takes up: something even if it has nothing of its own to stage."""
    return aligned(max(1, size))

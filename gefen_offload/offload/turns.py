"""Which slots the windows of a step are staged in, and whom each has to wait for. Pure.

Windows take the slots in turn. One that is larger than a slot, as a single block may be, takes several that lie side by
side, so that the staging memory need not grow with it; only one larger than all slots together makes them larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gefen_offload.offload.slab import aligned

SLOTS = 3


@dataclass(frozen=True)
class Turn:
    """A window's slots, side by side, and the last window before it in any of them: its copies out come first."""

    slots: tuple[int, ...]
    after: int = -1
    """The window's number; -1 for none."""


def slot_bytes_for(sizes: Sequence[int], capacity: int) -> int:
    """The bytes of a slot, for windows of these sizes, of which those above `capacity` may share slots."""
    largest = max(sizes, default=0)
    return aligned(largest if largest <= capacity else max(capacity, -(-largest // SLOTS)))


def take_turns(sizes: Sequence[int], slot_bytes: int) -> list[Turn]:
    """The turn of each window, in order; none is larger than all slots together."""
    last_in = [-1] * SLOTS
    turns: list[Turn] = []
    begin = 0
    for index, size in enumerate(sizes):
        many = max(1, -(-size // max(1, slot_bytes)))
        begin = begin if begin + many <= SLOTS else 0
        slots = tuple(range(begin, begin + many))
        turns.append(Turn(slots, max(last_in[slot] for slot in slots)))
        for slot in slots:
            last_in[slot] = index
        begin = (begin + many) % SLOTS
    return turns

"""The plan of a step: which pieces share a window, and which bytes are copied where. Pure; nothing here allocates.

A window's pieces are staged side by side in the ring. Small parameters are packed: bytes that are neighbours on the
host stay neighbours there, and move in one copy. A parameter that spans windows has its WHOLE
entries, and the small ones whatever their cut, in a side area, from the window of its first piece to that of its last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from gefen_offload.offload.slab import ALIGNMENT, aligned
from gefen_offload.offload.turns import Turn, ring_bytes_for, take_turns

RAMP = (8, 2)  # the first windows are this much smaller: the first copy out, which a copy in waits for, starts early
SMALL = 4  # a parameter of at most 1/SMALL of a window is not split
LEAST = 16  # a piece is not cut to fill less than 1/LEAST of a window
EVEN = 16
ASIDE = 64  # a tensor of at most 1/ASIDE of a window moves whole


@dataclass(frozen=True)
class Part:
    """The host bytes of a state tensor that one piece works on, and the tensor's own. `memory` tells slabs apart."""

    name: str
    memory: int
    offset: int
    nbytes: int
    start: int
    total: int
    whole: bool = False

    @property
    def opens(self) -> bool:
        """Whether it starts where its tensor does."""
        return self.offset == self.start

    @property
    def closes(self) -> bool:
        """Whether it ends where its tensor does."""
        return self.offset + self.nbytes == self.start + self.total

    @property
    def tensor(self) -> Part:
        """All of its tensor."""
        return replace(self, offset=self.start, nbytes=self.total)


@dataclass(frozen=True)
class Need:
    """What one piece needs staged; pieces of one parameter carry the same number."""

    parameter: int
    parts: tuple[Part, ...]

    def cost(self, *, whole: bool) -> int:
        """An upper bound of the bytes that it takes in a window, with or without the WHOLE entries."""
        return sum(part.nbytes + 2 * ALIGNMENT for part in self.parts if whole or not part.whole)


@dataclass(frozen=True)
class Run:
    """One copy: `nbytes` at `host` of `memory`, and at `staged` of the window, or of the side area if `side`."""

    memory: int
    host: int
    staged: int
    nbytes: int
    side: bool = False


@dataclass(frozen=True)
class Arrival:
    """Copies in that may begin once window `after` has been copied out; -1: at once."""

    after: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Spot:
    """Where a part lies while it is staged."""

    offset: int
    nbytes: int
    side: bool = False


@dataclass(frozen=True)
class Window:
    """Pieces [first, last) of the step, its turn, where each part is staged from its start on, the copies."""

    first: int
    last: int
    turn: Turn
    spots: tuple[dict[str, Spot], ...]
    inward: tuple[Arrival, ...]
    outward: tuple[Run, ...]


@dataclass(frozen=True)
class Plan:
    """All windows of a step, and the bytes that the ring and the side area need."""

    windows: tuple[Window, ...]
    ring_bytes: int
    side_bytes: int

    @property
    def bytes_in(self) -> int:
        """Bytes copied to the device in one step."""
        return sum(run.nbytes for window in self.windows for arrival in window.inward for run in arrival.runs)

    @property
    def bytes_out(self) -> int:
        """Bytes copied back in one step."""
        return sum(run.nbytes for window in self.windows for run in window.outward)


def plan(needs: Sequence[Need], capacity: int) -> Plan:
    """Pack the pieces, in their order, into windows of at most `capacity` bytes, or of one piece."""
    ranges, spanning = _divide(needs, capacity)
    aside = _aside(needs, spanning, capacity // ASIDE)
    packed = [_pack(_in_ring(needs[first:last], aside)) for first, last in ranges]
    sizes = [used for _, used in packed]
    ring_bytes = ring_bytes_for(sizes, capacity)
    turns = take_turns(sizes, ring_bytes)
    areas, side_bytes = _side_areas(needs, ranges, aside, turns)
    windows = [
        _window(needs, first, last, turn, runs, areas)
        for (first, last), turn, (runs, _) in zip(ranges, turns, packed, strict=True)
    ]
    return Plan(tuple(windows), ring_bytes, side_bytes)


# --- pieces cut to fit ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """The bytes of a piece: `row` for each of blocks [first, last), in `tensors` tensors, and `whole` besides."""

    first: int
    last: int
    row: int
    tensors: int
    whole: int

    @property
    def overhead(self) -> int:
        """What alignment may add to the blocks' bytes."""
        return 2 * ALIGNMENT * self.tensors

    def cost(self) -> int:
        """An upper bound of the bytes that the piece takes uncut in a window."""
        return (self.last - self.first) * self.row + self.overhead + self.whole + 4 * ALIGNMENT


@dataclass(frozen=True)
class CutPiece:
    """Blocks [first, last) of the piece numbered `piece`."""

    piece: int
    first: int
    last: int


def cut_to_fit(demands: Sequence[Demand], capacity: int) -> tuple[CutPiece, ...]:
    """Divide large pieces so that windows are filled; small ones stay whole."""
    cuts: list[CutPiece] = []
    window = used = 0
    for index, demand in enumerate(demands):
        cost, room = demand.cost(), room_of(window, capacity)
        if used + cost <= room or cost <= room // SMALL:
            cuts.append(CutPiece(index, demand.first, demand.last))
            window, used = (window + 1, cost) if used + cost > room else (window, used + cost)
            continue
        first = demand.first
        while first < demand.last:
            room = room_of(window, capacity)
            blocks = _blocks_in(room - used - demand.overhead, demand.row)
            if used and blocks * demand.row < min((demand.last - first) * demand.row, room // LEAST):
                window, used = window + 1, 0
                continue
            last = min(demand.last, first + max(1, blocks))
            cuts.append(CutPiece(index, first, last))
            used += (last - first) * demand.row + demand.overhead
            first = last
    return tuple(cuts)


def room_of(window: int, capacity: int) -> int:
    """The bytes that a window holds, by its number."""
    return capacity // RAMP[window] if window < len(RAMP) else capacity


def _blocks_in(nbytes: int, row: int) -> int:
    """How many blocks fit; a multiple of EVEN where there are many, which keeps what follows them aligned."""
    blocks = max(0, nbytes) // max(1, row)
    return blocks - blocks % EVEN if blocks >= 2 * EVEN else blocks


# --- which pieces share a window ------------------------------------------------------------------------------------


@dataclass
class _Packing:
    """Windows closed so far, as ranges of pieces, and the open one."""

    capacity: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    first: int = 0
    end: int = 0
    used: int = 0

    @property
    def room(self) -> int:
        """What the open window holds."""
        return room_of(len(self.ranges), self.capacity)

    def add(self, pieces: int, cost: int) -> None:
        """Put `pieces` pieces of together `cost` bytes into the open window, or into a new one."""
        if self.used and self.used + cost > self.room:
            self.close()
        self.end += pieces
        self.used += cost

    def close(self) -> None:
        if self.end > self.first:
            self.ranges.append((self.first, self.end))
        self.first, self.used = self.end, 0


def _divide(needs: Sequence[Need], capacity: int) -> tuple[list[tuple[int, int]], set[int]]:
    """The windows as ranges of pieces, and the parameters whose pieces may lie in several."""
    packing = _Packing(capacity)
    spanning = set()
    for parameter, group in groupby(needs, key=lambda need: need.parameter):
        pieces = list(group)
        cost = sum(need.cost(whole=index == 0) for index, need in enumerate(pieces))
        fits = packing.used + cost <= packing.room
        if len(pieces) == 1 or fits or cost <= packing.room // SMALL:
            packing.add(len(pieces), cost)
            continue
        spanning.add(parameter)
        for need in pieces:
            packing.add(1, need.cost(whole=False))
    packing.close()
    return packing.ranges, spanning


# --- the side area --------------------------------------------------------------------------------------------------

Aside = dict[int, tuple[Part, ...]]
"""By parameter, its tensors that are staged in the side area."""


@dataclass(frozen=True)
class _Area:
    """Where a spanning parameter's tensors lie in the side area, their copies, and its first and last pieces."""

    base: dict[str, int]
    runs: tuple[Run, ...]
    first: int
    last: int

    def spot(self, part: Part) -> Spot:
        """Where a part of one of them lies."""
        return Spot(self.base[part.name] + part.offset - part.start, part.nbytes, side=True)


def _aside(needs: Sequence[Need], spanning: set[int], small: int) -> Aside:
    """What of the spanning parameters goes to the side area: WHOLE tensors, and those of at most `small` bytes."""
    firsts = {need.parameter: need for need in reversed(needs) if need.parameter in spanning}
    aside = {
        parameter: tuple(part.tensor for part in need.parts if part.whole or part.total <= small)
        for parameter, need in firsts.items()
    }
    return {parameter: parts for parameter, parts in aside.items() if parts}


def _in_ring(needs: Sequence[Need], aside: Aside) -> list[Part]:
    """The parts of a window that are staged in the ring."""
    return [part for need in needs for part in need.parts if not _is_aside(need, part, aside)]


def _is_aside(need: Need, part: Part, aside: Aside) -> bool:
    return any(part.name == other.name for other in aside.get(need.parameter, ()))


def _side_areas(
    needs: Sequence[Need], ranges: Sequence[tuple[int, int]], aside: Aside, turns: Sequence[Turn]
) -> tuple[dict[int, _Area], int]:
    """[Note: side areas] An area is used again only from a window on that waits for the last window of its last use.

    That window's copies in wait for the copies out of `after`, and so for all before those.
    """
    window_of = {piece: index for index, (first, last) in enumerate(ranges) for piece in range(first, last)}
    packed = [(*extent, *_pack(aside[extent[0]])) for extent in _extents(needs) if extent[0] in aside]
    size = aligned(max((used for *_, used in packed), default=0))
    busy_until: list[int] = []  # for each area, the last window that uses it
    areas: dict[int, _Area] = {}
    for parameter, first, last, runs, _ in packed:
        start, end = window_of[first], window_of[last]
        free = next((i for i, until in enumerate(busy_until) if until <= turns[start].after), len(busy_until))
        busy_until[free : free + 1] = [end]
        here = [replace(run, staged=free * size + run.staged, side=True) for run in runs]
        base = {part.name: _spot(part, here).offset for part in aside[parameter]}
        areas[parameter] = _Area(base, tuple(here), first, last)
    return areas, size * len(busy_until)


def _extents(needs: Sequence[Need]) -> Iterator[tuple[int, int, int]]:
    """Each parameter with its first and last piece."""
    for parameter, group in groupby(range(len(needs)), key=lambda index: needs[index].parameter):
        indices = list(group)
        yield parameter, indices[0], indices[-1]


# --- the copies of one window ---------------------------------------------------------------------------------------


def _window(
    needs: Sequence[Need], first: int, last: int, turn: Turn, runs: Sequence[Run], areas: dict[int, _Area]
) -> Window:
    """The window of pieces [first, last), whose place in the ring is filled by `runs`."""
    aside: list[Run] = []
    outward, spots = list(runs), []
    for index in range(first, last):
        area = areas.get(needs[index].parameter)
        base = {} if area is None else area.base
        if area is not None:
            aside += area.runs if index == area.first else ()
            outward += area.runs if index == area.last else ()
        spots.append(
            {
                part.name: area.spot(part) if area is not None and part.name in base else _spot(part, runs)
                for part in needs[index].parts
            }
        )
    return Window(first, last, turn, tuple(spots), _arrivals(turn, runs, aside), tuple(outward))


def _arrivals(turn: Turn, runs: Sequence[Run], aside: Sequence[Run]) -> tuple[Arrival, ...]:
    """The copies in, cut where other windows lay before; those to side areas come last, see [Note: side areas]."""
    by_window: dict[int, list[Run]] = {}
    begin = 0
    for stretch in turn.stretches:
        cut = [_within(run, begin, stretch.end) for run in runs]
        by_window.setdefault(stretch.after, []).extend(run for run in cut if run.nbytes > 0)
        begin = stretch.end
    by_window[turn.after] += aside
    return tuple(Arrival(after, tuple(found)) for after, found in sorted(by_window.items()) if found)


def _within(run: Run, begin: int, end: int) -> Run:
    """What of a copy fills bytes [begin, end) of the window; of no bytes or fewer if nothing does."""
    first, last = max(run.staged, begin), min(run.staged + run.nbytes, end)
    return replace(run, host=run.host + first - run.staged, staged=first, nbytes=last - first)


def _pack(parts: Sequence[Part]) -> tuple[list[Run], int]:
    """As few copies as neighbouring host bytes allow, laid out one after another.

    A copy keeps its host offset's remainder by ALIGNMENT, so that what is aligned on the host is aligned in the ring.
    """
    runs: list[Run] = []
    before: Part | None = None
    end = 0
    for part in sorted({part for part in parts if part.nbytes}, key=lambda part: (part.memory, part.offset)):
        if before is not None and _neighbours(before, part):
            run = runs.pop()
            runs.append(replace(run, nbytes=part.offset + part.nbytes - run.host))
        else:
            runs.append(Run(part.memory, part.offset, aligned(end) + part.offset % ALIGNMENT, part.nbytes))
        end = runs[-1].staged + runs[-1].nbytes
        before = part
    return runs, end


def _neighbours(before: Part, part: Part) -> bool:
    """Whether nothing but padding lies between the two: the bytes of another window must not be copied with these."""
    gap = part.offset - before.offset - before.nbytes
    padding = ALIGNMENT if before.closes and part.opens else 1
    return before.memory == part.memory and 0 <= gap < padding


def _spot(part: Part, runs: Sequence[Run]) -> Spot:
    """Where the copies bring a part."""
    if part.nbytes == 0:
        return Spot(0, 0)
    index = bisect_right(runs, (part.memory, part.offset), key=lambda run: (run.memory, run.host)) - 1
    return Spot(runs[index].staged + part.offset - runs[index].host, part.nbytes)

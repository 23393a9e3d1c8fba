"""From a plan's numbers to views: where each piece's state lies on the host, and where while it is staged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from gefen_offload.offload.accelerator import Pair
from gefen_offload.offload.errors import OffloadReason, OffloadUnsupportedError
from gefen_offload.offload.pieces import Piece
from gefen_offload.offload.schema import Cut, StateSchema
from gefen_offload.offload.slab import HostStore, Place, Slab
from gefen_offload.offload.turns import ABREAST
from gefen_offload.offload.windows import CutPiece, Demand, Need, Part, Plan, Run, Spot, Window


@dataclass(frozen=True)
class Staging:
    """Device memory for windows, uint8: the ring and the side area."""

    ring: Tensor | None = None
    side: Tensor | None = None

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring."""
        return 0 if self.ring is None else self.ring.numel()

    @property
    def side_bytes(self) -> int:
        """Bytes of the side area."""
        return 0 if self.side is None else self.side.numel()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.ring_bytes + self.side_bytes

    def bytes(self, at: Run | Spot, start: int) -> Tensor:
        """The bytes of a copy or a part of the window that begins at `start`."""
        memory, first = (self.side, 0) if at.side else (self.ring, start)
        if memory is None:
            raise RuntimeError("the staging memory has not been reserved")
        first += at.staged if isinstance(at, Run) else at.offset
        return memory[first : first + at.nbytes]


@dataclass(frozen=True)
class BoundWindow:
    """A window with its views: each piece's staged tensors, and the copies as (destination, source).

    The copies in come with the window each of them waits for, see `Arrival`; `after` is the last of those.
    """

    first: int
    last: int
    after: int
    tensors: tuple[dict[str, Tensor], ...]
    inward: tuple[tuple[int, tuple[Pair, ...]], ...]
    outward: tuple[Pair, ...]
    states: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class BoundPlan:
    """A plan on the staging memory, for the pieces as `cuts` divides them. It stands while the state tensors do."""

    parameters: tuple[Tensor, ...]
    windows: tuple[BoundWindow, ...]
    cuts: tuple[CutPiece, ...] | None
    bytes_in: int
    bytes_out: int

    @cached_property
    def first_in(self) -> int:
        """How many windows can be copied in before any has been copied out."""
        return next((index for index, window in enumerate(self.windows) if window.after >= 0), len(self.windows))

    @cached_property
    def last_names(self) -> str:
        """The parameters near the end of the step, for a message."""
        return names_of(window.states[0] for window in self.windows[-ABREAST:])


@dataclass(frozen=True)
class _Entry:
    """One state tensor of a parameter and where it lies."""

    name: str
    tensor: Tensor
    place: Place
    whole: bool

    def part(self, first: int, last: int, blocks: int) -> Part:
        """The bytes of blocks [first, last), or all of them if the entry is WHOLE."""
        place, memory = self.place, self.place.slab.address
        if self.whole:
            return Part(self.name, memory, place.offset, place.nbytes, place.offset, place.nbytes, whole=True)
        row = place.nbytes // blocks
        start = place.offset + first * row
        return Part(self.name, memory, start, (last - first) * row, place.offset, place.nbytes)


class Survey:
    """Where the state of a step's pieces lies. Raises OffloadUnsupportedError for state that offload did not place."""

    def __init__(self, pieces: Sequence[Piece], schema: StateSchema, store: HostStore) -> None:
        self._pieces = pieces
        self._slabs: dict[int, Slab] = {}
        self._entries: dict[int, tuple[_Entry, ...]] = {}
        for piece in pieces:
            key = id(piece.work.parameter)
            if key not in self._entries:
                self._entries[key] = tuple(_entries(piece.work.state, schema, store))
        for entries in self._entries.values():
            self._slabs.update((entry.place.slab.address, entry.place.slab) for entry in entries)

    def demands(self) -> list[Demand]:
        """Each piece's bytes, for the cut."""
        return [self._demand(piece) for piece in self._pieces]

    def _demand(self, piece: Piece) -> Demand:
        entries, blocks = self._entries[id(piece.work.parameter)], piece.work.blocks
        by_blocks = [entry for entry in entries if not entry.whole]
        return Demand(
            piece.first,
            piece.last,
            sum(entry.place.nbytes // blocks for entry in by_blocks),
            len(by_blocks),
            sum(entry.place.nbytes for entry in entries if entry.whole),
        )

    def needs(self, cuts: Sequence[CutPiece] | None) -> list[Need]:
        """What each piece needs staged."""
        return [self._need(piece) for piece in recut(self._pieces, cuts)]

    def _need(self, piece: Piece) -> Need:
        key, blocks = id(piece.work.parameter), piece.work.blocks
        return Need(key, tuple(entry.part(piece.first, piece.last, blocks) for entry in self._entries[key]))

    def bind(self, plan: Plan, cuts: tuple[CutPiece, ...] | None, staging: Staging) -> BoundPlan:
        """The plan's views."""
        pieces = recut(self._pieces, cuts)
        windows = tuple(
            self._bind_window(window, pieces[window.first : window.last], staging) for window in plan.windows
        )
        parameters = tuple(piece.work.parameter for piece in self._pieces if piece.first == 0)
        return BoundPlan(parameters, windows, cuts, plan.bytes_in, plan.bytes_out)

    def _bind_window(self, window: Window, pieces: Sequence[Piece], staging: Staging) -> BoundWindow:
        start = window.turn.start
        tensors = tuple(
            {
                entry.name: self._view(entry, staging.bytes(spots[entry.name], start))
                for entry in self._entries[id(piece.work.parameter)]
            }
            for piece, spots in zip(pieces, window.spots, strict=True)
        )
        inward = tuple(
            (arrival.after, tuple((staging.bytes(run, start), self._host(run)) for run in arrival.runs))
            for arrival in window.inward
        )
        outward = tuple((self._host(run), staging.bytes(run, start)) for run in window.outward)
        states = tuple(piece.work.state for piece in pieces)
        return BoundWindow(window.first, window.last, window.turn.after, tensors, inward, outward, states)

    def _view(self, entry: _Entry, staged: Tensor) -> Tensor:
        shape = entry.tensor.shape
        typed = staged.view(entry.tensor.dtype)
        return typed.view(shape) if entry.whole else typed.view(-1, *shape[1:])

    def _host(self, run: Run) -> Tensor:
        return self._slabs[run.memory].bytes(run.host, run.host + run.nbytes)


def recut(pieces: Sequence[Any], cuts: Sequence[CutPiece] | None) -> Sequence[Any]:
    """The pieces as `cuts` divides them; a piece that stays whole stays itself."""
    if cuts is None:
        return pieces
    return [_recut(pieces[cut.piece], cut) for cut in cuts]


def _recut(piece: Any, cut: CutPiece) -> Any:
    if (cut.first, cut.last) == (piece.first, piece.last):
        return piece
    return replace(piece, first=cut.first, last=cut.last)


def _entries(state: dict[str, Any], schema: StateSchema, store: HostStore) -> Iterator[_Entry]:
    for entry in schema.tensors:
        tensor = state.get(entry.name)
        if tensor is None:
            continue
        place = store.find(tensor)
        if place is None:
            raise moved(state.get("name"), entry.name, tensor)
        yield _Entry(entry.name, tensor, place, entry.cut is Cut.WHOLE)


def names_of(states: Iterable[Mapping[str, Any]]) -> str:
    """The first few parameters with these states, for a message."""
    names = list(dict.fromkeys(str(state.get("name", "an unnamed parameter")) for state in states))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def moved(parameter: object, entry: str, tensor: Tensor) -> OffloadUnsupportedError:
    """State that something else moved or replaced while offload was on."""
    return OffloadUnsupportedError(
        OffloadReason.MOVED,
        f"{entry} of {parameter} is not where offload_state_() put it but a tensor of {tuple(tensor.shape)} on "
        f"{tensor.device}: something moved or replaced optimizer state while offload was on (a trainer's own mover, "
        "say). Call restore_state_() to take it as it is and have it beside the parameters, or load_state_dict() to "
        "replace it; move state with offload_state_(), restore_state_() and move_state_() only",
    )

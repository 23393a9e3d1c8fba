"""The streamed step: copy in, update, copy out, over a ring of staging memory.

[Note: stream order] Three queues take part: `inward` and `outward`, made for copies, and the caller's current stream,
on which the update runs. For window w, and each window `after` that lay in its bytes of the ring before:

    inward:   waits for left[after], copies in what lies there;   records arrived[w]
    current:  waits for arrived[w],  updates w,                   records updated[w]
    outward:  waits for updated[w],  copies w out,                records left[w]

A window is copied in once the copies out of every `after` have been queued. Windows take turns with a few sets of
events: who waits for an event that a later window has recorded again waits for more of the same queue, never for less.

The first windows are copied in before the optimizer has looked at its gradients, where the last plan is sure to be the
next one; what was copied in for a step that does something else is never written back.

Nothing else orders them. The last copy out of a step, `complete`, is waited for by the host before anyone reads the
state: when the step returns, or with deferred write-back when somebody asks, the next step among them.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gefen_offload.offload.accelerator import Accelerator, Event, Stream
from gefen_offload.offload.binding import BoundPlan, BoundWindow, Staging, Survey, names_of, recut
from gefen_offload.offload.pieces import Launch, Piece, Prepare, Staged
from gefen_offload.offload.schema import StateSchema
from gefen_offload.offload.slab import HostStore
from gefen_offload.offload.windows import cut_to_fit, plan

Key = tuple[bool, tuple[tuple[int, int, int], ...]]
MARKS = 8  # more than the windows that usually are in the ring at once
PLANS_KEPT = 4  # steps alternate between few sets of parameters with gradients


class StepError(Exception):
    """A step that failed after a parameter may have changed; `names` says near which ones."""

    def __init__(self, cause: BaseException, names: str) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.names = names


@dataclass(frozen=True)
class Marks:
    """The events of one window."""

    arrived: Event
    updated: Event
    left: Event


@dataclass
class Traffic:
    """What the engine has moved since activation, and how long the copies of a step took from first to last."""

    bytes_in: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0
    steps: int = 0
    windows: int = 0


@dataclass
class _Clock:
    """The timing events of one step: before and after each direction's copies."""

    inward: tuple[Event, Event]
    outward: tuple[Event, Event]
    running: bool = False


@dataclass(eq=False)
class Engine:
    """Streams state through the device. Made at activation, with everything that steady steps use."""

    accelerator: Accelerator
    schema: StateSchema
    store: HostStore
    capacity: int
    staging: Staging = field(default_factory=Staging)
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        with self.accelerator.scope():
            make = self.accelerator.new_event
            self._inward: Stream = self.accelerator.new_stream()
            self._outward: Stream = self.accelerator.new_stream()
            self._marks = tuple(Marks(make(), make(), make()) for _ in range(MARKS))
            self._begun, self._complete = make(), make()
            timed = [make(timing=True) for _ in range(4)]
            self._clock = _Clock((timed[0], timed[1]), (timed[2], timed[3]))
        self._plans: list[tuple[Key, BoundPlan]] = []
        self._prefetched: BoundPlan | None = None  # its first windows are on their way in
        self._pending: str | None = None  # the names in the windows that are still being written back
        weakref.finalize(self, _drain, self._inward, self._outward)

    def reserve(self, ring_bytes: int, side_bytes: int = 0) -> None:
        """Make the ring and the side area at least this large, once nothing uses them. Raises without effect."""
        ring, side = self.staging.ring, self.staging.side
        grow_ring, grow_side = ring_bytes > self.staging.ring_bytes, side_bytes > self.staging.side_bytes
        if not (grow_ring or grow_side):
            return
        self.settle()
        self.cancel_prefetch()
        with self.accelerator.scope():
            empty = self.accelerator.empty
            if grow_ring:
                ring = empty((ring_bytes,), torch.uint8)
            if grow_side:
                side = empty((side_bytes,), torch.uint8)
            self._after_current()
        self.staging = Staging(ring, side)
        self._plans.clear()

    # --- one step ---

    def prepare(self, pieces: Sequence[Piece], prepare: Prepare, *, divisible: bool) -> tuple[BoundPlan, Launch]:
        """The windows of a step over these pieces, and what steps each of them. Nothing has changed yet."""
        try:
            bound = self._bound(pieces, divisible)
            pieces = recut(pieces, bound.cuts)
            staged = [list(map(Staged, pieces[window.first : window.last], window.tensors)) for window in bound.windows]
            return bound, prepare(staged)
        except BaseException:
            self.abandon()
            raise

    def run(self, bound: BoundPlan, launch: Launch, *, wait: bool) -> None:
        """Stream every window through `launch`; with `wait`, return when the host state is complete.

        Raises StepError once a parameter may have changed, and before that whatever went wrong.
        """
        mutated, window = False, None
        try:
            self._first_in_line(bound)
            with self.accelerator.scope():
                current = self.accelerator.current_stream()
                windows, coming = bound.windows, self._copy_first_in(bound)
                for index, window in enumerate(windows):
                    marks = self._marks[index % MARKS]
                    current.wait_event(marks.arrived)
                    mutated = True
                    launch(index)
                    current.record_event(marks.updated)
                    self._copy_out(marks, window)
                    while coming < len(windows) and windows[coming].after <= index:
                        self._copy_in(coming, windows[coming])
                        coming += 1
                self._finish(bound)
            if wait:
                self.settle()
        except StepError:
            self.abandon()
            raise
        except BaseException as cause:
            try:
                self.abandon()
            finally:  # a second interruption must not hide that parameters have changed
                if mutated and window is not None:
                    raise StepError(cause, names_of(window.states)) from cause
            raise

    def prefetch(self, parameters: Iterable[Tensor]) -> None:
        """Copy the first windows in if the next step is one over the same parameters as the last."""
        self.cancel_prefetch()
        if not self._plans:
            return
        bound = self._plans[0][1]
        graded = [parameter for parameter in parameters if parameter.grad is not None]
        if len(graded) != len(bound.parameters) or not all(map(operator.is_, graded, bound.parameters)):
            return
        try:
            with self.accelerator.scope():
                self._copy_first_in(bound)
        except BaseException:
            self.abandon()
            raise
        self._prefetched = bound

    def cancel_prefetch(self) -> None:
        """Forget what is on its way in, once it has arrived: the host state is about to change, or to be looked at."""
        if self._prefetched is not None:
            first = self._prefetched.windows[: self._prefetched.first_in]
            arrivals = [pairs for window in first for _, pairs in window.inward]
            self.traffic.bytes_in += sum(staged.numel() for pairs in arrivals for staged, _ in pairs)
            self._prefetched = None
            _drain(self._inward)

    def _copy_first_in(self, bound: BoundPlan) -> int:
        """Start a step: its first windows, unless they are on their way; how many they are."""
        if self._prefetched is not bound:
            self.cancel_prefetch()
            self._start()
            for index, window in enumerate(bound.windows[: bound.first_in]):
                self._copy_in(index, window)
        self._prefetched = None
        return bound.first_in

    def _start(self) -> None:
        """Copies come after the caller's work so far. The step before is complete: whoever begins one settles first."""
        self._after_current()
        self._inward.record_event(self._clock.inward[0])

    def _after_current(self) -> None:
        begun = self.accelerator.current_stream().record_event(self._begun)
        self._inward.wait_event(begun)

    def _copy_in(self, index: int, window: BoundWindow) -> None:
        for after, pairs in window.inward:
            if after >= 0:
                self._inward.wait_event(self._marks[after % MARKS].left)
            self.accelerator.copy(pairs, self._inward)
        self._inward.record_event(self._marks[index % MARKS].arrived)

    def _copy_out(self, marks: Marks, window: BoundWindow) -> None:
        self._outward.wait_event(marks.updated)
        if window.first == 0:
            self._outward.record_event(self._clock.outward[0])
        self.accelerator.copy(window.outward, self._outward)
        self._outward.record_event(marks.left)

    def _finish(self, bound: BoundPlan) -> None:
        self._inward.record_event(self._clock.inward[1])
        self._outward.record_event(self._clock.outward[1])
        self._outward.record_event(self._complete)
        self._clock.running = True
        self._pending = bound.last_names
        self.traffic.bytes_in += bound.bytes_in
        self.traffic.bytes_out += bound.bytes_out
        self.traffic.windows += len(bound.windows)
        self.traffic.steps += 1

    # --- waiting ---

    @property
    def pending(self) -> bool:
        """Whether a step's write-back has not been waited for."""
        return self._pending is not None

    def settle(self) -> None:
        """Wait until the host state is complete. Raises StepError, once, if a copy back failed."""
        if self._pending is None:
            return
        names, self._pending = self._pending, None
        try:
            self._complete.synchronize()
            self._read_clock()
        except BaseException as cause:
            try:
                self.abandon()
            finally:
                raise StepError(cause, names) from cause

    def abandon(self) -> None:
        """Wait until nothing is in flight, whatever failed."""
        self._pending = self._prefetched = None
        self._clock.running = False
        _drain(self._inward, self._outward)

    def _read_clock(self) -> None:
        if self._clock.running:
            self._clock.running = False
            self._clock.inward[1].synchronize()
            self._clock.outward[1].synchronize()
            self.traffic.seconds_in += self._clock.inward[0].elapsed_time(self._clock.inward[1]) / 1e3
            self.traffic.seconds_out += self._clock.outward[0].elapsed_time(self._clock.outward[1]) / 1e3

    # --- plans ---

    def forget_plans(self) -> None:
        """The state tensors have been replaced."""
        self.cancel_prefetch()
        self._plans.clear()

    def holds(self, bound: BoundPlan) -> bool:
        """Whether the plan still stands."""
        return any(known is bound for _, known in self._plans)

    def _first_in_line(self, bound: BoundPlan) -> None:
        """The next step is likely to be one over the same parameters."""
        if self._plans and self._plans[0][1] is not bound:
            self._plans.sort(key=lambda plan: plan[1] is not bound)

    def _bound(self, pieces: Sequence[Piece], divisible: bool) -> BoundPlan:
        key = (divisible, tuple([(id(piece.work.parameter), piece.first, piece.last) for piece in pieces]))
        for known, bound in self._plans:
            if known == key:
                return bound
        bound = self._bind(pieces, divisible)
        self._plans = [(key, bound), *self._plans[: PLANS_KEPT - 1]]
        return bound

    def _bind(self, pieces: Sequence[Piece], divisible: bool) -> BoundPlan:
        survey = Survey(pieces, self.schema, self.store)
        cuts = cut_to_fit(survey.demands(), self.capacity) if divisible else None
        planned = plan(survey.needs(cuts), self.capacity)
        self.reserve(planned.ring_bytes, planned.side_bytes)
        return survey.bind(planned, cuts, self.staging)


def _drain(*streams: Stream) -> None:
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.synchronize()

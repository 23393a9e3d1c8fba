"""A simulated accelerator on CPU tensors, whose copies are as late, as early or as disordered as a real one's may be.

How it models a device:

- Copies are queued. A queued copy takes effect only when something waits, directly or through other streams, for an
  event recorded after it (`Schedule.LATE`); or as soon as nothing it was told to wait for is missing (`EARLY`); or at
  some moment in between, drawn from a seed (`RANDOM`).
- The memory that a queued copy will write reads as 0xFF until it has: who looks too early, or reuses it, sees that.
- A copy out of device memory sees what the compute stream had written by the last of its events that the copy's own
  stream waited for, not what is there now; before any such wait it sees 0xFF.
- A copy that overwrites memory which an unfinished copy still has to read leaves 0xFF for that copy.
- Any copy, counted from 0, can fail when it is queued or when it takes effect, be lost, or go to another stream; any
  kind of wait can be lost. Allocations are counted, and fail while `frozen`.
"""

from __future__ import annotations

import contextlib
import enum
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gefen_offload.offload import accelerator as seam
from gefen_offload.offload.slab import HostMemory


class Schedule(enum.Enum):
    """When a queued copy takes effect."""

    LATE = "late"
    EARLY = "early"
    RANDOM = "random"


class InjectedError(RuntimeError):
    """The failure that a test asked for."""


@dataclass(frozen=True)
class Fault:
    """Copy number `copy` fails: when it is queued, or when it takes effect."""

    copy: int
    on_arrival: bool = False


@dataclass
class Sabotage:
    """Engine mistakes, planted at the seam. Streams are numbered as they were made; COMPUTE is the caller's."""

    lost_waits: set[tuple[int, int]] = field(default_factory=set)  # (waiting stream, recording stream)
    lost_copies: Callable[[SimulatedCopy], bool] = lambda copy: False
    redirect: Callable[[SimulatedCopy], int | None] = lambda copy: None


COMPUTE = -1


@dataclass(eq=False)
class SimulatedCopy:
    """A queued copy."""

    number: int
    destination: Tensor
    source: Tensor
    stream: int
    inward: bool
    clobbered: bool = False


@dataclass(eq=False)
class SimulatedEvent:
    """A point in a stream: the position in its queue, or for the compute stream what it had written."""

    owner: SimulatedAccelerator
    stream: SimulatedStream | None = None
    position: int = 0
    written: dict[int, Tensor] | None = None
    at: float = 0.0

    def synchronize(self) -> None:
        """Make everything before this point happen."""
        if self.stream is not None:
            self.stream.advance(self.position)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds on the simulation's own clock, which ticks with each copy and event."""
        return end.at - self.at


@dataclass(eq=False)
class SimulatedStream:
    """A queue of copies and waits."""

    owner: SimulatedAccelerator
    number: int
    queue: list[Any] = field(default_factory=list)  # copies, and waits as (event, its stream, its position); then None
    done: int = 0
    written: dict[int, Tensor] | None = None  # what the compute stream had written, as far as this stream has waited

    def wait_event(self, event: SimulatedEvent) -> None:
        """Queue a wait; for the compute stream, which runs at once, wait now."""
        source = COMPUTE if event.stream is None else event.stream.number
        if (self.number, source) in self.owner.sabotage.lost_waits:
            return
        if self.number == COMPUTE:
            event.synchronize()
            self.owner.spoil_unfinished()
        else:
            snapshot = SimulatedEvent(self.owner, event.stream, event.position, event.written)
            self.queue.append((snapshot, event.stream, event.position))
            self.owner.go_on()

    def record_event(self, event: SimulatedEvent) -> SimulatedEvent:
        """Let `event` stand for this point."""
        event.at = self.owner.tick()
        if self.number == COMPUTE:
            event.stream, event.written = None, self.owner.snapshot()
        else:
            event.stream, event.position = self, len(self.queue)
        return event

    def synchronize(self) -> None:
        """Make everything queued here happen."""
        self.advance(len(self.queue))

    def advance(self, position: int) -> None:
        """Make the first `position` entries happen, and what they wait for before them."""
        while self.done < position:
            item = self.queue[self.done]
            if isinstance(item, tuple) and item[1] is not None:
                item[1].advance(item[2])
            self.step()

    def ready(self) -> bool:
        """Whether the next entry can happen without making anything else happen."""
        if self.done == len(self.queue):
            return False
        item = self.queue[self.done]
        return not isinstance(item, tuple) or item[1] is None or item[1].done >= item[2]

    def step(self) -> None:
        """Make the next entry happen."""
        item = self.queue[self.done]
        self.queue[self.done] = None
        self.done += 1
        if isinstance(item, tuple):
            if item[0].written is not None:
                self.written = item[0].written
            elif item[1] is not None and item[1].written is not None and self.written is None:
                self.written = item[1].written
        else:
            self.owner.perform(item, self)


class SimulatedAccelerator:
    """The seam, simulated. Give `device` tensors that product code believes to be on an accelerator."""

    def __init__(self, schedule: Schedule = Schedule.LATE, *, seed: int = 0, fault: Fault | None = None) -> None:
        self.device = torch.device("cpu")
        self.schedule, self.fault, self.sabotage = schedule, fault, Sabotage()
        self.copies = self.allocations = 0
        self.frozen = self.capturing = False
        self.order: list[tuple[str, int]] = []
        self.stranded: set[int] = set()
        self.unusable: set[int] = set()
        self.allocation_fails_at: int | None = None
        self._random = random.Random(seed)
        self._streams: list[weakref.ref[SimulatedStream]] = []
        self._compute = SimulatedStream(self, COMPUTE)
        self._device_memory: list[weakref.ref[Tensor]] = []
        self._host_memory: list[tuple[int, int, weakref.ref[Any]]] = []
        self._clock = 0.0

    # --- the seam ---

    def is_compute(self, tensor: Tensor) -> bool:
        """Whether this stands for device memory: everything outside the host slabs."""
        return id(tensor) not in self.unusable and not self._on_host(tensor)

    def beside(self, tensor: Tensor, parameter: Tensor) -> bool:
        """Whether the tensor stands for device memory, and was not `stranded`."""
        return id(tensor) not in self.stranded and not self._on_host(tensor)

    def is_capturing(self) -> bool:
        """Whether a test says so."""
        return self.capturing

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to enter."""
        return contextlib.nullcontext()

    def current_stream(self) -> SimulatedStream:
        """The compute stream."""
        return self._compute

    def new_stream(self) -> SimulatedStream:
        """A stream for copies."""
        self._allocated("stream")
        stream = SimulatedStream(self, len(self._streams))
        self._streams.append(weakref.ref(stream))
        return stream

    def new_event(self, *, timing: bool = False) -> SimulatedEvent:
        """An event."""
        self._allocated("event")
        return SimulatedEvent(self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory, full of 0xFF."""
        self._allocated("device memory")
        tensor = torch.empty(tuple(shape), dtype=dtype)
        _spoil(tensor)
        self._device_memory = [ref for ref in self._device_memory if ref() is not None]
        self._device_memory.append(weakref.ref(tensor))
        return tensor

    def host(self, nbytes: int, *, pinned: bool) -> HostMemory:
        """Host memory; said to be pinned if asked for."""
        self._allocated("host memory")
        memory = HostMemory(nbytes)
        memory.pinned = pinned
        self._host_memory.append((memory.address, memory.nbytes, weakref.ref(memory.root)))
        return memory

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: SimulatedStream) -> None:
        """Queue the copies."""
        for destination, source in pairs:
            assert destination.shape == source.shape
            assert destination.dtype is source.dtype
            self._queue(destination, source, stream)
        self.go_on()

    # --- copies ---

    def _queue(self, destination: Tensor, source: Tensor, stream: SimulatedStream) -> None:
        copy = SimulatedCopy(self.copies, destination, source, stream.number, not self._on_host(destination))
        self.copies += 1
        self.tick()
        if self.fault is not None and self.fault.copy == copy.number and not self.fault.on_arrival:
            raise InjectedError(f"copy {copy.number} failed when it was queued")
        if self.sabotage.lost_copies(copy):
            return
        elsewhere = self.sabotage.redirect(copy)
        target = stream if elsewhere is None else self._streams[elsewhere]() or stream
        if copy.inward:
            _spoil(destination)
        target.queue.append(copy)
        self.order.append(("queued", copy.number))

    def perform(self, copy: SimulatedCopy, stream: SimulatedStream) -> None:
        """Let a queued copy take effect."""
        self.order.append(("done", copy.number))
        if self.fault is not None and self.fault.copy == copy.number and self.fault.on_arrival:
            _spoil(copy.destination)
            raise InjectedError(f"copy {copy.number} failed on its way")
        for other in self._unfinished():
            if _overlap(other.source, copy.destination):
                other.clobbered = True
        if copy.clobbered:
            _spoil(copy.destination)
        else:
            self._read(copy, stream)

    def _read(self, copy: SimulatedCopy, stream: SimulatedStream) -> None:
        memory = self._memory_of(copy.source)
        if memory is None:
            copy.destination.copy_(copy.source)
            return
        seen = None if stream.written is None else stream.written.get(memory.data_ptr())
        if seen is None:
            _spoil(copy.destination)
            return
        start = copy.source.data_ptr() - memory.data_ptr()
        _bytes(copy.destination).copy_(seen[start : start + copy.source.numel() * copy.source.element_size()])

    def spoil_unfinished(self) -> None:
        """What is queued may happen at any moment: whoever looks at its destination now must not rely on it."""
        for copy in self._unfinished():
            if copy.inward:
                _spoil(copy.destination)

    def go_on(self) -> None:
        """Let happen what the schedule lets happen by itself."""
        if self.schedule is Schedule.LATE:
            return
        ready = [stream for stream in self._live() if stream.ready()]
        while ready and (self.schedule is Schedule.EARLY or self._random.random() < 0.5):
            self._random.choice(ready).step()
            ready = [stream for stream in self._live() if stream.ready()]

    def _live(self) -> list[SimulatedStream]:
        return [stream for ref in self._streams if (stream := ref()) is not None]

    def _unfinished(self) -> list[SimulatedCopy]:
        queued = [item for stream in self._live() for item in stream.queue[stream.done :]]
        return [item for item in queued if isinstance(item, SimulatedCopy)]

    def snapshot(self) -> dict[int, Tensor]:
        """What the compute stream sees in device memory now."""
        live = [ref() for ref in self._device_memory]
        return {memory.data_ptr(): _bytes(memory).clone() for memory in live if memory is not None}

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of device and of host memory that are still in use."""
        device = [ref() for ref in self._device_memory]
        return (
            sum(memory.numel() * memory.element_size() for memory in device if memory is not None),
            sum(nbytes for _, nbytes, root in self._host_memory if root() is not None),
        )

    # --- memory ---

    def tick(self) -> float:
        """The next moment."""
        self._clock += 1.0
        return self._clock

    def _allocated(self, what: str) -> None:
        if self.frozen:
            raise AssertionError(f"{what} was allocated inside a steady step")
        if self.allocation_fails_at == self.allocations:
            self.allocations += 1
            raise InjectedError(f"no {what} left")
        self.allocations += 1

    def _on_host(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        if address == 0:
            return False
        return any(
            first <= address < first + nbytes and root() is not None for first, nbytes, root in self._host_memory
        )

    def _memory_of(self, tensor: Tensor) -> Tensor | None:
        """The device memory that a tensor is a part of."""
        for ref in self._device_memory:
            memory = ref()
            if memory is not None and _overlap(memory, tensor):
                return memory
        return None


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.numel() * other.element_size() and second < first + one.numel() * one.element_size()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _spoil(tensor: Tensor) -> None:
    _bytes(tensor).fill_(0xFF)


@contextlib.contextmanager
def simulated(accelerator: SimulatedAccelerator) -> Iterator[SimulatedAccelerator]:
    """Put `accelerator` where the seam to the device is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "accelerator_for", lambda device: accelerator)
        yield accelerator

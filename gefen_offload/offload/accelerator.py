"""The seam to the device: everything that offload asks of streams, events, memory and copies.

Product code reaches it through `accelerator_for`; tests put a simulated one in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from gefen_offload.offload.slab import HostMemory

Pair = tuple[Tensor, Tensor]
"""A destination and its source: equal shapes and dtypes, both contiguous."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the host until the work before this point is done; raise what went wrong in it."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`, both done and made with `timing`."""


class Stream(Protocol):
    """A queue of work in order."""

    def wait_event(self, event: Event) -> None:
        """Work queued here from now on starts after `event`."""

    def record_event(self, event: Event) -> Event:
        """Let `event` stand for the work queued here so far."""

    def synchronize(self) -> None:
        """Block the host until the work queued here is done; raise what went wrong in it."""


class Accelerator(Protocol):
    """One device."""

    device: torch.device

    def is_compute(self, tensor: Tensor) -> bool:
        """Whether kernels may be given this tensor."""

    def beside(self, tensor: Tensor, parameter: Tensor) -> bool:
        """Whether a state tensor lives where its parameter does."""

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""

    def scope(self) -> AbstractContextManager[None]:
        """Makes this device the current one."""

    def current_stream(self) -> Stream:
        """The stream that the caller's own work goes to."""

    def new_stream(self) -> Stream:
        """A stream for copies."""

    def new_event(self, *, timing: bool = False) -> Event:
        """An event, not yet recorded; waiting for it then is no wait."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the device, ready for the current stream."""

    def host(self, nbytes: int, *, pinned: bool) -> HostMemory:
        """Zero-filled host memory; registered with the device if asked for and possible."""

    def copy(self, pairs: Sequence[Pair], stream: Stream) -> None:
        """Queue copies on `stream`, in order."""


class Immediate:
    """A stream and an event of a device whose copies are done when they return."""

    def wait_event(self, event: Event) -> None:
        """Nothing is ever pending."""

    def record_event(self, event: Event) -> Event:
        """Nothing is ever pending."""
        return event

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def elapsed_time(self, end: Event) -> float:
        """No time is measured."""
        return 0.0


class PlainDevice:
    """A device that offload does not stream to, such as the CPU: state can be moved there, one copy after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def is_compute(self, tensor: Tensor) -> bool:
        """Never: nothing here is on CUDA."""
        return False

    def beside(self, tensor: Tensor, parameter: Tensor) -> bool:
        """Whether both are on one device."""
        return tensor.device == parameter.device

    def is_capturing(self) -> bool:
        """Never."""
        return False

    def scope(self) -> AbstractContextManager[None]:
        """Nothing to enter."""
        return nullcontext()

    def current_stream(self) -> Stream:
        """A stream on which nothing is pending."""
        return Immediate()

    def new_stream(self) -> Stream:
        """A stream on which nothing is pending."""
        return Immediate()

    def new_event(self, *, timing: bool = False) -> Event:
        """An event that has happened."""
        return Immediate()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the device."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def host(self, nbytes: int, *, pinned: bool) -> HostMemory:
        """Pageable host memory."""
        return HostMemory(nbytes)

    def copy(self, pairs: Sequence[Pair], stream: Stream) -> None:
        """Copy now."""
        for destination, source in pairs:
            destination.copy_(source)


def accelerator_for(device: torch.device) -> Accelerator:
    """The seam to `device`."""
    if device.type == "cuda":
        from gefen_offload.offload.cuda import CudaAccelerator

        return CudaAccelerator(device)
    return PlainDevice(device)


def transfer(accelerator: Accelerator, pairs: Sequence[Pair]) -> None:
    """Copy every pair, after the caller's current work, and wait until all of them have arrived.

    Nothing is in flight when this returns or raises.
    """
    if not pairs:
        return
    with accelerator.scope():
        stream = accelerator.new_stream()
        stream.wait_event(accelerator.current_stream().record_event(accelerator.new_event()))
        try:
            accelerator.copy(pairs, stream)
        finally:
            stream.synchronize()

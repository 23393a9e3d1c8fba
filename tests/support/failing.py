"""The seam to a GPU, whose copies and allocations can be told to fail: for tests that go through every one of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_offload.offload.accelerator import Event, Pair, Stream
from gefen_offload.offload.cuda import CudaAccelerator
from gefen_offload.offload.slab import HostMemory
from support.simulated import Fault, InjectedError


class FailingCuda(CudaAccelerator):
    """Counts what passes, and fails what it is told to, as `SimulatedAccelerator` does.

    A copy that fails on its way has been queued like any other: the host learns of it when it next waits.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.fault: Fault | None = None
        self.copies = self.allocations = 0
        self.allocation_fails_at: int | None = None
        self._lost: int | None = None  # a copy that failed on its way, and that nobody has waited for
        self._host_memory: list[tuple[int, weakref.ref[Any]]] = []

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of device and of host memory that are still in use."""
        torch.cuda.synchronize(self.device)
        host = sum(nbytes for nbytes, root in self._host_memory if root() is not None)
        return torch.cuda.memory_allocated(self.device), host

    def copy(self, pairs: Sequence[Pair], stream: Stream) -> None:
        """Queue the copies, up to one that fails."""
        numbers = range(self.copies, self.copies + len(pairs))
        self.copies = numbers.stop
        if self.fault is None or self.fault.copy not in numbers:
            super().copy(pairs, stream)
        elif self.fault.on_arrival:
            super().copy(pairs, stream)
            self._lost = self.fault.copy
        else:
            super().copy(pairs[: self.fault.copy - numbers.start], stream)
            raise InjectedError(f"copy {self.fault.copy} failed when it was queued")

    def new_stream(self) -> Stream:
        """A stream for copies."""
        self._allocated("stream")
        return self._watched(super().new_stream())

    def new_event(self, *, timing: bool = False) -> Event:
        """An event."""
        self._allocated("event")
        return self._watched(super().new_event(timing=timing))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory."""
        self._allocated("device memory")
        return super().empty(shape, dtype)

    def host(self, nbytes: int, *, pinned: bool) -> HostMemory:
        """Host memory."""
        self._allocated("host memory")
        memory = super().host(nbytes, pinned=pinned)
        self._host_memory.append((memory.nbytes, weakref.ref(memory.root)))
        return memory

    def _allocated(self, what: str) -> None:
        self.allocations += 1
        if self.allocation_fails_at == self.allocations - 1:
            raise InjectedError(f"no {what} left")

    def _watched(self, thing: Any) -> Any:
        """A stream or an event at which the host learns of a copy that failed."""
        wait: Callable[[], None] = thing.synchronize

        def synchronize() -> None:
            wait()
            if self._lost is not None:
                number, self._lost = self._lost, None
                raise InjectedError(f"copy {number} failed on its way")

        thing.synchronize = synchronize
        return thing

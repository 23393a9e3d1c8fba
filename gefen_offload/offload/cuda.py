"""The seam on CUDA: registered host memory, dedicated copy streams, events."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from gefen_offload.offload.accelerator import Event, Pair, Stream
from gefen_offload.offload.slab import HostMemory

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class CudaAccelerator:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)

    def is_compute(self, tensor: Tensor) -> bool:
        """Whether it is on CUDA. Where memory is coherent, a host tensor would not crash a kernel, only corrupt."""
        return tensor.is_cuda

    def beside(self, tensor: Tensor, parameter: Tensor) -> bool:
        """Whether both are on one device."""
        return tensor.device == parameter.device

    def is_capturing(self) -> bool:
        """Whether this device's current stream records a CUDA graph."""
        with self.scope():
            return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Makes this device the current one."""
        with torch.cuda.device(self.device):
            yield

    def current_stream(self) -> Stream:
        """The caller's current stream on this device."""
        return cast(Stream, torch.cuda.current_stream(self.device))

    def new_stream(self) -> Stream:
        """A stream of the high-priority pool, which callers and NCCL rarely draw from."""
        return cast(Stream, torch.cuda.Stream(self.device, priority=-1))  # type: ignore[no-untyped-call]

    def new_event(self, *, timing: bool = False) -> Event:
        """An event, not yet recorded."""
        return cast(Event, torch.cuda.Event(enable_timing=timing))  # type: ignore[no-untyped-call]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of torch's caching allocator, ready for the current stream."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def host(self, nbytes: int, *, pinned: bool) -> HostMemory:
        """Host memory, registered as it is: nothing is rounded up. Pageable, with a warning, where that is refused."""
        memory = HostMemory(nbytes)
        if pinned:
            self._register(memory)
        return memory

    def _register(self, memory: HostMemory) -> None:
        with self.scope():
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(memory.address, memory.nbytes, PORTABLE))
            if code != 0:
                self._forget_error()
                warnings.warn(
                    f"CUDA refused to pin {memory.nbytes} bytes of host memory (cudaHostRegister returned {code}); "
                    "offload goes on with pageable memory, several times slower. Raise the limit of locked memory "
                    "(`ulimit -l`) to pin it.",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return
        memory.pinned = True
        device, address = self.device, memory.address
        memory.on_release(lambda: _unregister(device, address))

    def _forget_error(self) -> None:
        """A failed runtime call is reported again by the next kernel launch: let that be this one."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(0)

    def copy(self, pairs: Sequence[Pair], stream: Stream) -> None:
        """Queue asynchronous copies on `stream`."""
        before = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(cast(torch.cuda.Stream, stream))  # a context manager would look up the device as well
        try:
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(before)


def _unregister(device: torch.device, address: int) -> None:
    """[Note: slab lifetime] No copy may still use memory that is unregistered and freed."""
    with contextlib.suppress(Exception), torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

"""Host storage for state: slabs of page-aligned memory, cut into tight tensors of their own storage.

[Note: slab lifetime] A slab lives exactly as long as some tensor in it. Tensors hold the slab's root array, and the
root's finaliser runs while the memory is still mapped: it waits for the copies in flight, then unregisters the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gefen_offload.offload.pieces import Shapes

ALIGNMENT = 16
PAGE = mmap.PAGESIZE


def aligned(offset: int) -> int:
    """The next multiple of ALIGNMENT, `offset` included."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def nbytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes of a tight tensor."""
    return prod(shape) * dtype.itemsize


class HostMemory:
    """Zero-filled host memory, page-aligned and touched. Shared with forked children, so that a fork never moves it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(1, -(-nbytes // PAGE)) * PAGE
        pages = mmap.mmap(-1, self.nbytes)
        with contextlib.suppress(AttributeError, OSError, ValueError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.root: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(pages, np.uint8)
        self.root[::PAGE] = 0
        self.address = int(self.root.ctypes.data)
        self.pinned = False

    def on_release(self, action: Callable[[], None]) -> None:
        """Run `action` when the last tensor in this memory is gone, while the memory is still mapped."""
        weakref.finalize(self.root, action)


@dataclass(frozen=True)
class Slab:
    """One allocation as the store knows it; the tensors in it, not the store, keep it alive."""

    address: int
    nbytes: int
    asked: int
    pinned: bool
    root: weakref.ref[Any]

    def bytes(self, first: int, last: int) -> Tensor:
        """The bytes [first, last), uint8."""
        root = self.root()
        if root is None:
            raise RuntimeError(f"the {self.nbytes} bytes of host state at {self.address:#x} have been freed")
        return torch.from_numpy(root[first:last])


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    slab: Slab
    offset: int
    nbytes: int


Allocate = Callable[[int], HostMemory]


class HostStore:
    """Allocates state tensors in slabs, one slab a call, and knows where each of them lies."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._slabs: list[Slab] = []

    def zeros(self, requests: Sequence[Shapes]) -> list[dict[str, Tensor]]:
        """Zero-filled tensors, in the requests' order, one after another in one slab."""
        offsets, asked = lay_out(requests)
        if asked == 0:
            return [{name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in r.items()} for r in requests]
        memory = self._allocate(asked)
        tensors = [
            {name: _tensor(memory, start[name], shape, dtype) for name, (shape, dtype) in request.items()}
            for request, start in zip(requests, offsets, strict=True)
        ]
        exact = sum(nbytes_of(shape, dtype) for request in requests for shape, dtype in request.values())
        self._slabs = [slab for slab in self._slabs if slab.root() is not None]
        self._slabs.append(Slab(memory.address, memory.nbytes, exact, memory.pinned, weakref.ref(memory.root)))
        return tensors

    def find(self, tensor: Tensor) -> Place | None:
        """Where `tensor` lies; None if it is not a tight tensor of one of the slabs."""
        if tensor.device.type != "cpu":
            return None
        address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        if tensor.untyped_storage().nbytes() != nbytes or not tensor.is_contiguous():
            return None
        for slab in self._slabs:
            if slab.address <= address < slab.address + slab.nbytes and slab.root() is not None:
                return Place(slab, address - slab.address, nbytes)
        return None

    @property
    def slabs(self) -> list[Slab]:
        """The slabs with a live tensor."""
        return [slab for slab in self._slabs if slab.root() is not None]


def lay_out(requests: Sequence[Mapping[str, tuple[Sequence[int], torch.dtype]]]) -> tuple[list[dict[str, int]], int]:
    """Each tensor's offset, aligned, request by request, and the bytes of all of them.

    Within a request the smaller come first: a parameter that spans windows has its small tensors copied as one.
    """
    offsets: list[dict[str, int]] = []
    end = 0
    for request in requests:
        starts = {}
        for name, (shape, dtype) in sorted(request.items(), key=lambda item: nbytes_of(*item[1])):
            starts[name] = aligned(end)
            end = starts[name] + nbytes_of(shape, dtype)
        offsets.append(starts)
    return offsets, end


def _tensor(memory: HostMemory, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    nbytes = nbytes_of(shape, dtype)
    if nbytes == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.from_numpy(memory.root[offset : offset + nbytes]).view(dtype).view(tuple(shape))

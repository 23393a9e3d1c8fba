"""Launching Triton kernels with little work on the host, and the tables they read.

[Note: launches] Triton's own launcher inspects every argument on every call. Here a kernel is compiled by its first
ordinary launch and then started through what that launch returned, with addresses for pointers. That is sound because
the arguments are always of the same kinds: buffers of ours, 16-byte aligned, and integers nobody specialises on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_offload.optim.fused.arithmetic import INTERPRETED


class Kernel:
    """A Triton kernel, compiled once for each choice of constants; `launches` counts its starts."""

    launches = 0

    def __init__(self, function: Any, registers: int | None = None) -> None:
        """`registers` bounds those of a thread, so that more programs share a multiprocessor."""
        self._function = function
        self.registers = registers
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, programs: int, buffers: Sequence[Tensor], numbers: Sequence[int], constants: tuple[Any, ...], warps: int
    ) -> None:
        """Start `programs` programs on the current stream of the current device.

        A kernel's parameters are the table's three buffers, the `numbers`, the other buffers, and the `constants`.
        """
        Kernel.launches += 1
        key = (constants, warps, self.registers, buffers[0].device)
        compiled = self._compiled.get(key)
        if compiled is None:
            options = {"num_warps": warps, "enable_fp_fusion": False}
            if self.registers is not None:
                options["maxnreg"] = self.registers
            compiled = self._function[(programs,)](*_interleaved(buffers, numbers), *constants, **options)
            if not INTERPRETED.value:
                self._compiled[key] = compiled
            return
        compiled[(programs, 1, 1)](*_interleaved([b.data_ptr() for b in buffers], numbers), *constants)


def _interleaved(buffers: Sequence[Any], numbers: Sequence[int]) -> tuple[Any, ...]:
    """words, floats, starts; row, start; then the other buffers."""
    return (*buffers[:3], *numbers, *buffers[3:])


class Table:
    """A table of one call's pieces: written in pinned memory, copied to the device in one piece."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._used = False
        self._words = 0
        self.reserve(2**15)

    def reserve(self, size: int) -> None:
        """Have room for `size` bytes. Content that is still being read is waited for."""
        if size <= 8 * self._words:
            return
        self._wait()
        self._words = size // 4  # twice as much, so that it is seldom done again
        self._host = torch.empty(self._words, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._bytes = memoryview(self._host.numpy()).cast("B")  # type: ignore[arg-type, unused-ignore]
        words = torch.empty(self._words, dtype=torch.int64, device=self._device)
        self.buffers = (words, words.view(torch.float32), words.view(torch.int32))

    def upload(self, content: bytes) -> None:
        """Put `content` (a multiple of 8 bytes) at the beginning of the device's table, on the current stream."""
        self.reserve(len(content))
        self._wait()
        self._bytes[: len(content)] = content
        words = len(content) // 8
        self.buffers[0][:words].copy_(self._host[:words], non_blocking=True)

    def release(self) -> None:
        """The launches that read this content are all queued."""
        self._used = True
        if self.event is not None:
            self.event.record()

    def _wait(self) -> None:
        """[Note: reuse] Neither the copy nor a kernel may still read the old content when it is written over."""
        if self._used and self.event is not None:
            self.event.synchronize()


class Scratch:
    """Device memory for sums between launches of one flush; it only ever grows."""

    def __init__(self, device: torch.device, floats: int) -> None:
        self.tensor = torch.empty(floats, dtype=torch.float32, device=device)
        self.used = 0

    def take(self, floats: int) -> int:
        """The position of `floats` new floats, a multiple of 4."""
        position, self.used = self.used, self.used + (floats + 3) // 4 * 4
        return position

    def fit(self) -> None:
        """Make room for what has been taken."""
        if self.used > self.tensor.numel():
            self.tensor = torch.empty(self.used, dtype=torch.float32, device=self.tensor.device)

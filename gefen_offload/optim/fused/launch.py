"""Launching Triton kernels with little work on the host, and the tables they read.

[Note: launches] Triton's own launcher inspects every argument on every call. Here a kernel is compiled once and then
started through what the compiler returned, with addresses for pointers. That is sound because the arguments are always
of the same kinds: buffers of ours, 16-byte aligned, and integers nobody specialises on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gefen_offload.optim.fused.arithmetic import INTERPRETED

Start = Callable[[int], None]
"""Starts a kernel on the stream of this handle."""


class Kernel:
    """A Triton kernel, compiled once for each choice of constants; `launches` counts the starts of all kernels."""

    launches = 0

    def __init__(self, function: Any, registers: int | None = None) -> None:
        """`registers` bounds those of a thread, so that more programs share a multiprocessor."""
        self._function = function
        self.registers = registers
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def bind(
        self, programs: int, buffers: Sequence[Tensor], numbers: Sequence[int], constants: tuple[Any, ...], warps: int
    ) -> Start:
        """What starts `programs` programs on the current device; compiles the kernel if it has not been yet.

        A kernel's parameters are the table's three buffers, the `numbers`, the other buffers, and the `constants`.
        """
        options = {"num_warps": warps, "enable_fp_fusion": False}
        if self.registers is not None:
            options["maxnreg"] = self.registers
        if INTERPRETED.value:
            interpreted = self._function[(programs,)]
            return lambda _: interpreted(*_interleaved(buffers, numbers), *constants, **options)
        key = (constants, warps, buffers[0].device)
        if key not in self._compiled:
            arguments = _interleaved(buffers, numbers)
            self._compiled[key] = self._function.warmup(*arguments, *constants, grid=(1,), **options)
        runner = self._compiled[key][(programs, 1, 1)]
        return partial(_start, runner, (*_interleaved([b.data_ptr() for b in buffers], numbers), *constants))

    def __call__(
        self, programs: int, buffers: Sequence[Tensor], numbers: Sequence[int], constants: tuple[Any, ...], warps: int
    ) -> None:
        """Start it once, on the current stream of the current device."""
        Kernel.launches += 1
        self.bind(programs, buffers, numbers, constants, warps)(stream_of(buffers[0].device))


def _start(runner: Any, arguments: tuple[Any, ...], stream: int) -> None:
    runner(*arguments, stream=stream)


def stream_of(device: torch.device) -> int:
    """The handle of the device's current stream; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _interleaved(buffers: Sequence[Any], numbers: Sequence[int]) -> tuple[Any, ...]:
    """words, floats, starts; row, start; then the other buffers."""
    return (*buffers[:3], *numbers, *buffers[3:])


class Table:
    """Rows of words that kernels read, then constants: kept here, changed here, and copied to the device in one piece.

    [Note: reuse] The copy is queued on the stream of the kernels that read the table, so it follows those of an earlier
    upload. The pinned memory it is made from is written again only when that copy is done.
    """

    UNDER_WAY = 4  # uploads, before the host waits for one

    def __init__(self, device: torch.device, rows: bytes, constants: bytes) -> None:
        """`rows` and `constants` are multiples of 8 bytes; the rows may be changed through `words` and `floats`."""
        self.words = np.frombuffer(rows, np.int64).copy()
        self.floats = self.words.view(np.float32)
        content = np.concatenate([self.words, np.frombuffer(constants, np.int64)])
        device_words = torch.from_numpy(content).to(device, copy=True)
        self.buffers = (device_words, device_words.view(torch.float32), device_words.view(torch.int32))
        self._target = device_words[: len(self.words)]
        self._turn = 0
        cuda = device.type == "cuda"
        self._hosts = [_Host(len(self.words), pinned=cuda) for _ in range(self.UNDER_WAY if cuda else 1)]

    def upload(self) -> None:
        """Bring the rows to the device, on the current stream."""
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % len(self._hosts)
        host.send(self.words, self._target)


class _Host:
    """Pinned memory for one upload."""

    def __init__(self, words: int, *, pinned: bool) -> None:
        self._tensor = torch.empty(words, dtype=torch.int64, pin_memory=pinned)
        self._array = self._tensor.numpy()
        self._sent: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def send(self, words: Any, target: Tensor) -> None:
        if self._sent is not None:
            self._sent.synchronize()
        self._array[:] = words
        target.copy_(self._tensor, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class Scratch:
    """Device memory for sums between launches; it only ever grows."""

    def __init__(self, device: torch.device, floats: int) -> None:
        self.tensor = torch.empty(floats, dtype=torch.float32, device=device)

    def fit(self, floats: int) -> None:
        """Make room for `floats`."""
        if floats > self.tensor.numel():
            self.tensor = torch.empty(floats, dtype=torch.float32, device=self.tensor.device)

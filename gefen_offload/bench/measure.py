"""Timing steps and reading memory, on a GPU or on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of single steps, each synchronised."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """The interquartile range, or the whole range of fewer than four samples."""
        if len(self.samples) < 4:
            return max(self.samples) - min(self.samples)
        low, _, high = statistics.quantiles(self.samples, n=4)
        return high - low


@dataclass(frozen=True)
class Memory:
    """GPU bytes above what was held before the optimizer: between steps, and at most during them."""

    persistent: int
    peak: int


def time_steps(
    step: Callable[[], object],
    device: torch.device,
    *,
    warmup: int = 2,
    repeats: int = 10,
    ready: Callable[[], object] = lambda: None,
) -> Timing:
    """Time `repeats` steps after `warmup` others, each after `ready()`."""
    samples = []
    for index in range(warmup + repeats):
        ready()
        synchronize(device)
        begun = time.perf_counter()
        step()
        synchronize(device)
        if index >= warmup:
            samples.append(time.perf_counter() - begun)
    return Timing(tuple(samples))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on the GPU; 0 on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Begin to watch the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """The most bytes of live tensors since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """Bytes the GPU could still give."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0

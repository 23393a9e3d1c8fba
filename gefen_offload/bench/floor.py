"""The least time that state can be streamed in: bare copies both ways through the same slots, with nothing in between.

[Note: slots] A window is copied in on one stream, touched on the current one and copied out on another, over three
slots that are used again and again: the engine's pattern without its work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SLOTS = 3


@dataclass(frozen=True)
class Floor:
    """Seconds to stream `nbytes` in and out at once through slots of `slot_bytes`, and each way alone, in bytes/s."""

    nbytes: int
    slot_bytes: int
    seconds: float
    in_alone: float
    out_alone: float

    @property
    def each_way(self) -> float:
        """Bytes a second in each direction at once."""
        return self.nbytes / self.seconds


def duplex_floor(
    device: torch.device,
    nbytes: int,
    slot_bytes: int,
    *,
    repeats: int = 5,
    ready: Callable[[], object] = lambda: None,
) -> Floor:
    """Measure the link of a CUDA device: the median of `repeats` streams of `nbytes`, each after `ready()`.

    With a barrier for `ready` several ranks stream at once.
    """
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    pipeline = _Pipeline(host, slots, device)
    pipeline.run()
    samples = []
    for _ in range(repeats):
        ready()
        samples.append(_timed(pipeline.run, device))
    seconds = statistics.median(samples)
    part = host[:slot_bytes]
    rounds = 16
    alone = [
        rounds * part.numel() / _timed(lambda a=a, b=b: [a.copy_(b, non_blocking=True) for _ in range(rounds)], device)
        for a, b in ((slots[0][: part.numel()], part), (part, slots[0][: part.numel()]))
    ]
    return Floor(nbytes, slot_bytes, seconds, *alone)


def _timed(run: object, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    run()  # type: ignore[operator]
    torch.cuda.synchronize(device)
    return time.perf_counter() - begun


class _Pipeline:
    def __init__(self, host: torch.Tensor, slots: list[torch.Tensor], device: torch.device) -> None:
        self._windows = torch.split(host, slots[0].numel())
        self._slots = slots
        self._inward, self._outward = _stream(device), _stream(device)
        self._device = device
        self._full, self._done, self._free = ([_event() for _ in slots] for _ in range(3))

    def run(self) -> None:
        """Stream every window in and out."""
        current = torch.cuda.current_stream(self._device)
        self._inward.wait_stream(current)
        for event in self._free:
            event.record(current)
        for index, window in enumerate(self._windows):
            turn = index % len(self._slots)
            slot = self._slots[turn][: window.numel()]
            with torch.cuda.stream(self._inward):
                self._inward.wait_event(self._free[turn])
                slot.copy_(window, non_blocking=True)
                self._full[turn].record()
            current.wait_event(self._full[turn])
            slot[:256].add_(1)
            self._done[turn].record(current)
            with torch.cuda.stream(self._outward):
                self._outward.wait_event(self._done[turn])
                window.copy_(slot, non_blocking=True)
                self._free[turn].record()
        current.wait_stream(self._outward)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]

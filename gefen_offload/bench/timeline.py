"""One step as the GPU saw it: when each copy and kernel ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

LANES = ("copy in", "update", "copy out")


@dataclass(frozen=True)
class Interval:
    """Milliseconds from the beginning of the step."""

    lane: str
    start: float
    end: float


def record(step: Callable[[], object]) -> list[Interval]:
    """Every copy and kernel of one step, in order of their beginnings."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    events = [(e.name, e.time_range.start, e.time_range.end) for e in trace.events() or [] if _on_gpu(e)]
    begun = min((start for _, start, _ in events), default=0.0)
    found = [Interval(_lane(name), (start - begun) / 1e3, (end - begun) / 1e3) for name, start, end in events]
    return sorted(found, key=lambda interval: interval.start)


def _on_gpu(event: object) -> bool:
    """Not an annotation, which spans what it annotates."""
    named = str(getattr(event, "name", ""))
    return str(getattr(event, "device_type", "")).endswith("CUDA") and "#" not in named


def _lane(name: str) -> str:
    return LANES[0] if "HtoD" in name else LANES[2] if "DtoH" in name else LANES[1]


def draw(intervals: Sequence[Interval], path: Path) -> Path:
    """A bar for each copy and kernel, a row for each lane; needs matplotlib."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 2.4), layout="constrained")
    for row, lane in enumerate(LANES):
        bars = [(i.start, max(i.end - i.start, 0.01)) for i in intervals if i.lane == lane]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=f"C{row}", edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds from the beginning of the step")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path

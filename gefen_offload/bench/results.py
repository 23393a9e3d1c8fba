"""What a run found: plain frozen values, which the report prints, draws and writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gefen_offload.bench.floor import Floor
from gefen_offload.bench.measure import Memory, Timing
from gefen_offload.bench.timeline import Interval


@dataclass(frozen=True)
class Entry:
    """One optimizer on one workload: seconds and bytes, or the reason for which there is nothing."""

    workload: str
    name: str
    elements: int = 0
    tensors: int = 0
    staging: int = 0
    first: float | None = None
    step: Timing | None = None
    memory: Memory | None = None
    pinned_asked: int = 0
    pinned_reserved: int = 0
    streamed: int = 0
    floor: Floor | None = None
    version: str | None = None
    absent: str | None = None
    timeline: tuple[Interval, ...] = ()

    @property
    def floor_fraction(self) -> float | None:
        """The step over the least time for its bytes both ways; None where nothing is streamed."""
        if self.floor is None or self.step is None or not self.streamed:
            return None
        return self.step.median / (self.floor.seconds * self.streamed / self.floor.nbytes)

    @property
    def each_way(self) -> float | None:
        """Bytes a second in each direction, over the whole step."""
        return self.streamed / self.step.median if self.step is not None and self.streamed else None


@dataclass
class Results:
    """Every entry of a run, in order, and the machine."""

    machine: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        entries = [
            asdict(entry)
            | {
                "median": entry.step.median if entry.step else None,
                "spread": entry.step.spread if entry.step else None,
                "floor_fraction": entry.floor_fraction,
                "each_way": entry.each_way,
            }
            for entry in self.entries
        ]
        return {"machine": self.machine, "entries": entries}

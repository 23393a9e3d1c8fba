"""What a run that passed brought back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gefen_offload.ranks.compare import Comparison, identical
from gefen_offload.ranks.outcome import Outcome


@dataclass(frozen=True)
class Result:
    """`values[r]` is what rank r returned, `seconds` the time from dispatch to the last outcome."""

    values: list[Any]
    seconds: float
    outcomes: tuple[Outcome, ...]
    _stdout: tuple[str, ...] = field(default=(), repr=False)
    _stderr: tuple[str, ...] = field(default=(), repr=False)
    fired: tuple[str, ...] = ()

    def stdout(self, rank: int) -> str:
        """What the rank wrote to its standard output during this run."""
        return self._stdout[rank]

    def stderr(self, rank: int) -> str:
        """What the rank wrote to its standard error during this run."""
        return self._stderr[rank]

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUID of the GPU each rank ran on; "cpu" without one."""
        return tuple(o.device for o in self.outcomes)

    @property
    def leaks(self) -> tuple[str, ...]:
        """What the run left behind, as `rank 1: thread 'x'`."""
        return tuple(f"rank {o.rank}: {leak}" for o in self.outcomes for leak in o.leaks)

    def identical(self) -> Comparison:
        """Whether every rank returned the bits of rank 0."""
        return all_identical(self.values)


def all_identical(values: Sequence[Any]) -> Comparison:
    """Compare every value with the first; the differences of the first rank that differs."""
    for rank, value in enumerate(values[1:], start=1):
        comparison = identical(values[0], value, label=f" (rank 0 and rank {rank})")
        if not comparison:
            return comparison
    return Comparison(())

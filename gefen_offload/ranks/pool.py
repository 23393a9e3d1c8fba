"""A pool: the processes of one world that share one default group and, on GPUs, one lease."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gefen_offload.ranks.outcome import Outcome, judge
from gefen_offload.ranks.process import RankProcess
from gefen_offload.ranks.supervise import Supervisor
from gefen_offload.ranks.wire import Join, Task

JOINING = -1


@dataclass(frozen=True)
class Key:
    """What a pool is chosen by."""

    world: int
    backend: str | None
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.backend or 'no group'}, world {self.world}"


class Pool:
    """Ranks that have joined, or are joining, one group."""

    def __init__(self, key: Key, processes: Sequence[RankProcess], joins: Sequence[Join]) -> None:
        self.key, self.processes = key, processes
        self.last_test = ""
        self.used = time.monotonic()
        self._joins = joins
        self.joined = False

    def join(self, patience: float) -> list[Outcome]:
        """Make the group; the outcomes of that, as of any task."""
        outcomes = self._dispatch(
            [(p, join) for p, join in zip(self.processes, self._joins, strict=True)], JOINING, patience
        )
        self.joined = not any(o.bad for o in outcomes)
        return outcomes

    def run(self, tasks: Sequence[Task], stall: float | None) -> list[Outcome]:
        """One task a rank, one outcome a rank (or more: see `outcome.complete`)."""
        for process in self.processes:
            process.offsets = process.output_sizes()
        self.last_test = tasks[0].test
        outcomes = self._dispatch(list(zip(self.processes, tasks, strict=True)), tasks[0].id, tasks[0].timeout, stall)
        self.used = time.monotonic()
        return outcomes

    def dead(self) -> list[str]:
        """Ranks that ended although nobody asked them to."""
        found = [(rank, process.exit_code()) for rank, process in enumerate(self.processes)]
        return [f"rank {rank} ended with {code}" for rank, code in found if code is not None]

    def _dispatch(
        self,
        messages: Sequence[tuple[RankProcess, Task | Join]],
        task: int,
        patience: float,
        stall: float | None = None,
    ) -> list[Outcome]:
        supervisor = Supervisor(self.processes, task, patience, stall)
        for process, message in messages:
            try:
                process.channel.send(message)
            except OSError:
                continue  # it has ended or is stuck: the supervisor sees which
        return supervisor.collect()


def failed(outcomes: Sequence[Outcome], world: int) -> bool:
    """Whether these outcomes retire their pool."""
    return judge(outcomes, world).kind.severity > 1

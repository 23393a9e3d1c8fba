"""A pool: the processes of one world that share one default group and, on GPUs, one lease."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gefen_offload.ranks.lease import Lease
from gefen_offload.ranks.outcome import Outcome
from gefen_offload.ranks.process import RankProcess
from gefen_offload.ranks.supervise import Supervisor
from gefen_offload.ranks.wire import Join, Task

JOINING = -1


@dataclass(frozen=True)
class Key:
    """What a pool is chosen by; which GPUs it has is its lease's to say."""

    world: int
    backend: str | None
    gpus: int = 0

    def __str__(self) -> str:
        return f"{self.backend or 'no group'}, world {self.world}"


class Pool:
    """Ranks that have joined, or are joining, one group."""

    def __init__(
        self, key: Key, processes: Sequence[RankProcess], join: Join, lease: Lease | None, private: bool
    ) -> None:
        self.key, self.processes, self.lease = key, processes, lease
        self.private = private  # of one test: nobody else gets it
        self.busy = True
        self.retired = False
        self.last_test = ""
        self.used = time.monotonic()
        self._join = join
        self._supervisor: Supervisor | None = None

    def join(self, patience: float) -> list[Outcome]:
        """Make the group; the outcomes of that, as of any task."""
        joins = [replace(self._join, rank=rank, gpu=rank) for rank in range(self.key.world)]
        return self._dispatch(joins, JOINING, patience)

    def run(self, tasks: Sequence[Task], stall: float | None) -> list[Outcome]:
        """One task a rank, one outcome a rank (or more: see `outcome.complete`)."""
        for process in self.processes:
            process.offsets = process.output_sizes()
        self.last_test = tasks[0].test
        outcomes = self._dispatch(tasks, tasks[0].id, tasks[0].timeout, stall)
        self.used = time.monotonic()
        return outcomes

    def interrupted(self) -> list[Outcome]:
        """Where the ranks of a run that was interrupted are; nothing if no run was going on."""
        return self._supervisor.give_up() if self._supervisor is not None else []

    def dead(self) -> list[str]:
        """Ranks that ended although nobody asked them to."""
        if self.retired:
            return ["the pool was retired"]
        found = [(rank, process.exit_code()) for rank, process in enumerate(self.processes)]
        return [f"rank {rank} {_ending(code)}" for rank, code in found if code is not None]

    def _dispatch(
        self, messages: Sequence[Task | Join], task: int, patience: float, stall: float | None = None
    ) -> list[Outcome]:
        supervisor = Supervisor(self.processes, task, patience, stall)
        for process, message in zip(self.processes, messages, strict=True):
            try:
                process.channel.send(message)
            except OSError:
                continue  # it has ended or is stuck: the supervisor sees which
        self._supervisor = supervisor
        outcomes = supervisor.collect()
        self._supervisor = None
        return outcomes


def _ending(code: int) -> str:
    from gefen_offload.ranks.outcome import signal_name

    return f"was killed by {signal_name(code)}" if code < 0 else f"exited with code {code}"

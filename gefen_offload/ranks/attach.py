"""Under an existing launcher: the processes that torchrun, SLURM or MPI started are the ranks, across machines.

Every process runs the same pytest and is one rank. What they tell each other goes over a second store that rank 0
hosts, never over the group under test. They agree on the outcome of every phase of every test; rank 0 reports.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gefen_offload.ranks.artifacts import Record
from gefen_offload.ranks.board import Board
from gefen_offload.ranks.outcome import Outcome
from gefen_offload.ranks.page import StatusPage
from gefen_offload.ranks.rank import Boot, Rank
from gefen_offload.ranks.reaper import Reaper
from gefen_offload.ranks.wire import Join, Task

PATIENCE = 120.0  # seconds for all ranks to come to the same point outside a body
GRACE = 1.0  # seconds between a peer's failure and giving up a body that is still running
POLL = 0.02
QUICK = 0.002
LAUNCHERS = (  # rank, world, rank on this machine
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True)
class Launch:
    """This process's place among those that the launcher started."""

    rank: int
    world: int
    local: int


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The place that a launcher gave this process; None if there was none, or for itself alone."""
    for names in LAUNCHERS:
        texts = [environ.get(name, "") for name in names]
        if texts[0].isdigit() and texts[1].isdigit() and int(texts[1]) > 1:
            return Launch(int(texts[0]), int(texts[1]), int(texts[2]) if texts[2].isdigit() else int(texts[0]))
    return None


@dataclass(frozen=True)
class Phase:
    """How a phase of a test ended on one rank."""

    outcome: str
    text: str
    runs: int  # on ranks, so far


class Attached:
    """This process as one rank of the launcher's world, for a whole run of tests.

    `say` prints while a test is captured; `keep` writes the artifacts of a test and returns what to say of them.
    """

    def __init__(
        self,
        launch: Launch,
        say: Callable[[str], None] = print,
        keep: Callable[[str, Sequence[Record], str], str] = lambda test, records, text: "",
    ) -> None:
        self.launch, self.say, self.keep = launch, say, keep
        token = uuid.uuid4().hex
        self.folder = Path(tempfile.gettempdir()) / f"gefen-ranks-{token}"
        self._reaper = Reaper(token, self.folder)  # it removes the folder however the launcher ends this process
        self.folder.mkdir(mode=0o700)
        boot = Boot(self.folder, f"rank{launch.rank}", os.getppid(), torch=True)
        self.page = StatusPage(boot.file("page"), create=True)
        self.rank = Rank(boot, self.page, channel=None)
        self.runs = self.phases = 0
        self.backend: str | None = ""
        self.over = False  # a rank is stuck: no further test can run
        self._meeting = _meeting_store(launch)
        self._address = self._host_store()
        self.board, self.watchs_board = self._connect(), self._connect()  # one for each thread

    def _connect(self) -> Board:
        """A connection to the board that rank 0 hosts."""
        from torch._C._distributed_c10d import TCPStore

        host, port = self._address
        patience = timedelta(seconds=PATIENCE)
        return Board(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience))

    def _host_store(self) -> tuple[str, int]:
        """Rank 0 hosts, on a port the kernel chose, and tells the others through the launcher's store."""
        from torch._C._distributed_c10d import TCPStore

        host = os.environ["MASTER_ADDR"]
        if self.launch.rank == 0:
            patience = timedelta(seconds=PATIENCE)
            self._hosted = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=patience)
            self._meeting.set("gefen-ranks/outcomes", str(self._hosted.port))
        return host, int(self._meeting.get("gefen-ranks/outcomes"))

    def enter(self, task: Task, backend: str | None) -> Outcome | None:
        """Be in a default group of this backend, a new one if the last body failed; the outcome if that fails."""
        in_setup = any(fault.in_setup for fault in task.faults)
        if backend == self.backend and not in_setup:
            return None
        from gefen_offload.ranks import process_group

        self.backend = ""
        process_group.leave()
        prefix = f"gefen-ranks/group/{task.id}"
        place = self.launch
        faults = task.faults if in_setup else ()
        join = Join(place.rank, place.world, backend, (), False, None, prefix, PATIENCE, gpu=place.local, faults=faults)
        outcome = self.rank.enter(join, None if backend is None else self._meeting)
        if not outcome.bad:
            self.backend = backend
        return outcome if outcome.bad or in_setup else None

    def agree_on_phase(self, outcome: str, text: str) -> dict[int, Phase]:
        """Tell the others how this phase of a test ended here, and hear it from them; who does not come has failed."""
        mine = Phase(outcome, text, self.runs)
        self.board.put(f"phase/{self.phases}/{self.launch.rank}", mine)
        heard: dict[int, Phase] = {}
        limit = time.monotonic() + PATIENCE
        while len(heard) < self.launch.world and time.monotonic() < limit:
            for rank in range(self.launch.world):
                if rank not in heard and (phase := self.phase_of(self.board, rank)) is not None:
                    heard[rank] = phase
            time.sleep(QUICK)
        lost = Phase("failed", f"did not come to the end of the phase in {PATIENCE:g} s", 0)
        self.phases += 1
        self.board.turn()
        self.runs = max(phase.runs for phase in heard.values())
        phases = {rank: heard.get(rank, lost) for rank in range(self.launch.world)}
        if len({phase.runs for phase in phases.values()}) > 1:
            self.backend = ""  # only some have been through a run: all make a new group
        return phases

    def phase_of(self, board: Board, rank: int) -> Phase | None:
        """How the current phase ended on a rank; None while it goes on there."""
        name = f"phase/{self.phases}/{rank}"
        return board.get(name) if board.has(name) else None

    def agree_on(self, ids: Sequence[str]) -> str | None:
        """Whether every rank collected the same tests in the same order; what differs if not."""
        digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()
        self.board.put(f"ids/{self.launch.rank}", (digest, list(ids)))
        for rank in range(self.launch.world):
            other, theirs = self.board.get(f"ids/{rank}")
            if other != digest:
                only = sorted(set(ids) ^ set(theirs))[:5]
                return f"rank {self.launch.rank} {len(ids)} tests, rank {rank} {len(theirs)}; not both have {only}"
        return None

    def meet(self, name: str, patience: float = PATIENCE) -> bool:
        """Wait until every rank has come here."""
        self.board.put(f"{name}/{self.launch.rank}", True)
        limit = time.monotonic() + patience
        while not all(self.board.has(f"{name}/{rank}") for rank in range(self.launch.world)):
            if time.monotonic() > limit:
                return False
            time.sleep(POLL)
        return True

    def close(self) -> None:
        """The run ends, first for rank 0: it has reported, and a launcher ends everybody when one ends badly."""
        self._reaper.close()
        if self.launch.rank != 0:
            self.board.put(f"closing/{self.launch.rank}", True)
            with contextlib.suppress(RuntimeError):
                wait_until_over(self.board)
            time.sleep(2 * GRACE)
        elif self.over or self.meet("closing", 20):
            self.board.put("over", True)
            time.sleep(5 * POLL)


def wait_until_over(board: Board) -> None:
    """Until rank 0 has said all there is to say."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit and not board.has("over"):
        time.sleep(POLL)


def _meeting_store(launch: Launch) -> Any:
    """The launcher's own store, found through MASTER_ADDR and MASTER_PORT."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise RuntimeError(f"attached to a launcher with {launch.world} ranks, but {' and '.join(missing)} is not set")
    from torch.distributed.rendezvous import rendezvous

    os.environ.update(RANK=str(launch.rank), WORLD_SIZE=str(launch.world))
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world, timeout=timedelta(seconds=PATIENCE)))
    return store


def disagreement(phases: Mapping[int, Phase]) -> str:
    """What is wrong with a phase that did not end alike on all ranks; "" if it did."""
    if len({phase.outcome for phase in phases.values()}) == 1:
        return ""
    told = ", ".join(f"rank {rank} {phase.outcome}" for rank, phase in phases.items())
    texts = [f"rank {rank}: {phase.text}" for rank, phase in phases.items() if phase.outcome != "passed"]
    return "\n\n".join([f"the ranks do not agree: {told}", *texts])

"""Under an existing launcher: the same tests, on the ranks that torchrun, SLURM or MPI started, across machines.

Every process runs the same pytest and is one rank. Rank 0's arguments go to all and all outcomes to everybody, over a
second store that rank 0 hosts, never over the group under test. So the ranks agree on verdicts; rank 0 reports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import itertools
import os
import pickle
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from gefen_offload.ranks.group import RankGroup
from gefen_offload.ranks.outcome import Kind, Outcome, RankFailure, complete, judge
from gefen_offload.ranks.page import StatusPage
from gefen_offload.ranks.rank import Boot, Rank
from gefen_offload.ranks.reaper import Reaper
from gefen_offload.ranks.report import Evidence, report
from gefen_offload.ranks.result import Result
from gefen_offload.ranks.run import Host, Options, proof
from gefen_offload.ranks.wire import Join, Payload, Task, pack, unpack

PATIENCE = 120.0  # seconds for all ranks to come to the same point outside a body
GRACE = 1.0  # seconds between a peer's failure and giving up a body that is still running
POLL = 0.02
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


class Attached:
    """This process as one rank of the launcher's world, for a whole run of tests."""

    def __init__(self, launch: Launch, say: Callable[[str], None] = print) -> None:
        self.launch, self.say = launch, say
        token = uuid.uuid4().hex
        self.folder = Path(tempfile.gettempdir()) / f"gefen-ranks-{token}"
        self._reaper = Reaper(token, self.folder)  # it removes the folder however the launcher ends this process
        self.folder.mkdir(mode=0o700)
        boot = Boot(self.folder, f"rank{launch.rank}", os.getppid(), torch=True)
        self.page = StatusPage(boot.file("page"), create=True)
        self.rank = Rank(boot, self.page, channel=None)
        self.numbers = itertools.count(1)
        self.backend: str | None = ""
        self.over = False  # a rank is stuck: no further test can run
        self._meeting = _meeting_store(launch)
        self._address = self._host_store()
        self.store = self.connect()

    def connect(self) -> Any:
        """A connection of its own to the store of outcomes; each thread needs one."""
        from torch._C._distributed_c10d import TCPStore

        host, port = self._address
        patience = timedelta(seconds=PATIENCE)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)

    def _host_store(self) -> tuple[str, int]:
        """Rank 0 hosts, on a port the kernel chose, and tells the others through the launcher's store."""
        from torch._C._distributed_c10d import TCPStore

        host = os.environ["MASTER_ADDR"]
        if self.launch.rank == 0:
            patience = timedelta(seconds=PATIENCE)
            self._hosted = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=patience)
            self._meeting.set("gefen-ranks/outcomes", str(self._hosted.port))
        return host, int(self._meeting.get("gefen-ranks/outcomes"))

    def enter(self, backend: str | None) -> None:
        """Be in a default group of this backend; a new one if the last body failed."""
        if backend == self.backend:
            return
        from gefen_offload.ranks import process_group

        process_group.leave()
        prefix = f"gefen-ranks/group/{next(self.numbers)}"
        place = self.launch
        join = Join(place.rank, place.world, backend, (), False, None, prefix, PATIENCE, gpu=place.local)
        outcome = self.rank.enter(join)
        if outcome.bad:
            raise RankFailure(f"{outcome.headline()}\n{outcome.failure.traceback if outcome.failure else ''}")
        if backend is not None:
            process_group.enter_with(self._meeting, join, self.page)
        self.backend = backend

    def agree_on(self, ids: Sequence[str]) -> str | None:
        """Whether every rank collected the same tests in the same order; what differs if not."""
        digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()
        self.store.set(f"ids/{self.launch.rank}", pickle.dumps((digest, list(ids))))
        for rank in range(self.launch.world):
            other, theirs = pickle.loads(self.store.get(f"ids/{rank}"))
            if other != digest:
                only = sorted(set(ids) ^ set(theirs))[:5]
                return f"rank {self.launch.rank} {len(ids)} tests, rank {rank} {len(theirs)}; not both have {only}"
        return None

    def meet(self, name: str, patience: float = PATIENCE) -> bool:
        """Wait until every rank has come here."""
        self.store.set(f"{name}/{self.launch.rank}", "1")
        limit = time.monotonic() + patience
        keys = [f"{name}/{rank}" for rank in range(self.launch.world)]
        while not self.store.check(keys):
            if time.monotonic() > limit:
                return False
            time.sleep(POLL)
        return True

    def close(self) -> None:
        """The run ends, first for rank 0: it has reported, and a launcher ends everybody when one ends badly."""
        self._reaper.close()
        if self.launch.rank != 0:
            self.store.set(f"closing/{self.launch.rank}", "1")
            with contextlib.suppress(RuntimeError):
                _wait_until_over(self.store)
            time.sleep(2 * GRACE)
        elif self.over or self.meet("closing", 20):
            self.store.set("over", "1")
            time.sleep(5 * POLL)


class AttachedGroup(RankGroup):
    """The `ranks` fixture under a launcher."""

    def __init__(self, attached: Attached, options: Options, host: Host, gpus: int) -> None:
        super().__init__(attached.launch.world, options, host, gpus)
        self._attached = attached

    def _with(self, options: Options) -> RankGroup:
        return AttachedGroup(self._attached, options, self._host, self.gpus)

    def _go(self, worker: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        __tracebackhide__ = True
        attached = self._attached
        attached.enter(self._options.backend)
        number = next(attached.numbers)
        task = Task(
            id=number,
            test=self._host.name,
            payload=self._agreed_payload(number, worker, args, kwargs),
            folder=str(attached.folder / f"run{number}"),
            environ=dict(os.environ),
            path=list(sys.path),
            cwd=os.getcwd(),
            timeout=self._options.timeout,
            prefix=f"gefen-ranks/group/{number}" if self._options.new_group else None,
            faults=self._options.faults,
            verbosity=self._options.verbosity,
        )
        begun = time.monotonic()
        watch = _Watch(attached, task)
        outcomes = watch.through(lambda: attached.rank.perform(task))
        return self._judged(outcomes, time.monotonic() - begun)

    def _agreed_payload(self, number: int, *call: Any) -> Payload:
        """Rank 0's worker and arguments, for every rank: fixtures such as tmp_path differ between processes."""
        store, key = self._attached.store, f"payload/{number}"
        if self._attached.launch.rank == 0:
            payload = pack(call, self._attached.folder)
            store.set(key, pickle.dumps(replace(payload, inline=payload.read(), file=None)))
        agreed: Payload = pickle.loads(store.get(key))
        return agreed

    def _judged(self, outcomes: Sequence[Outcome], seconds: float) -> Result:
        __tracebackhide__ = True
        done = complete(outcomes, self.world)
        verdict = judge(done, self.world)
        self._host.proofs.append(proof(self._options.backend, done))
        if verdict.kind is Kind.SKIPPED and self._host.skip is not None:
            self._host.skip(verdict.reason)
        if verdict.kind is not Kind.PASSED:
            self._attached.backend = ""  # ranks may have left the body at different collectives
            self._attached.over = any(o.kind in (Kind.BLOCKED, Kind.HUNG) for o in done)
            text = report(verdict, done, Evidence(f"{self._host.name} (attached, world {self.world})", (), ()))
            raise RankFailure(text, done, verdict.first)
        fired = {i for o in done for i in o.fired}
        missed = [str(f) for i, f in enumerate(self._options.faults) if i not in fired]
        if missed:
            raise RankFailure(f"a fault never fired: {'; '.join(missed)}", done, unfired=True)
        self._host.leaks += [f"rank {o.rank}: {leak}" for o in done for leak in o.leaks]
        values = [unpack(o.value) if o.value is not None else None for o in done]
        told = tuple(str(f) for f in self._options.faults)
        empty = ("",) * self.world
        return Result(values, seconds, tuple(replace(o, value=None) for o in done), empty, empty, told)


class _Watch:
    """A thread beside one body: it sees peers fail and deadlines pass while the body is stuck, and ends the run."""

    def __init__(self, attached: Attached, task: Task) -> None:
        self.attached, self.task = attached, task
        self.place = attached.launch
        self._done = threading.Event()
        self._posting = threading.Lock()
        self._posted = False
        self._deadline = time.monotonic() + task.timeout

    def through(self, body: Callable[[], Outcome]) -> list[Outcome]:
        """Run the body, hand over its outcome, and wait for everyone's."""
        thread = threading.Thread(target=self._run, name="ranks-watch", daemon=True)
        thread.start()
        try:
            self._post(self.attached.store, body())
        finally:
            self._done.set()
        thread.join()
        return self._collect(self.attached.store, self._deadline + 5)

    def _key(self, rank: int) -> str:
        return f"outcome/{self.task.id}/{rank}"

    def _post(self, store: Any, outcome: Outcome) -> bool:
        """Hand over this rank's outcome; only the first counts."""
        with self._posting:
            if self._posted:
                return False
            if outcome.value is not None:
                outcome = replace(outcome, value=replace(outcome.value, inline=outcome.value.read(), file=None))
            store.set(self._key(self.place.rank), pickle.dumps(outcome))
            self._posted = True
            return True

    def _collect(self, store: Any, limit: float) -> list[Outcome]:
        """Every rank's outcome; a rank without one by then is gone."""
        found: dict[int, Outcome] = {}
        while len(found) < self.place.world and time.monotonic() < limit:
            found.update(self._arrived(store, found))
            if any(o.bad for o in found.values()):
                limit = min(limit, time.monotonic() + 2 * GRACE) if len(found) > 0 else limit
            time.sleep(POLL / 10)
        lost = [r for r in range(self.place.world) if r not in found]
        gone = [Outcome(r, Kind.EXITED, "body", ended=time.monotonic_ns(), reason="no outcome") for r in lost]
        return [*found.values(), *gone]

    def _arrived(self, store: Any, known: Mapping[int, Outcome]) -> dict[int, Outcome]:
        missing = [r for r in range(self.place.world) if r not in known]
        return {r: pickle.loads(store.get(self._key(r))) for r in missing if store.check([self._key(r)])}

    def _run(self) -> None:
        store = self.attached.connect()
        known: dict[int, Outcome] = {}
        failed: float | None = None
        while not self._done.wait(5 * POLL):
            known.update(self._arrived(store, known))
            if failed is None and any(o.bad for o in known.values()):
                failed = time.monotonic()
            if failed is not None and time.monotonic() > failed + GRACE:
                self._give_up(store, Kind.BLOCKED)
            if time.monotonic() > self._deadline:
                self._give_up(store, Kind.HUNG)

    def _give_up(self, store: Any, kind: Kind) -> None:
        """The body is stuck: hand over where, let rank 0 report, end the process."""
        status = self.attached.page.read()
        outcome = Outcome(
            self.place.rank,
            kind,
            status.stage,
            os.getpid(),
            time.monotonic_ns(),
            mark=status.mark,
            stack=_stacks(self.attached.folder),
            collective=status.collective_text(),
            collectives=status.collectives,
        )
        if not self._post(store, outcome):
            return
        if self.place.rank != 0:
            _leave_after(store)
        outcomes = complete(self._collect(store, time.monotonic() + 2 * GRACE), self.place.world)
        verdict = judge(outcomes, self.place.world)
        title = f"{self.task.test} (attached, world {self.place.world}); the run ends here, a rank is stuck"
        self.attached.say(report(verdict, outcomes, Evidence(title, (), ())))
        store.set("over", "1")
        time.sleep(0.5)
        os._exit(1)


def _leave_after(store: Any) -> NoReturn:
    """End this process once rank 0 has reported: a launcher ends all when one ends."""
    _wait_until_over(store)
    time.sleep(2 * GRACE)
    os._exit(1)


def _wait_until_over(store: Any) -> None:
    limit = time.monotonic() + 30
    while time.monotonic() < limit and not store.check(["over"]):
        time.sleep(POLL)


def _stacks(folder: Path) -> str:
    with open(folder / "stacks", "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _meeting_store(launch: Launch) -> Any:
    """The launcher's own store, found through MASTER_ADDR and MASTER_PORT."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise RuntimeError(f"attached to a launcher with {launch.world} ranks, but {' and '.join(missing)} is not set")
    from torch.distributed.rendezvous import rendezvous

    os.environ.update(RANK=str(launch.rank), WORLD_SIZE=str(launch.world))
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world, timeout=timedelta(seconds=PATIENCE)))
    return store

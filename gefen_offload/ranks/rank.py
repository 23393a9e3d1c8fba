"""The rank process: a loop that joins one group, takes tasks over a pipe, and hands over one outcome each.

Every stage, from the import of torch to the packing of the result, runs inside `Rank._attempt`'s try, under a stage
name that the status page shows: a rank that fails while it is being set up reports its own traceback like any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gefen_offload.ranks import flight
from gefen_offload.ranks.context import RankContext
from gefen_offload.ranks.faults import FaultPlan
from gefen_offload.ranks.outcome import Failure, Kind, Outcome, Stage
from gefen_offload.ranks.page import StatusPage
from gefen_offload.ranks.wire import Channel, Handover, Join, Leave, Task, pack, unpack

DUMP_SIGNAL = signal.SIGRTMIN + 5  # faulthandler writes every thread's stack, without asking for the GIL
MESSAGE_LIMIT = 16_000
ORPHAN_PATIENCE = 5.0  # seconds that the reaper has, before a rank without a parent ends itself
IDLE = 1.0  # seconds without a message after which a rank is a spare one
PR_SET_CHILD_SUBREAPER = 36
_OURS = os.path.dirname(__file__)


@dataclass(frozen=True)
class Boot:
    """What a rank process is started with."""

    folder: Path  # the run's folder
    name: str  # of this process: its files are folder/name.*
    parent: int
    torch: bool

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.name}.{suffix}"


def main(boot: Boot, connection: Connection) -> None:
    """Entry point of the process."""
    _leave_the_parents_terminal(boot)
    page = StatusPage(boot.file("page"))
    page.stage(Stage.START)
    channel = Channel(os.dup(connection.fileno()), blocking=True)
    connection.close()
    Rank(boot, page, channel).serve()
    os._exit(0)  # no destructors of groups, no joining of foreign threads: what had to be closed is closed


def _leave_the_parents_terminal(boot: Boot) -> None:
    """An own session, output to files, stacks on a signal, and an end soon after the parent's."""
    os.setsid()
    for fd, mode, suffix in ((0, os.O_RDONLY, None), (1, os.O_WRONLY, "out"), (2, os.O_WRONLY, "err")):
        path = os.devnull if suffix is None else str(boot.file(suffix))
        opened = os.open(path, mode | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what was said before a death must be there
    os.mkdir(boot.file("tmp"), 0o700)
    tempfile.tempdir = str(boot.file("tmp"))  # goes with the rank, who is killed before a library could remove its own
    stacks = open(boot.file("stack"), "ab", buffering=0)  # noqa: SIM115 (open as long as the process)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True, chain=False)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_DFL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the pool sets the real number
    ctypes.CDLL(None).prctl(
        PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # a daemon that a test starts stays a child, and is seen


def _watch(rank: Rank) -> None:
    """A thread: answers with the flight recorder when asked, and ends the process some time after its parent.

    [Note: who kills orphans]

    The reaper does, at once, after it has seen which shared memory they hold; a rank that ended by itself with its
    parent (as with a parent-death signal) would take that knowledge along. This thread is for the death of both.
    """
    try:
        parent = os.pidfd_open(rank.boot.parent)
    except OSError:
        os._exit(1)
    ask = os.open(rank.boot.file("ask"), os.O_RDWR)  # also for writing: a pipe without a writer is always readable
    while os.getppid() == rank.boot.parent and parent not in (ready := select.select([parent, ask], [], [])[0]):
        if ready:
            flight.answer(ask, rank.boot.file("flight"), rank.join.backend if rank.join else None)
    time.sleep(ORPHAN_PATIENCE)
    os._exit(1)


class Rank:
    """What a rank's process knows between tasks; without a channel it is a process that a launcher started."""

    def __init__(self, boot: Boot, page: StatusPage, channel: Channel | None) -> None:
        self.boot, self.page, self.channel = boot, page, channel
        self.pid = os.getpid()
        self.join: Join | None = None
        self.broken: Outcome | None = None
        self.device = "cpu"
        self._laps: dict[str, float] = {}
        self._lapped = 0.0

    def _lap(self, name: str) -> None:
        """What took the time since the last lap; told with `--ranks-timing`."""
        now = time.monotonic()
        self._laps[name] = now - self._lapped
        self._lapped = now

    def serve(self) -> None:
        """Import early, then one message after another until told to leave or the parent is gone."""
        if self.channel is None:
            raise RuntimeError("a rank without a channel has nobody to serve")
        threading.Thread(target=_watch, args=[self], name="ranks-watch", daemon=True).start()
        if self.boot.torch:
            self.broken = self._attempt(-1, -1, self._import_torch, FaultPlan((), -1, self.page)).bad_or_none()
            if self.broken is None and self.channel.silent(IDLE):
                self._attempt(-1, -1, self._import_more, FaultPlan((), -1, self.page))
        while True:
            self.page.stage(Stage.WAIT)
            message = self.channel.receive()
            if message is None:
                time.sleep(2 * ORPHAN_PATIENCE)  # see [Note: who kills orphans]
            if message is None or isinstance(message, Leave):
                break
            if isinstance(message, Join):
                self._hand_over(self.channel, -1, self.enter(message))
            elif isinstance(message, Task):
                self._hand_over(self.channel, message.id, self.perform(message))
        self.page.stage(Stage.TEARDOWN)

    def _import_torch(self) -> None:
        self.page.stage(Stage.IMPORT)
        gc.disable()
        import torch
        import torch.distributed  # noqa: F401

        gc.freeze()  # a collection after each test need not walk torch: see restore.py
        gc.enable()

    def _import_more(self) -> None:
        """A spare rank has time: DDP and FSDP import this when they are first used."""
        import torch._dynamo  # noqa: F401

        gc.freeze()

    def enter(self, join: Join, store: Any = None) -> Outcome:
        """Take a place in a group; without a store given, connect to the parent's."""
        self.join = join
        if self.broken is not None:
            return replace(self.broken, rank=join.rank)
        faults = FaultPlan(join.faults, join.rank, self.page)
        return self._attempt(join.rank, -1, lambda: self._enter_group(join, faults, store), faults).outcome

    def _enter_group(self, join: Join, faults: FaultPlan, store: Any) -> None:
        """Device, store and process group, each a stage."""
        self._stage(Stage.DEVICE, faults)
        if join.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(join.devices)
        if join.devices and join.simulated:
            self.device = join.devices[join.rank]
        if join.backend == "nccl":
            from gefen_offload.ranks.device import take_device

            self.device = take_device(join)
        if join.backend is not None:
            from gefen_offload.ranks import process_group

            process_group.enter(join, lambda stage: self._stage(stage, faults), self.page, store)

    def _stage(self, name: str, faults: FaultPlan) -> None:
        self.page.stage(name)
        faults.at_stage(name)

    def perform(self, task: Task) -> Outcome:
        """One task: restore, load, body, result, and what it left behind."""
        if self.join is None:
            raise RuntimeError("a task came before the group was joined")
        from gefen_offload.ranks.restore import Surroundings

        join = self.join
        self.page.test(task.test)
        faults = FaultPlan(task.faults, join.rank, self.page)
        surroundings = Surroundings(join, own_process=self.channel is not None)
        self._laps, self._lapped = {}, time.monotonic()
        answer = self._attempt(join.rank, task.id, lambda: self._body(task, join, faults, surroundings), faults)
        outcome = answer.outcome
        if not outcome.bad:
            leaks = self._attempt(join.rank, task.id, lambda: self._clean(surroundings, faults), faults)
            if leaks.outcome.bad:
                return leaks.outcome
            self._lap("leaks")
            told, laps = tuple(leaks.value or ()), tuple(self._laps.items())
            outcome = replace(outcome, value=answer.value, leaks=told, fired=leaks.outcome.fired, laps=laps)
        return outcome

    def _body(self, task: Task, join: Join, faults: FaultPlan, surroundings: Any) -> Any:
        surroundings.set(task)
        if task.prefix is not None and join.backend is not None:
            from gefen_offload.ranks import process_group

            process_group.renew(join, task.prefix)
        self._lap("restore")
        self._stage(Stage.LOAD, faults)
        from gefen_offload.ranks.loading import load_modules

        load_modules(task.payload.modules, task.verbosity)
        worker, args, kwargs = unpack(task.payload)
        folder = Path(task.folder) / f"rank{join.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        context = RankContext(join.rank, join.world, join.backend, folder, self.device, join.gpu, self.page, faults)
        surroundings.look()
        self._lap("load")
        self._stage(Stage.BODY, faults)
        with faults.armed(join.backend):
            value = worker(context, *args, **kwargs)
            if join.backend == "nccl":
                sys.modules["torch"].cuda.synchronize()  # what a kernel does wrong is this test's, not the next one's
        self._exit_if_forked(task.id, join.rank)
        self._lap("body")
        self._stage(Stage.RESULT, faults)
        packed = pack(value, self.boot.folder)
        self._lap("result")
        return packed

    def _clean(self, surroundings: Any, faults: FaultPlan) -> list[str]:
        self._stage(Stage.TEARDOWN, faults)
        leaks: list[str] = surroundings.leaks()
        return leaks

    def _exit_if_forked(self, task: int, rank: int) -> None:
        """A child that the body forked and that returned from it: it must not serve on its parent's pipe."""
        if os.getpid() != self.pid:
            if self.channel is not None:
                extra = Outcome(rank, Kind.PASSED, Stage.BODY, os.getpid(), time.monotonic_ns())
                self.channel.send(Handover(task, extra))
            os._exit(70)

    def _attempt(self, rank: int, task: int, action: Callable[[], Any], faults: FaultPlan) -> _Answer:
        """Run `action`; whatever it does short of ending the process becomes an outcome."""
        begun = time.monotonic()
        value: Any = None
        kind, reason, failure, code = Kind.PASSED, "", None, None
        try:
            value = action()
        except BaseException as error:
            kind, reason, failure, code = _classified(error)
            self._forget(error)
        self._exit_if_forked(task, rank)
        status = self.page.read()
        outcome = Outcome(
            rank=rank,
            kind=kind,
            stage=status.stage,
            pid=self.pid,
            ended=time.monotonic_ns(),
            seconds=time.monotonic() - begun,
            failure=failure,
            reason=reason,
            code=code,
            device=self.device,
            finished=kind is Kind.PASSED,
            mark=status.mark,
            fired=status.fired,
            collective=status.collective_text(),
            collectives=status.collectives,
            flight=flight.dump(self.join.backend) if kind is Kind.RAISED and self.join else "",
        )
        return _Answer(outcome, value)

    def _forget(self, error: BaseException) -> None:
        """Drop the frames: they hold the body's tensors."""
        with contextlib.suppress(Exception):
            traceback.clear_frames(error.__traceback__)

    def _hand_over(self, channel: Channel, task: int, outcome: Outcome) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # the body may have closed it
                stream.flush()
        try:
            channel.send(Handover(task, outcome))
        except OSError:
            time.sleep(2 * ORPHAN_PATIENCE)  # the parent is gone; see [Note: who kills orphans]
            os._exit(1)


@dataclass(frozen=True)
class _Answer:
    outcome: Outcome
    value: Any

    def bad_or_none(self) -> Outcome | None:
        return self.outcome if self.outcome.bad else None


def _classified(error: BaseException) -> tuple[Kind, str, Failure | None, int | None]:
    """Kind, reason, failure and code of what the action raised."""
    names = tuple(f"{c.__module__}.{c.__qualname__}" for c in type(error).__mro__)
    if _is_skip(error):
        return Kind.SKIPPED, _clipped(_message(error)), None, None
    failure = Failure(_short(names[0]), names, _clipped(_message(error)), _clipped(_traceback(error)))
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
    return Kind.RAISED, "", failure, code


def _is_skip(error: BaseException) -> bool:
    outcomes = sys.modules.get("_pytest.outcomes")
    return isinstance(error, unittest.SkipTest) or (outcomes is not None and isinstance(error, outcomes.Skipped))


def _message(error: BaseException) -> str:
    try:
        return str(getattr(error, "msg", None) or error)
    except BaseException as second:
        return f"(its text could not be made: {type(second).__name__})"


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of this package's own plumbing."""
    try:
        entries = traceback.TracebackException.from_exception(error, limit=None)
        entries.stack = traceback.StackSummary.from_list(
            [f for f in entries.stack if os.path.dirname(f.filename) != _OURS]
        )
        return "".join(entries.format())
    except BaseException as second:
        return f"{type(error).__name__} (its traceback could not be made: {type(second).__name__}: {second!r})"


def _short(name: str) -> str:
    return name.removeprefix("builtins.").removeprefix("_pytest.outcomes.")


def _clipped(text: str) -> str:
    """Of bounded length, and what every file and terminal can take."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MESSAGE_LIMIT:
        return text
    half = MESSAGE_LIMIT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"

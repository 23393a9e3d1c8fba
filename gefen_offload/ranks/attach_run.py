"""One run on a launcher's ranks: this process does its part, and is watched while it does."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from gefen_offload.ranks import flight
from gefen_offload.ranks.artifacts import Record
from gefen_offload.ranks.attach import GRACE, PATIENCE, POLL, QUICK, Attached, wait_until_over
from gefen_offload.ranks.board import Board
from gefen_offload.ranks.group import RankGroup
from gefen_offload.ranks.kill import state
from gefen_offload.ranks.outcome import Failure, Kind, Outcome, RankFailure, Stage, complete, judge
from gefen_offload.ranks.report import Evidence, report
from gefen_offload.ranks.result import Result
from gefen_offload.ranks.run import Host, Options, opened, proof
from gefen_offload.ranks.wire import Payload, Task, pack

KEPT_OUTPUT = 8 << 20  # bytes of each stream that a rank hands over: the last ones


@dataclass(frozen=True)
class Handed:
    """What a rank tells the others after its part of a run."""

    outcome: Outcome
    out: str = ""
    err: str = ""


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
        attached.runs += 1
        task = Task(
            id=attached.runs,
            test=self._host.name,
            payload=self._agreed_payload(attached.runs, worker, args, kwargs),
            folder=str(attached.folder / f"run{attached.runs}"),
            environ=dict(os.environ),
            path=list(sys.path),
            cwd=os.getcwd(),
            timeout=self._options.within(self._options.timeout),
            prefix=f"gefen-ranks/new-group/{attached.runs}" if self._options.new_group else None,
            faults=self._options.faults,
            verbosity=self._options.verbosity,
        )
        begun = time.monotonic()
        handed = Watch(attached, task, self._options.backend).through()
        return self._judged(handed, time.monotonic() - begun)

    def _agreed_payload(self, number: int, *call: Any) -> Payload:
        """Rank 0's worker and arguments, for every rank: fixtures such as tmp_path differ between processes."""
        board, name = self._attached.board, f"payload/{number}"
        if self._attached.launch.rank == 0:
            payload = pack(call, self._attached.folder)
            board.put(name, replace(payload, inline=payload.read(), file=None))
        limit = time.monotonic() + PATIENCE
        while not board.has(name):
            phase = self._attached.phase_of(board, 0)
            if phase is not None or time.monotonic() > limit:
                raise RankFailure(f"rank 0 left the test before this run: {phase.text if phase else 'no sign of it'}")
            time.sleep(QUICK)
        agreed: Payload = board.get(name)
        return agreed

    def _judged(self, handed: Sequence[Handed], seconds: float) -> Result:
        __tracebackhide__ = True
        values, done = opened(complete([h.outcome for h in handed], self.world))
        verdict = judge(done, self.world)
        out, err = [h.out for h in handed], [h.err for h in handed]
        self._host.proofs.append(proof(self._options.backend, done))
        if verdict.kind is Kind.SKIPPED and self._host.skip is not None:
            self._host.skip(verdict.reason)
        faults = self._options.faults
        fired = {i for o in done for i in o.fired if i < len(faults) and faults[i].rank == o.rank}
        missed = [str(f) for i, f in enumerate(faults) if i not in fired]
        if verdict.kind is not Kind.PASSED or missed:
            self._attached.backend = ""  # ranks may have left the body at different collectives
            self._attached.over = any(o.kind in _NOT_COMING_BACK for o in done)
            summary = f"a fault never fired: {'; '.join(missed)}" if missed else ""
            title = f"{self._host.name} (attached, world {self.world})"
            text = report(verdict, done, Evidence(title, out, err), summary)
            self._host.records.append(Record(text, done, out, err, [o.flight for o in done]))
            raise RankFailure(text, done, verdict.first, unfired=bool(missed))
        self._host.records.append(Record("passed", done, out, err))
        self._host.leaks += [f"rank {o.rank}: {leak}" for o in done for leak in o.leaks]
        told = tuple(str(f) for f in faults)
        return Result(values, seconds, tuple(replace(o, value=None) for o in done), tuple(out), tuple(err), told)


_NOT_COMING_BACK = (Kind.BLOCKED, Kind.HUNG, Kind.EXITED)


class Watch:
    """A thread beside one body: it sees peers fail and deadlines pass while the body is stuck, and ends the run."""

    def __init__(self, attached: Attached, task: Task, backend: str | None) -> None:
        self.attached, self.task, self.backend = attached, task, backend
        self.place = attached.launch
        self._done = threading.Event()
        self._posting = threading.Lock()
        self._posted = False
        self._deadline = time.monotonic() + PATIENCE

    def through(self) -> list[Handed]:
        """Do this rank's part, hand over its outcome, and wait for everyone's."""
        thread = threading.Thread(target=self._run, name="ranks-watch", daemon=True)
        thread.start()
        try:
            self._post(self.attached.board, self._part())
        finally:
            self._done.set()
        thread.join()
        return self._collect(self.attached.board, self._deadline + 5)

    def _part(self) -> Outcome:
        """Enter the group, then the task."""
        entered = self.attached.enter(self.task, self.backend)
        if entered is not None and entered.bad:
            return entered
        self._deadline = time.monotonic() + self.task.timeout
        with _output_to(self.attached.folder):
            outcome = self.attached.rank.perform(self.task)
        return outcome if entered is None else replace(outcome, fired=(*outcome.fired, *entered.fired))

    def _key(self, rank: int) -> str:
        return f"outcome/{self.task.id}/{rank}"

    def _post(self, board: Board, outcome: Outcome) -> bool:
        """Hand over this rank's outcome; only the first counts."""
        with self._posting:
            if self._posted:
                return False
            if outcome.value is not None:
                outcome = replace(outcome, value=replace(outcome.value, inline=outcome.value.read(), file=None))
            handed = Handed(outcome, *(_tail(self.attached.folder / name) for name in ("out", "err")))
            board.put(self._key(self.place.rank), handed)
            self._posted = True
            return True

    def _collect(self, board: Board, limit: float) -> list[Handed]:
        """What every rank handed over, in order; a rank that did not by then is gone."""
        found: dict[int, Handed] = {}
        while len(found) < self.place.world and time.monotonic() < limit:
            found.update(self._arrived(board, found))
            if any(h.outcome.bad for h in found.values()):
                limit = min(limit, time.monotonic() + 2 * GRACE)
            time.sleep(QUICK)
        lost = Outcome(0, Kind.EXITED, Stage.BODY, ended=time.monotonic_ns(), reason="handed over no outcome")
        return [found.get(rank) or Handed(replace(lost, rank=rank)) for rank in range(self.place.world)]

    def _arrived(self, board: Board, known: Mapping[int, Handed]) -> dict[int, Handed]:
        """News; a rank whose test has ended, or will never come to this run, is news too."""
        news: dict[int, Handed] = {}
        for rank in set(range(self.place.world)) - known.keys():
            if board.has(self._key(rank)):
                news[rank] = board.get(self._key(rank))
            elif (phase := self.attached.phase_of(board, rank)) is not None and phase.runs < self.task.id:
                why = f"its test {phase.outcome} before this run: {phase.text}"
                failure = Failure("RankFailure", ("RankFailure",), why, why)
                news[rank] = Handed(Outcome(rank, Kind.RAISED, Stage.WAIT, ended=time.monotonic_ns(), failure=failure))
        return news

    def _run(self) -> None:
        board = self.attached.watchs_board
        known: dict[int, Handed] = {}
        failed: float | None = None
        while not self._done.wait(5 * POLL):
            known.update(self._arrived(board, known))
            if failed is None and any(h.outcome.bad for h in known.values()):
                failed = time.monotonic()
            if failed is not None and time.monotonic() > failed + GRACE:
                self._give_up(board, Kind.BLOCKED)
            if time.monotonic() > self._deadline:
                self._give_up(board, Kind.HUNG)

    def _give_up(self, board: Board, kind: Kind) -> None:
        """The body is stuck: hand over where, let rank 0 report, end the process."""
        status = self.attached.page.read()
        outcome = Outcome(
            self.place.rank,
            kind,
            status.stage,
            os.getpid(),
            time.monotonic_ns(),
            mark=status.mark,
            fired=status.fired,
            state=state(os.getpid()),
            stack=_stacks(self.attached.folder),
            collective=status.collective_text(),
            collectives=status.collectives,
            flight=flight.dump(self.backend),
        )
        if not self._post(board, outcome):
            return
        if self.place.rank != 0:
            _leave_after(board)
        self._report(self._collect(board, time.monotonic() + 2 * GRACE))
        board.put("over", True)
        time.sleep(0.5)
        os._exit(1)

    def _report(self, handed: Sequence[Handed]) -> None:
        """Rank 0's last words: pytest itself will not come to report this test."""
        outcomes = complete([h.outcome for h in handed], self.place.world)
        out, err = [h.out for h in handed], [h.err for h in handed]
        title = f"{self.task.test} (attached, world {self.place.world}); the run ends here, a rank is stuck"
        text = report(judge(outcomes, self.place.world), outcomes, Evidence(title, out, err))
        kept = self.attached.keep(
            self.task.test, [Record(text, outcomes, out, err, [o.flight for o in outcomes])], text
        )
        self.attached.say(f"{text}\n\n{kept}")


def _leave_after(board: Board) -> NoReturn:
    """End this process once rank 0 has reported: a launcher ends all when one ends."""
    wait_until_over(board)
    time.sleep(2 * GRACE)
    os._exit(1)


def _stacks(folder: Path) -> str:
    with open(folder / "stacks", "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


@contextlib.contextmanager
def _output_to(folder: Path) -> Iterator[None]:
    """What this rank writes during its part goes to files of its own, beside pytest's capture."""
    with contextlib.ExitStack() as stack:
        for name, fd in (("out", 1), ("err", 2)):
            raw = stack.enter_context(open(folder / name, "wb", buffering=0))
            text = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
            stack.callback(text.detach)
            stack.callback(setattr, sys, f"std{name}", getattr(sys, f"std{name}"))
            setattr(sys, f"std{name}", text)
            saved = os.dup(fd)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, fd)
            os.dup2(raw.fileno(), fd)
        yield


def _tail(path: Path) -> str:
    """The end of a stream's file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - KEPT_OUTPUT))
        return file.read().decode("utf-8", "replace")
    return ""

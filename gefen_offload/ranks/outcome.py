"""What one rank handed over, what killed it, and the verdict of N of them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gefen_offload.ranks.wire import Payload


class Kind(Enum):
    """How a rank ended its task; the later, the worse."""

    PASSED = "passed"
    SKIPPED = "skipped"
    BLOCKED = "blocked"  # still running when another rank had failed
    RAISED = "raised"
    EXITED = "exited"
    KILLED = "killed"
    HUNG = "hung"
    EXTRA = "extra"  # handed over more than one outcome

    @property
    def severity(self) -> int:
        return [kind.value for kind in Kind].index(self.value)


class Stage:
    """Names of what a rank is doing; the user's own words are marks, not stages."""

    START = "start"
    IMPORT = "import torch"
    WAIT = "wait for a task"
    DEVICE = "device"
    STORE = "store"
    GROUP = "process group"
    LOAD = "load worker"
    BODY = "body"
    RESULT = "result"
    TEARDOWN = "teardown"
    SETUP = (DEVICE, STORE, GROUP)  # where a fault may be set: before them a rank does not know its place


@dataclass(frozen=True)
class Failure:
    """An exception as text: the exception itself never crosses a process border."""

    type: str
    bases: tuple[str, ...]  # qualified names of the exception's classes, the most derived first
    message: str
    traceback: str

    @property
    def is_connection(self) -> bool:
        """Whether this looks like the echo of a peer's end and not like a cause."""
        text = f"{self.type} {self.message}".lower()
        return "assertionerror" not in self.type.lower() and any(word in text for word in _ECHOES)


_ECHOES = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "remote error",
    "gloo::ioexception",
    "socket closed",
    "distbackenderror",
    "distnetworkerror",
    "timed out waiting",
    "watchdog",
)


@dataclass(frozen=True)
class Outcome:
    """The one thing each rank must hand over; for a rank that could not, the parent writes it."""

    rank: int
    kind: Kind
    stage: str
    pid: int = 0
    ended: int = 0  # CLOCK_MONOTONIC, ns: comparable between the processes of one machine
    seconds: float = 0.0
    failure: Failure | None = None
    reason: str = ""  # of a skip
    code: int | None = None  # exit code, or minus the signal
    value: Payload | None = None  # what the body returned, packed
    device: str = ""  # "cpu", or the UUID of the GPU that the body ran on
    finished: bool = False  # the body returned
    mark: str = ""
    leaks: tuple[str, ...] = ()
    fired: tuple[int, ...] = ()  # indices of the faults that fired on this rank
    state: str = ""  # of a process that was looked at: running, sleeping, stopped, ...
    stack: str = ""
    collective: str = ""  # the last collective entered, and whether it was left
    collectives: int = 0  # how many it had entered
    flight: str = ""  # what torch's flight recorder had
    laps: tuple[tuple[str, float], ...] = ()  # seconds of "restore", "load", "body", "result" and "leaks"

    @property
    def bad(self) -> bool:
        return self.kind not in (Kind.PASSED, Kind.SKIPPED)

    def headline(self) -> str:
        """One line: what happened to the rank, and where."""
        where = f"in stage '{self.stage}'" + (f" after mark '{self.mark}'" if self.mark else "")
        return f"rank {self.rank} {self._what()} {where}"

    def _what(self) -> str:
        if self.kind is Kind.RAISED and self.failure is not None:
            return f"raised {self.failure.type}: {_first_line(self.failure.message)}"
        if self.kind is Kind.KILLED:
            return f"was killed by {signal_name(self.code)}"
        if self.kind is Kind.EXITED and self.reason:
            return self.reason
        if self.kind is Kind.EXITED:
            return f"exited with code {self.code} and no outcome"
        if self.kind is Kind.HUNG:
            return "did not finish" + (f" (process {self.state})" if self.state else "")
        if self.kind is Kind.BLOCKED:
            return "was still running" + (f" (process {self.state})" if self.state else "")
        if self.kind is Kind.EXTRA:
            return f"handed over more than one outcome ({self.reason})"
        return f"{self.kind.value}: {self.reason}" if self.reason else str(self.kind.value)


class RankFailure(Exception):
    """The verdict on a run that failed: its text is the whole report, and `outcomes` are its evidence."""

    @property
    def summary_of_ranks(self) -> str:
        """The report's first line without the test that it begins with."""
        return str(self).partition("\n")[0].partition("): ")[2] or str(self).partition("\n")[0]

    def __init__(
        self, report: str, outcomes: Sequence[Outcome] = (), first: Outcome | None = None, unfired: bool = False
    ) -> None:
        super().__init__(report)
        self.outcomes, self.first = tuple(outcomes), first
        self.unfired = unfired  # a fault that was to be injected never fired: no failure makes up for that


@dataclass(frozen=True)
class Verdict:
    """The outcome of the group: its worst rank's kind, the first cause, and the echoes of it."""

    kind: Kind
    first: Outcome | None
    secondary: tuple[Outcome, ...]
    reason: str = ""


def judge(outcomes: Sequence[Outcome], world: int) -> Verdict:
    """The verdict on `world` outcomes: pass only if all passed, skip only if all skipped for one reason."""
    outcomes = complete(outcomes, world)
    bad = sorted((o for o in outcomes if o.bad), key=lambda o: (_is_echo(o, outcomes), o.ended))
    if bad:
        worst = max((o.kind for o in bad), key=lambda kind: kind.severity)
        return Verdict(worst, bad[0], tuple(bad[1:]))
    skips = [o for o in outcomes if o.kind is Kind.SKIPPED]
    if not skips:
        return Verdict(Kind.PASSED, None, ())
    if len(skips) == world and len({o.reason for o in skips}) == 1:
        return Verdict(Kind.SKIPPED, None, (), skips[0].reason)
    told = "; ".join(f"rank {o.rank} {o.kind.value}{': ' + o.reason if o.reason else ''}" for o in outcomes)
    return Verdict(Kind.RAISED, skips[0], (), f"the ranks do not agree on skipping: {told}")


def complete(outcomes: Sequence[Outcome], world: int) -> list[Outcome]:
    """One outcome a rank, in order: a missing one becomes an exit, a second one makes the rank EXTRA."""
    complete_list = []
    for rank in range(world):
        mine = [o for o in outcomes if o.rank == rank]
        if not mine:
            complete_list.append(Outcome(rank, Kind.EXITED, Stage.START, reason="handed over no outcome"))
        elif len(mine) > 1:
            told = f"{len(mine)}, from processes {', '.join(str(o.pid) for o in mine)}"
            complete_list.append(replace(mine[0], kind=Kind.EXTRA, reason=told))
        else:
            complete_list.append(mine[0])
    return complete_list


def _is_echo(outcome: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """Whether another rank explains this one: it died, it was waited for in a collective, or this one only ran on."""
    lost_peer = outcome.failure is not None and outcome.failure.is_connection
    missing = _awaited(outcomes)
    if missing:
        return outcome not in missing and (lost_peer or outcome.kind in _UNFINISHED)
    if outcome.kind is Kind.BLOCKED:
        return True
    return lost_peer and any(o.bad and o is not outcome and o.kind is not Kind.BLOCKED for o in outcomes)


def _awaited(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The unfinished ranks that never entered the collective in which another one waits, or gave up waiting."""
    waiting = [o.collectives for o in outcomes if o.bad and "not left" in o.collective]
    return [o for o in outcomes if o.kind in _UNFINISHED and o.collectives < max(waiting, default=0)]


_UNFINISHED = (Kind.HUNG, Kind.BLOCKED)


def signal_name(code: int | None) -> str:
    """`SIGKILL (9)` for an exit code of -9."""
    number = abs(code or 0)
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def _first_line(text: str, limit: int = 300) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[:limit] + " ..."

"""Waiting for one outcome from each rank, whatever way a rank may end, within bounds."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import replace

from gefen_offload.ranks import hang
from gefen_offload.ranks.outcome import Kind, Outcome
from gefen_offload.ranks.process import RankProcess
from gefen_offload.ranks.wire import GarbledError, Handover

GRACE = 0.5  # seconds that the other ranks have, after the first failure, to hand over their own
TICK = 0.1


class Supervisor:
    """Collects the outcomes of one task from the processes of one pool."""

    def __init__(self, processes: Sequence[RankProcess], task: int, deadline: float, stall: float | None) -> None:
        self.processes = processes
        self.task = task
        self.begun = time.monotonic()
        self.deadline, self.stall = deadline, stall
        self.outcomes: list[Outcome] = []
        self._pending = dict(enumerate(processes))
        self._failed_at: float | None = None

    def collect(self) -> list[Outcome]:
        """One outcome a rank; ranks that are still running at the end are looked at, not killed."""
        with selectors.DefaultSelector() as selector:
            for rank, process in self._pending.items():
                for fd in (process.channel.fd, process.pidfd):
                    selector.register(fd, selectors.EVENT_READ, rank)
            while self._pending and not self._over():
                for rank in {key.data for key, _ in selector.select(TICK)}:
                    self._take(selector, rank)
        self._take_late()
        self._look_at_pending()
        return self.outcomes

    def give_up(self) -> list[Outcome]:
        """The outcomes so far, and a look at the ranks that are still running."""
        self._look_at_pending()
        return self.outcomes

    def _take(self, selector: selectors.BaseSelector, rank: int) -> None:
        """Whatever a rank sent; its end, if it ended. A rank that is done is no longer waited for."""
        process = self.processes[rank]
        dead = process.exit_code() is not None
        cut = ""
        try:
            self._note(rank, process.channel.drain())
        except GarbledError as error:
            cut = f"wrote something else than an outcome into its pipe ({error})"
        if (
            process.channel.ended and not dead and not cut
        ):  # the kernel closes the pipe of a dying process before it ends
            dead = process.ends_within(GRACE)
            cut = "closed its pipe and handed over no outcome"
        if rank in self._pending and (dead or cut):
            self._add(_death(rank, process, self.begun, cut))
        if rank not in self._pending:
            for fd in (process.channel.fd, process.pidfd):
                with contextlib.suppress(KeyError, ValueError):
                    selector.unregister(fd)

    def _note(self, rank: int, messages: Sequence[object]) -> None:
        for message in messages:
            if isinstance(message, Handover):
                foreign = message.pid != self.processes[rank].pid
                if message.task == self.task or foreign:
                    self._add(replace(message.outcome, rank=rank), keep=foreign)

    def _add(self, outcome: Outcome, keep: bool = False) -> None:
        """Note an outcome; one from a forked child (`keep`) leaves its rank pending."""
        self.outcomes.append(outcome)
        if not keep:
            self._pending.pop(outcome.rank, None)
        if (outcome.bad or keep) and self._failed_at is None:
            self._failed_at = time.monotonic()

    def _over(self) -> bool:
        now = time.monotonic()
        if self._failed_at is not None:
            return now > self._failed_at + GRACE
        return now > self.begun + self.deadline or self._stalled(now)

    def _stalled(self, now: float) -> bool:
        """Whether no pending rank has changed its page for too long."""
        if self.stall is None or now < self.begun + self.stall:
            return False
        latest = max(p.page.read().changed for p in self._pending.values())
        return now - latest / 1e9 > self.stall

    def _take_late(self) -> None:
        """Second outcomes that arrived just after the first."""
        for rank, process in enumerate(self.processes):
            if rank not in self._pending:
                with contextlib.suppress(OSError, GarbledError):
                    self._note(rank, process.channel.drain())

    def _look_at_pending(self) -> None:
        pending = dict(self._pending)
        kind = Kind.BLOCKED if self._failed_at is not None else Kind.HUNG
        ended = time.monotonic_ns()
        pages = [process.page.read() for process in pending.values()]  # before the look: its signal may end a wait
        looks = hang.look(list(pending.values())) if pending else []
        for (rank, process), seen, status in zip(pending.items(), looks, pages, strict=True):
            self.outcomes.append(
                Outcome(
                    rank,
                    kind,
                    status.stage,
                    process.pid,
                    ended,
                    time.monotonic() - self.begun,
                    mark=status.mark,
                    fired=status.fired,
                    state=seen.state,
                    stack=seen.stack,
                    flight=seen.flight,
                    collective=status.collective_text(),
                    collectives=status.collectives,
                )
            )


def _death(rank: int, process: RankProcess, begun: float, cut: str) -> Outcome:
    """The outcome of a rank that ended without one, or cut itself off, as far as its page and the kernel tell."""
    code = process.exit_code()
    status = process.page.read()
    return Outcome(
        rank,
        Kind.KILLED if code is not None and code < 0 else Kind.EXITED,
        status.stage,
        process.pid,
        time.monotonic_ns(),
        time.monotonic() - begun,
        code=code,
        reason=cut if code is None else "",
        mark=status.mark,
        fired=status.fired,
        stack=process.fatal_stack(),
        collective=status.collective_text(),
        collectives=status.collectives,
    )

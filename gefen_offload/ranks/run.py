"""One run on ranks, from packing the worker to the verdict."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from gefen_offload.ranks.artifacts import Record
from gefen_offload.ranks.faults import Fault
from gefen_offload.ranks.harness import BOOT_PATIENCE, Harness, harness
from gefen_offload.ranks.outcome import Failure, Kind, Outcome, RankFailure, Stage, Verdict, complete, judge
from gefen_offload.ranks.pool import Key, Pool
from gefen_offload.ranks.report import Evidence, report
from gefen_offload.ranks.result import Result
from gefen_offload.ranks.wire import Payload, Task, pack, unpack

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Options:
    """How to run; see :meth:`gefen_offload.ranks.RankGroup.options`."""

    timeout: float = 120.0
    until: float | None = None  # the time.monotonic() by which runs must be over; not with a timeout of their own
    stall: float | None = None
    fresh: bool = False
    new_group: bool = False
    backend: str | None = "gloo"
    faults: tuple[Fault, ...] = ()
    verbosity: int = 0

    def within(self, seconds: float) -> float:
        """So many seconds, or fewer if the test has no more."""
        return seconds if self.until is None else min(seconds, max(0.0, self.until - time.monotonic()))


@dataclass
class Host:
    """Who runs: a test, or a program. What the runs leave is kept here until the host asks for it."""

    name: str = "ranks"
    skip: Callable[[str], NoReturn] | None = None
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    proofs: list[dict[str, Any]] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    pools: dict[Key, Pool] = field(default_factory=dict)  # fresh ones, of this host alone

    def close(self) -> None:
        """End the pools that nobody else may use."""
        for pool in self.pools.values():
            harness().retire(pool)
        self.pools.clear()


class Run:
    """One run; made for one call of `go`."""

    def __init__(self, world: int, gpus: int, options: Options, host: Host) -> None:
        self.key = Key(world, options.backend, gpus)
        self.options, self.host = options, host
        self.harness: Harness = harness()
        self.joined: list[Outcome] = []
        self.boot = 0.0  # seconds until there were ranks

    def go(self, worker: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        """Pack, dispatch, judge."""
        __tracebackhide__ = True
        payloads = [pack((worker, args, kwargs), self.harness.folder) for _ in range(self.key.world)]
        begun = time.monotonic()
        pool, self.joined = self._pool()
        self.boot = time.monotonic() - begun
        try:
            if any(o.bad for o in self.joined):
                self._fail(pool, self.joined)
            with tempfile.TemporaryDirectory("", "run-", self.harness.folder, ignore_cleanup_errors=True) as folder:
                begun = time.monotonic()
                outcomes = pool.run(self._tasks(payloads, Path(folder)), self.options.stall)
                return self._judged(pool, outcomes, time.monotonic() - begun)
        except RankFailure:
            raise
        except BaseException as error:
            if type(error).__name__ != "Skipped" and not isinstance(error, unittest.SkipTest):
                self._interrupted(pool, error)
            raise
        finally:
            self.harness.give(pool)

    def _pool(self) -> tuple[Pool, list[Outcome]]:
        """The shared pool; or one of this test alone, if it asked for one or a fault fires while ranks are set up."""
        in_setup = any(f.in_setup for f in self.options.faults)
        self._give_back_other_gpus()
        if not self.options.fresh and not in_setup:
            return self.harness.take(self.key, patience=self.options.within(BOOT_PATIENCE))
        kept = self.host.pools.get(self.key)
        if kept is not None and not in_setup and not kept.dead():
            return kept, []
        if kept is not None:
            self.harness.retire(kept)
        faults = self.options.faults if in_setup else ()
        pool, joined = self.harness.take(self.key, self.options.within(BOOT_PATIENCE), fresh=True, faults=faults)
        self.host.pools[self.key] = pool
        return pool, joined

    def _give_back_other_gpus(self) -> None:
        """A test must not wait for a lease that its own earlier run, with other options, still holds."""
        for key, pool in list(self.host.pools.items()):
            if key.gpus and (key != self.key or not self.options.fresh):
                self.harness.retire(pool)
                del self.host.pools[key]

    def _tasks(self, payloads: Sequence[Payload], folder: Path) -> list[Task]:
        task = Task(
            id=next(_numbers),
            test=self.host.name,
            payload=payloads[0],
            folder=str(folder),
            environ=dict(os.environ),
            path=list(sys.path),
            cwd=os.getcwd(),
            timeout=self.options.within(self.options.timeout),
            prefix=self.harness.prefix() if self.options.new_group else None,
            faults=self.options.faults,
            verbosity=self.options.verbosity,
        )
        return [replace(task, payload=payload) for payload in payloads]

    def _judged(self, pool: Pool, outcomes: Sequence[Outcome], seconds: float) -> Result:
        __tracebackhide__ = True
        verdict = judge(outcomes, self.key.world)
        if verdict.kind is Kind.SKIPPED:
            self._skip(verdict)
        if verdict.kind is not Kind.PASSED:
            self._fail(pool, outcomes)
        done = complete(outcomes, self.key.world)
        fired = self._fired([*self.joined, *done])
        if len(fired) < len(self.options.faults):
            self._fail(pool, outcomes)
        out, err = self._output(pool)
        values, done = opened(done)
        if any(o.bad for o in done):
            self._fail(pool, done)
        told = tuple(str(self.options.faults[i]) for i in sorted(fired))
        result = Result(values, seconds, tuple(replace(o, value=None) for o in done), tuple(out), tuple(err), told)
        self._note(pool, result)
        return result

    def _note(self, pool: Pool, result: Result) -> None:
        """Proof and leaks, for the host; a pool with anything left in it is not used again."""
        self.host.proofs.append(proof(self.options.backend, result.outcomes, self.boot, result.seconds))
        self.host.leaks += result.leaks
        out, err = ([stream(r) for r in range(self.key.world)] for stream in (result.stdout, result.stderr))
        self.host.records.append(Record("passed", result.outcomes, out, err))
        if result.leaks:
            self._drop(pool)

    def _skip(self, verdict: Verdict) -> NoReturn:
        __tracebackhide__ = True
        if self.host.skip is not None:
            self.host.skip(verdict.reason)
        raise unittest.SkipTest(verdict.reason)

    def _fail(self, pool: Pool, outcomes: Sequence[Outcome]) -> NoReturn:
        """The report, made before anything is torn down; then the pool is killed."""
        __tracebackhide__ = True
        done = complete(outcomes, self.key.world)
        verdict = judge(outcomes, self.key.world)
        fired = self._fired([*self.joined, *done])
        missed = [str(f) for i, f in enumerate(self.options.faults) if i not in fired]
        notes = [f"fault {'fired' if i in fired else 'NEVER FIRED'}: {f}" for i, f in enumerate(self.options.faults)]
        if verdict.first is not None:
            notes.append(f"verdict {time.monotonic() - verdict.first.ended / 1e9:.2f} s after the first cause")
        text = self._record(pool, verdict, done, notes, f"a fault never fired: {'; '.join(missed)}" if missed else "")
        self.host.proofs.append(proof(self.options.backend, done))
        self._drop(pool)
        raise RankFailure(text, done, verdict.first, unfired=bool(missed))

    def _record(
        self, pool: Pool, verdict: Verdict, done: Sequence[Outcome], notes: Sequence[str], summary: str = ""
    ) -> str:
        out, err = self._output(pool)
        flights = [o.flight for o in done]
        text = report(verdict, done, Evidence(f"{self.host.name} ({self.key})", out, err, notes), summary)
        self.host.records.append(Record(text, done, out, err, flights))
        return text

    def _interrupted(self, pool: Pool, error: BaseException) -> None:
        """The parent itself was stopped (Ctrl-C, a timeout of pytest's): say where the ranks were, then kill them."""
        outcomes = pool.interrupted()
        if outcomes:
            notes = [f"interrupted by {type(error).__name__}"]
            verdict = judge(outcomes, self.key.world)
            text = self._record(pool, verdict, complete(outcomes, self.key.world), notes)
            if isinstance(error, KeyboardInterrupt):
                self.host.say(text)  # the test will have no report
            else:
                print(text, file=sys.stderr)
        self._drop(pool)

    def _drop(self, pool: Pool) -> None:
        self.host.pools = {key: other for key, other in self.host.pools.items() if other is not pool}
        self.harness.retire(pool, refill=True)

    def _fired(self, outcomes: Sequence[Outcome]) -> set[int]:
        faults = self.options.faults
        return {i for o in outcomes for i in o.fired if i < len(faults) and faults[i].rank == o.rank}

    def _output(self, pool: Pool) -> tuple[list[str], list[str]]:
        out, err = ([p.output(s, p.offsets[i]) for p in pool.processes] for i, s in enumerate(("out", "err")))
        return out, err


def opened(outcomes: Sequence[Outcome]) -> tuple[list[Any], list[Outcome]]:
    """What the ranks returned; a rank whose value cannot be made again here has failed."""
    values, seen = [], []
    for outcome in outcomes:
        value = None
        try:
            value = unpack(outcome.value) if outcome.value is not None else None
        except Exception as error:
            name = type(error).__name__
            text = f"what the rank returned cannot be made again here: {name}: {error}"
            failure = Failure(name, (name,), text, traceback.format_exc())
            outcome = replace(outcome, kind=Kind.RAISED, stage=Stage.RESULT, failure=failure, value=None)
        values.append(value)
        seen.append(outcome)
    return values, seen


def proof(backend: str | None, outcomes: Sequence[Outcome], boot: float = 0.0, run: float = 0.0) -> dict[str, Any]:
    """What a run proves, as plain data: which devices its ranks had, and which ranks reached the end of the body.

    `times`: seconds until there were ranks, of the slowest rank's laps, and of the rest of the run.
    """
    laps = [dict(o.laps) for o in outcomes]
    times = {name: round(max(lap.get(name, 0.0) for lap in laps), 4) for name in laps[0]} if laps else {}
    dispatch = max(0.0, run - max((sum(lap.values()) for lap in laps), default=0.0))
    return {
        "times": {"boot": round(boot, 4), "dispatch": round(dispatch, 4), **times},
        "world": len(outcomes),
        "backend": backend,
        "devices": [o.device for o in outcomes],
        "finished": [o.rank for o in outcomes if o.finished and not o.bad],
        "simulated": any(o.device.startswith("SIM-") for o in outcomes),
        "seconds": round(max((o.seconds for o in outcomes), default=0.0), 4),
    }

"""The group that tests run on: options, one run, and its verdict."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from gefen_offload.ranks.faults import Fault
from gefen_offload.ranks.harness import Harness, harness
from gefen_offload.ranks.outcome import Kind, Outcome, RankFailure, Verdict, complete, judge
from gefen_offload.ranks.pool import Key, Pool
from gefen_offload.ranks.report import Evidence, report
from gefen_offload.ranks.result import Result
from gefen_offload.ranks.wire import Payload, Task, pack, unpack, worker_problem

_tasks = itertools.count(1)


@dataclass(frozen=True)
class Options:
    """How to run; see :meth:`RankGroup.options`."""

    timeout: float = 120.0
    stall: float | None = None
    fresh: bool = False
    new_group: bool = False
    backend: str | None = "gloo"
    faults: tuple[Fault, ...] = ()
    verbosity: int = 0


@dataclass
class Host:
    """Who runs the group: a test, or a program. What a run leaves is kept here until the host asks."""

    name: str = "ranks"
    devices: Callable[[int], tuple[str, ...]] = lambda count: ()
    skip: Callable[[str], NoReturn] | None = None
    proofs: list[dict[str, Any]] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    failures: list[RankFailure] = field(default_factory=list)
    pools: dict[Key, Pool] = field(default_factory=dict)  # fresh ones, this host's alone

    def close(self) -> None:
        """End the pools that nobody else may use."""
        for pool in self.pools.values():
            harness().retire(pool)
        self.pools.clear()


class RankGroup:
    """N ranks to run a worker on.

    In a test this is the `ranks` fixture. In a program: `RankGroup(2).run(worker, 1, x=2)`; processes stay warm until
    the program ends.
    """

    def __init__(self, world: int, options: Options | None = None, host: Host | None = None, gpus: int = 0) -> None:
        self.world, self.gpus = world, gpus
        self._options = options or Options()
        self._host = host or Host()

    def options(self, **changes: Any) -> RankGroup:
        """The same ranks with other options.

        timeout: seconds until the deadline of a run. stall: seconds without a mark, collective or stage until a run
        counts as hung (None: only the deadline). fresh: processes of this test alone. new_group: a new default process
        group for the run. backend: "gloo", "nccl" or None (no group, and no import of torch). faults: see
        :mod:`gefen_offload.ranks.faults`.
        """
        unknown = sorted(set(changes) - set(Options.__dataclass_fields__))
        if unknown:
            known = ", ".join(Options.__dataclass_fields__)
            raise TypeError(f"ranks.options() knows no {', '.join(unknown)}; it knows {known}")
        if "faults" in changes:
            changes["faults"] = tuple(changes["faults"])
        return RankGroup(self.world, replace(self._options, **changes), self._host, self.gpus)

    def run(self, worker: Callable[..., Any], *args: Any, **kwargs: Any) -> Result:
        """Call `worker(context, *args, **kwargs)` on every rank; its results, or :class:`RankFailure`."""
        __tracebackhide__ = True
        problem = worker_problem(worker)
        if problem is not None:
            raise TypeError(f"ranks.run(): the worker must be a function at the top level of a module: {problem}")
        return _Run(self, self._options, self._host).go(worker, args, kwargs)


class _Run:
    """One run, from packing to verdict."""

    def __init__(self, group: RankGroup, options: Options, host: Host) -> None:
        self.group, self.options, self.host = group, options, host
        self.world = group.world
        self.harness = harness()
        self.begun = time.monotonic()

    def go(self, worker: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        __tracebackhide__ = True
        payloads = [pack((worker, args, kwargs), self.harness.folder) for _ in range(self.world)]
        pool, joined = self._pool()
        if any(o.bad for o in joined):
            self._fail(pool, joined)
        with tempfile.TemporaryDirectory(prefix="run-", dir=self.harness.folder, ignore_cleanup_errors=True) as folder:
            try:
                outcomes = pool.run(self._tasks(payloads, Path(folder)), self.options.stall)
            except BaseException:
                self._drop(pool)
                raise
            return self._verdict(pool, [*joined], outcomes)

    def _pool(self) -> tuple[Pool, list[Outcome]]:
        setup_faults = [f for f in self.options.faults if f.in_setup]
        key = Key(self.world, self.options.backend, self.host.devices(self.group.gpus))
        if not self.options.fresh and not setup_faults:
            return self.harness.pool(key)
        kept = self.host.pools.get(key)
        if kept is not None and not setup_faults and not kept.dead():
            return kept, []
        pool, joined = self.harness.pool(key, fresh=True, faults=self.options.faults if setup_faults else ())
        self.host.pools[key] = pool
        return pool, joined

    def _tasks(self, payloads: Sequence[Payload], folder: Path) -> list[Task]:
        number = next(_tasks)
        prefix = self.harness.prefix() if self.options.new_group else None
        task = Task(
            id=number,
            test=self.host.name,
            payload=payloads[0],
            folder=str(folder),
            environ=dict(os.environ),
            path=list(sys.path),
            cwd=os.getcwd(),
            timeout=self.options.timeout,
            prefix=prefix,
            faults=self.options.faults,
            verbosity=self.options.verbosity,
        )
        return [replace(task, payload=payload) for payload in payloads]

    def _verdict(self, pool: Pool, joined: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Result:
        __tracebackhide__ = True
        verdict = judge(outcomes, self.world)
        if verdict.kind is Kind.SKIPPED:
            self._skip(verdict)
        if verdict.kind is not Kind.PASSED:
            self._fail(pool, outcomes)
        done = complete(outcomes, self.world)
        fired = self._fired([*joined, *done])
        if len(fired) < len(self.options.faults):
            missed = [str(f) for i, f in enumerate(self.options.faults) if i not in fired]
            self._drop(pool)
            raise RankFailure(f"{self.host.name}: a fault never fired: {'; '.join(missed)}", done)
        result = Result(
            values=[unpack(o.value) if o.value is not None else None for o in done],
            seconds=time.monotonic() - self.begun,
            outcomes=tuple(done),
            _stdout=tuple(p.output("out", p.offsets[0]) for p in pool.processes),
            _stderr=tuple(p.output("err", p.offsets[1]) for p in pool.processes),
            fired=tuple(str(self.options.faults[i]) for i in sorted(fired)),
        )
        self._note(pool, done, result.leaks)
        return result

    def _note(self, pool: Pool, outcomes: Sequence[Outcome], leaks: Sequence[str]) -> None:
        """Proof of the run for the host, and what it leaked; a pool with more than a leaked group is not used again."""
        self.host.proofs.append(proof(self.options.backend, self.harness, outcomes))
        self.host.leaks += leaks
        if any("process group" not in leak for leak in leaks):
            self._drop(pool)

    def _skip(self, verdict: Verdict) -> NoReturn:
        __tracebackhide__ = True
        if self.host.skip is not None:
            self.host.skip(verdict.reason)
        raise unittest.SkipTest(verdict.reason)

    def _fail(self, pool: Pool, outcomes: Sequence[Outcome]) -> NoReturn:
        """The report, made before anything is torn down; then the pool is killed."""
        __tracebackhide__ = True
        done = complete(outcomes, self.world)
        verdict = judge(outcomes, self.world)
        evidence = Evidence(
            title=f"{self.host.name} ({pool.key})",
            stdout=[p.output("out", p.offsets[0]) for p in pool.processes],
            stderr=[p.output("err", p.offsets[1]) for p in pool.processes],
            notes=self._fault_notes(done),
        )
        text = report(verdict, done, evidence)
        self._drop(pool)
        self.host.proofs.append(proof(self.options.backend, self.harness, done))
        failure = RankFailure(text, done)
        self.host.failures.append(failure)
        raise failure

    def _drop(self, pool: Pool) -> None:
        self.host.pools = {key: other for key, other in self.host.pools.items() if other is not pool}
        self.harness.retire(pool)

    def _fired(self, outcomes: Sequence[Outcome]) -> set[int]:
        return {i for o in outcomes for i in o.fired if self.options.faults[i].rank == o.rank}

    def _fault_notes(self, outcomes: Sequence[Outcome]) -> list[str]:
        fired = self._fired(outcomes)
        return [f"fault {'fired' if i in fired else 'NEVER FIRED'}: {f}" for i, f in enumerate(self.options.faults)]


def proof(backend: str | None, run: Harness, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What a run proves, as plain data: which devices its ranks had and which ranks reached the end of the body."""
    return {
        "world": len(outcomes),
        "backend": backend,
        "devices": [o.device for o in outcomes],
        "finished": [o.rank for o in outcomes if o.finished and not o.bad],
        "simulated": any(o.device.startswith("SIM-") for o in outcomes),
    }

"""The ranks that a test or a program runs workers on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gefen_offload.ranks.result import Result
from gefen_offload.ranks.run import Host, Options, Run
from gefen_offload.ranks.wire import worker_problem


class RankGroup:
    """N ranks to run a worker on.

    In a test this is the `ranks` fixture. In a program: `RankGroup(2).run(worker, 1, x=2)`; the processes stay warm
    until the program ends. `gpus` is 0 or, with the backend "nccl", the number of ranks.
    """

    def __init__(self, world: int, options: Options | None = None, host: Host | None = None, gpus: int = 0) -> None:
        self.world, self.gpus = world, gpus
        self._options = options or Options()
        self._host = host or Host()

    def options(self, **changes: Any) -> RankGroup:
        """The same ranks with other options.

        timeout: seconds until the deadline of a run. stall: seconds without a mark, collective or new stage after
        which a run counts as hung (None: only the deadline). fresh: processes of this test alone. new_group: a new
        default process group for the run. backend: "gloo", "nccl" or None (no group, and no import of torch). faults:
        see :mod:`gefen_offload.ranks.faults`. verbosity: of assertion texts.
        """
        unknown = sorted(set(changes) - set(Options.__dataclass_fields__))
        if unknown:
            known = ", ".join(Options.__dataclass_fields__)
            raise TypeError(f"ranks.options() knows no {', '.join(unknown)}; it knows {known}")
        if "timeout" in changes:
            changes = {"until": None, **changes}
        if "faults" in changes:
            changes["faults"] = tuple(changes["faults"])
            wrong = [str(fault) for fault in changes["faults"] if not 0 <= fault.rank < self.world]
            if wrong:
                raise ValueError(f"{'; '.join(wrong)}: the ranks are 0 to {self.world - 1}")
        return self._with(replace(self._options, **changes))

    def _with(self, options: Options) -> RankGroup:
        return RankGroup(self.world, options, self._host, self.gpus)

    def run(self, worker: Callable[..., Any], *args: Any, **kwargs: Any) -> Result:
        """Call `worker(context, *args, **kwargs)` on every rank.

        Returns the results, tensors as copies on the CPU. Raises :class:`RankFailure` unless every rank passed, and
        skips if every rank skipped for the same reason.
        """
        __tracebackhide__ = True
        problem = worker_problem(worker)
        if problem is not None:
            raise TypeError(f"ranks.run(): the worker must be a function at the top level of a module: {problem}")
        return self._go(worker, args, kwargs)

    def _go(self, worker: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        __tracebackhide__ = True
        return Run(self.world, self.gpus, self._options, self._host).go(worker, args, kwargs)

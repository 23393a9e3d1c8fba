"""A data-parallel training run that saves as it goes, is struck by a fault, and goes on from its last good file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gefen_offload import OffloadPolicy, OffloadUnsupportedError
from gefen_offload.offload import accelerator as seam
from gefen_offload.ranks import identical
from gefen_offload.ranks.faults import InjectedError
from support.gpt import GPTShape
from support.simulated import SimulatedAccelerator, simulated
from support.solved import solving_once
from support.training import Case, Run, Snapshot, snapshot, train

SAVE_EVERY = 2
CASE = Case("struck", GPTShape(width=32), schedule=True, policy=OffloadPolicy(staging_bytes=4000), steps=7)


MEMORY = "out of memory"  # a fault with this message is what an allocator raises


class Marking:
    """The seam to a device, which marks what passes: "copy in 3" and "copy out 3" before the copies of step 3."""

    def __init__(self, inner: Any, mark: Callable[[str], None]) -> None:
        self.inner, self._mark, self.step = inner, mark, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def mark(self, what: str) -> None:
        """Say what comes next, in this step. What a fault throws here is raised as the runtime would."""
        try:
            self._mark(f"{what} {self.step}")
        except InjectedError as error:
            if str(error) == MEMORY:
                raise torch.OutOfMemoryError(MEMORY) from None
            raise

    def copy(self, pairs: Any, stream: Any) -> None:
        """Mark, then copy."""
        if pairs:
            self.mark("copy in" if self.inner.is_compute(pairs[0][0]) else "copy out")
        self.inner.copy(pairs, stream)


@contextlib.contextmanager
def marking(context: Any) -> Iterator[Marking]:
    """The marking seam in place: to the rank's GPU, or to the simulated accelerator on a CPU rank."""
    on_gpu = context.device.type == "cuda"
    inner = seam.accelerator_for(context.device) if on_gpu else SimulatedAccelerator()
    with simulated(Marking(inner, context.mark)) as marks:
        yield marks


@dataclass
class Journal:
    """What came of a run on one rank: the step it began at, losses by step, failures met, and the last snapshot."""

    first: int
    losses: dict[int, float] = field(default_factory=dict)
    failures: list[tuple[int, str, bool]] = field(default_factory=list)  # step, exception, poisoned
    last: Snapshot | None = None


class Traveller:
    """The run on one rank."""

    def __init__(self, context: Any, case: Case, path: str, marks: Marking) -> None:
        self.context, self.path, self.marks = context, path, marks
        self.run = Run(case, context.rank, context.world, context.device, True, context.mark)
        self.journal = Journal(self.run.load(path) if os.path.exists(path) else 0)

    def go(self, advance: Callable[[Traveller, int], int]) -> Journal:
        """Every step from where the file ends; `advance` takes one and says which is next."""
        step = self.journal.first
        while step < self.run.case.steps:
            self.context.step(step)
            self.marks.step = step
            loss = self.run.gradients(step)
            following = advance(self, step)
            if following == step + 1:
                self.journal.losses[step] = loss.item()
                if following % SAVE_EVERY == 0 and self.context.rank == 0:
                    self.run.save(self.path, following)
            step = following
        self.journal.last = snapshot(self.run.model, self.run.optimizer)
        return self.journal


def advance(traveller: Traveller, step: int) -> int:
    """One step; what it raises ends the run."""
    traveller.run.advance()
    return step + 1


def advance_or_recover(traveller: Traveller, step: int) -> int:
    """One step. A failure that changed nothing is tried again; after another all ranks go back to the file."""
    run, optimizer = traveller.run, traveller.run.optimizer
    try:
        run.advance()
    except (InjectedError, torch.OutOfMemoryError, OffloadUnsupportedError) as error:
        traveller.journal.failures.append((step, type(error).__name__, optimizer.state_offload_poisoned))
        if not optimizer.state_offload_poisoned:
            run.advance()
    if any_rank(optimizer.state_offload_poisoned, traveller.context.device):
        return run.load(traveller.path)
    return step + 1


def any_rank(what: bool, device: torch.device) -> bool:
    """Collective: whether it is so on any rank."""
    flag = torch.tensor([float(what)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def travel(context: Any, case: Case, path: str, recover: bool = False) -> Journal:
    """Worker: the run, from the file at `path` if there is one, to its end."""
    with solving_once(), marking(context) as marks:
        return Traveller(context, case, path, marks).go(advance_or_recover if recover else advance)


# --- replicas that part ---


def negate_a_gradient(run: Run) -> None:
    """The largest element of one gradient, after the all-reduce."""
    flat = next(run.model.parameters()).grad.view(-1)
    flat[flat.abs().argmax()].neg_()


def flip_a_parameter_bit(run: Run) -> None:
    """The lowest bit of one element of one parameter."""
    next(run.model.parameters()).data.view(-1)[3:4].view(torch.int32).bitwise_xor_(1)


def travel_apart(context: Any, case: Case, path: str, corrupt: Callable[[Run], None], at: int) -> Journal:
    """Worker: `corrupt` one rank's run at a step, do all that compares replicas, then go on from the file."""

    def advance_apart(traveller: Traveller, step: int) -> int:
        run, optimizer = traveller.run, traveller.run.optimizer
        struck = step == at and not traveller.journal.failures
        if struck and context.rank == context.world - 1:
            corrupt(run)
        run.advance()
        if not struck:
            return step + 1
        saved, extra = optimizer.state_dict(), torch.nn.Parameter(run.model.head.weight.detach().clone())
        before = snapshot(run.model, optimizer)
        extra.data[0, 0] += context.rank
        traveller.journal.failures = [
            refusal(step, optimizer, lambda: optimizer.load_state_dict(saved)),
            refusal(step, optimizer, lambda: optimizer.add_param_group({"params": [("extra", extra)]})),
        ]
        identical(before, snapshot(run.model, optimizer)).check()
        optimizer.restore_state_()
        activate = lambda: optimizer.offload_state_(policy=case.policy)  # noqa: E731
        traveller.journal.failures.append(refusal(step, optimizer, activate))
        first = run.load(path)
        activate()
        return first

    with solving_once(), marking(context) as marks:
        return Traveller(context, case, path, marks).go(advance_apart)


def refusal(step: int, optimizer: Any, operation: Callable[[], Any]) -> tuple[int, str, bool]:
    """The code that the operation is refused with, in seconds; as a failure of a journal."""
    begun = time.monotonic()
    try:
        operation()
    except OffloadUnsupportedError as error:
        assert time.monotonic() - begun < 5
        return step, error.reason.value, optimizer.state_offload_poisoned
    return step, "accepted", optimizer.state_offload_poisoned


def train_streamed(context: Any, case: Case) -> list[Snapshot]:
    """Worker: an offloaded run, through the simulated accelerator on a CPU rank, and the snapshot after each step."""
    with solving_once(), marking(context):
        return train(context, case, True)

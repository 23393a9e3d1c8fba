"""Offload while it is on: the engine, the host store, what was seen last, and whether the state can be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from torch import Tensor

from gefen_offload.offload import refusals
from gefen_offload.offload.accelerator import Accelerator
from gefen_offload.offload.anchors import Anchors, anchor
from gefen_offload.offload.binding import BoundPlan, moved
from gefen_offload.offload.engine import Engine, StepError
from gefen_offload.offload.errors import OffloadPoisonedError
from gefen_offload.offload.pieces import Again, Launch, Piece, Prepare, Shapes
from gefen_offload.offload.policy import OffloadPolicy
from gefen_offload.offload.refusals import Subject
from gefen_offload.offload.replicas import Ranks
from gefen_offload.offload.slab import HostStore
from gefen_offload.offload.staging import stage_on_host


class Host(Protocol):
    """The optimizer, as far as a session looks at it."""

    state: Any
    param_groups: list[dict[str, Any]]

    def _subject(self) -> Subject: ...


UNCOUNTED = "an offloaded step was interrupted after parameters had changed, before it was counted"


@dataclass
class Poison:
    """Why state and parameters no longer match; None while they do."""

    why: str | None = None

    def check(self) -> None:
        """Raise if they do not."""
        if self.why is not None:
            raise self._error()

    def from_step(self, error: StepError) -> OffloadPoisonedError:
        """Note a failed step and return what to raise."""
        cause = f"{type(error.cause).__name__}: {error.cause}"
        self.why = f"an offloaded step failed near {error.names}, after parameters had changed ({cause})"
        return self._error()

    def _error(self) -> OffloadPoisonedError:
        return OffloadPoisonedError(
            f"{self.why}. Optimizer state and parameters no longer match: load a known-good checkpoint, model and "
            "optimizer, with load_state_dict()"
        )


@dataclass
class Session:
    """Everything that offload keeps between activation and restoration; none of it is in `state[p]`."""

    policy: OffloadPolicy
    accelerator: Accelerator
    engine: Engine
    store: HostStore
    ranks: Ranks | None
    anchors: Anchors
    poison: Poison = field(default_factory=Poison)
    steps_begun: int = 0
    steps_failed: int = 0
    allocated: bool = False  # since the anchors were taken

    # --- around a step ---

    def before_step(self, host: Host) -> None:
        """Refuse what has become unsupported since; complete the last write-back. Changes nothing."""
        refusals.refuse_compiling()
        self.poison.check()
        self.settle()
        if self.accelerator.is_capturing():
            refusals.refuse_graphs(host._subject(), self.accelerator)
        self.engine.prefetch(p for group in host.param_groups for p in group["params"] if p.numel())
        if not self.anchors.hold(host.param_groups, host.state, self.accelerator.is_compute):
            self.engine.cancel_prefetch()
            self.scan(host)
        self.steps_begun += 1

    def scan(self, host: Host) -> None:
        """The full check; where nothing is wrong, what is there now is what the next steps are compared with."""
        subject = host._subject()
        refusals.check(subject, self.accelerator)
        for name, parameter in subject.named():
            for entry, tensor in _declared(subject, parameter):
                if tensor.numel() and self.store.find(tensor) is None:
                    raise moved(name, entry, tensor)
        self.anchor(host)

    def anchor(self, host: Host) -> None:
        """What is there now is ours."""
        self.anchors = anchor(host.param_groups, host.state)
        self.allocated = False
        self.engine.forget_plans()

    def run(self, host: Host, pieces: Sequence[Piece], prepare: Prepare, *, divisible: bool) -> Again:
        """One streamed step. Raises OffloadPoisonedError, and poisons, if it fails after the first mutation."""
        if self.allocated:
            self.anchor(host)
        with self._poisoning():
            for piece in pieces:
                if piece.first == 0:
                    self._check_compute(piece)
            bound, launch = self.engine.prepare(pieces, prepare, divisible=divisible)
            self.engine.run(bound, launch, wait=not self.policy.deferred)
        return _StreamedAgain(self, bound, launch)

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Poisoned for as long as the step is neither undone nor, by `counted`, complete: it may be interrupted."""
        try:
            self.poison.why = UNCOUNTED
            yield
        except StepError as error:
            self.steps_failed += 1
            self._fail(error)
        except BaseException:
            self.poison.why = None
            self.steps_failed += 1
            raise

    def counted(self) -> None:
        """The step's counters have been raised: state and parameters match again."""
        self.poison.why = None

    def _check_compute(self, piece: Piece) -> None:
        parameter = piece.work.parameter
        gradient = parameter.grad
        if not self.accelerator.is_compute(parameter) or (
            gradient is not None and not self.accelerator.is_compute(gradient)
        ):
            where = None if gradient is None else gradient.device
            raise RuntimeError(
                f"{piece.work.state.get('name')} is on {parameter.device} and its gradient on {where}; an offloaded "
                f"step needs both on {self.accelerator.device}"
            )

    def settle(self) -> None:
        """Wait until the host state is complete and nothing reads it; poisons if a copy back failed."""
        self.engine.cancel_prefetch()
        if not self.engine.pending:
            return
        try:
            self.engine.settle()
        except StepError as error:
            self._fail(error)

    def _fail(self, error: StepError) -> NoReturn:
        poisoned = self.poison.from_step(error)
        if isinstance(error.cause, Exception):
            raise poisoned from error.cause
        raise error.cause from None

    # --- memory ---

    def allocate(self, requests: Sequence[Shapes]) -> list[dict[str, Tensor]]:
        """Zero-filled state on the host, in one slab."""
        tensors = self.store.zeros(requests)
        self.allocated = True
        return tensors

    def place(self, states: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Copies of a checkpoint's tensors on the host, in one slab."""
        return stage_on_host(states, self.accelerator, self.store)


@dataclass(frozen=True)
class _StreamedAgain:
    """A streamed step, on the windows it was bound to."""

    session: Session
    bound: BoundPlan
    launch: Launch

    @property
    def valid(self) -> bool:
        """Whether the engine still has these windows."""
        return not self.session.allocated and self.session.engine.holds(self.bound)

    def __call__(self) -> None:
        """Run it."""
        session = self.session
        with session._poisoning():
            session.engine.run(self.bound, self.launch, wait=not session.policy.deferred)


def _declared(subject: Subject, parameter: Tensor) -> list[tuple[str, Tensor]]:
    entries = subject.state.get(parameter)
    if subject.schema is None or not isinstance(entries, dict):
        return []
    names = [entry.name for entry in subject.schema.tensors]
    return [(name, entries[name]) for name in names if name in entries]

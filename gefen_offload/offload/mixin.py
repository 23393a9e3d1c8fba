"""`StateOffloadMixin`: where an optimizer's state lives, and its way there and back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gefen_offload.offload import refusals, resident, transitions
from gefen_offload.offload.errors import OffloadCopyError, OffloadPoisonedError, OffloadReason
from gefen_offload.offload.pieces import Again, Piece, Prepare, Shapes
from gefen_offload.offload.policy import OffloadPolicy
from gefen_offload.offload.refusals import Owned, Subject
from gefen_offload.offload.replicas import Agreement, agreement, fingerprint, ranks_of
from gefen_offload.offload.report import OffloadPlan, OffloadReport, make_plan, make_report
from gefen_offload.offload.schema import StateSchema
from gefen_offload.offload.session import Poison, Session
from gefen_offload.offload.transitions import home_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StateOffloadMixin:
    """A base class of an optimizer, before `torch.optim.Optimizer`.

    The host class declares `STATE_SCHEMA` and gives `_shared_tensors` and `_set_shared_tensors`: the tensors that all
    parameters share, which stay on the parameters' device. Its `step` calls `_before_step`, `_run_update` and, once
    counters are raised, `_step_counted`.
    """

    STATE_SCHEMA: ClassVar[StateSchema | None] = None
    RESIDENT: ClassVar[str | None] = None  # why optimizers of this class are never offloaded, after their name

    # None while offload is off and the state is good; a Poison while it is off and the state is not.
    _offload: Session | Poison | None = None
    _offload_owned: Owned | None = None

    state: Any
    param_groups: list[dict[str, Any]]

    # --- the public surface ---

    def offload_state_(
        self,
        device: str | torch.device = "cpu",
        *,
        policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
        process_group: ProcessGroup | None = None,
    ) -> None:
        """From now on the CPU copy of the state is the authority, and each step streams it through the GPU.

        Legal before the first step. With a default process group this is a collective call: the ranks compare their
        parameters first, those of `process_group` if it is given. Raises OffloadUnsupportedError, with a reason, where
        offload is not supported; whatever is raised, on whichever rank, nothing has changed. A second call with the
        same policy does nothing.
        """
        refusals.refuse_compiling()
        _check_policy(policy)
        if torch.device(device).type != "cpu":
            raise ValueError(f"offload_state_({str(device)!r}): state can be offloaded to 'cpu' only")
        if isinstance(self._offload, Session):
            if policy != self._offload.policy:
                raise ValueError(
                    f"offload is on with {self._offload.policy}; call restore_state_() before changing it to {policy}"
                )
            return
        ranks = ranks_of(process_group) if policy.verify_replicas else None
        with agreement(ranks, policy.verify_seconds, "offload_state_()") as pact:
            if self.RESIDENT is not None:
                refusals.refuse(OffloadReason.OPTIMIZER, f"{type(self).__name__} {self.RESIDENT}")
            if self._offload is not None:
                self._offload.check()
            staged = transitions.stage_activation(self, policy, ranks)
            self._confirm(pact, list(self._subject().named()))
        staged.commit(self)

    def restore_state_(self) -> None:
        """Bring the state back beside the parameters and turn offload off; nothing to do where it is off.

        Raises without effect. A poisoned state stays poisoned: it can be restored, but not stepped or saved.
        """
        if not isinstance(self._offload, Session):
            return
        self._offload.settle()
        poison = self._offload.poison
        after = poison if poison.why is not None else None
        transitions.stage_restoration(self, self._offload, after).commit(self)

    def move_state_(self, device: str | torch.device | None = None) -> None:
        """Move every state tensor to its parameter's device, or to `device` if every parameter is there.

        Counters stay ints. Raises without effect: ValueError for another device, RuntimeError while offload is on.
        """
        self._stage_move(device)()

    def _stage_move(self, device: str | torch.device | None = None) -> Callable[[], None]:
        """Make the copies of `move_state_`; calling what this returns commits them."""
        if isinstance(self._offload, Session):
            raise RuntimeError("the state is offloaded to the CPU: restore_state_() brings it beside the parameters")
        target = None if device is None else torch.device(device)
        staged = transitions.stage_move(self, target, self._offload)
        return lambda: staged.commit(self)

    def state_offload_plan(self, policy: OffloadPolicy = OffloadPolicy()) -> OffloadPlan:  # noqa: B008 - frozen
        """What `offload_state_(policy=policy)` would free and cost here. Copies a few MiB to time the link."""
        _check_policy(policy)
        return make_plan(self._subject(), home_of(self), policy)

    def state_offload_report(self) -> OffloadReport:
        """What offload has done since it was turned on; waits for deferred write-back first."""
        if isinstance(self._offload, Session):
            with contextlib.suppress(OffloadPoisonedError):
                self._offload.settle()
        return make_report(self._offload)

    @property
    def state_offload_active(self) -> bool:
        """Whether the CPU copy of the state is the authority."""
        return isinstance(self._offload, Session)

    @property
    def state_offload_device(self) -> torch.device | None:
        """Where the authority is while offload is on, else None."""
        return torch.device("cpu") if self.state_offload_active else None

    @property
    def state_offload_poisoned(self) -> bool:
        """Whether a copy back failed after a parameter had changed, and no checkpoint has been loaded since."""
        held = self._offload
        return (held.poison if isinstance(held, Session) else held or Poison()).why is not None

    # --- what the host class gives ---

    def _shared_tensors(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _set_shared_tensors(self, tensors: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _state_replaced(self) -> None:
        """State tensors have been replaced: let go of everything that was prepared for the old ones."""

    # --- what the host class calls ---

    def _before_step(self) -> None:
        """Before `step()` looks at gradients: refuse what offload does not support; changes nothing."""
        held = self._offload
        if held is None:
            return
        if isinstance(held, Session):
            held.before_step(self)
        else:
            held.check()

    def _refuse_tracing(self) -> None:
        """First in a `step()` whose body torch.compile leaves alone: refuse to be called from traced code.

        Costs one attribute read where offload is off.
        """
        if self._offload is not None:
            refusals.refuse_compiling()

    def _run_update(self, pieces: Sequence[Piece], prepare: Prepare, *, divisible: bool = False) -> Again:
        """Step every piece with its state tensors beside the parameter; they are written back afterwards.

        `prepare` is told where they will be, window by window, and returns what launches a window's update. What is
        returned runs the same update again. `divisible` says that the update's result does not depend on how a
        parameter is cut, as with fused kernels: then pieces may cover whole parameters, and are cut to fit the windows.
        """
        held = self._offload
        if isinstance(held, Session):
            return held.run(self, pieces, prepare, divisible=divisible)
        return resident.run(pieces, prepare, self._schema())

    def _step_counted(self) -> None:
        """After `_run_update`, once the counters are raised too: until then an interruption poisons."""
        if isinstance(self._offload, Session):
            self._offload.counted()

    def _allocate_state(self, requests: Sequence[tuple[Tensor, Shapes]]) -> list[dict[str, Tensor]]:
        """Zero-filled state tensors for each (parameter, shapes and dtypes by name), where the authority lives."""
        if isinstance(self._offload, Session):
            return self._offload.allocate([shapes for _, shapes in requests])
        return resident.allocate(requests)

    def _place_state(self, staged: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> list[dict[str, Tensor]]:
        """Copies of a checkpoint's tensors for each parameter, in their own dtype, where the authority lives."""
        held = self._offload
        if not isinstance(held, Session):
            return resident.place(staged)
        with contextlib.suppress(OffloadPoisonedError):
            held.settle()
        refusals.check(self._subject(), held.accelerator, state=False)
        return held.place([tensors for _, tensors in staged])

    def _committed_load(self) -> None:
        """After a load has replaced state, groups and shared tensors: the live state is known to be good again."""
        held = self._offload
        if isinstance(held, Session):
            held.poison.why = None
            held.anchor(self)
        else:
            self._offload = None
        self._state_replaced()

    def _guard_read(self) -> None:
        """Before state is read: raise if it is poisoned, wait for what is still being written back."""
        held = self._offload
        if held is None:
            return
        if isinstance(held, Session):
            held.settle()
            held.poison.check()
        else:
            held.check()

    def _note_group_added(self, group: dict[str, Any], pact: Agreement) -> None:
        """After a group was appended: refuse it, taken back, where offload does not support it or a peer refuses."""
        if self._offload_owned is None:
            self._offload_owned = []
        self._offload_owned.append([weakref.ref(parameter) for parameter in group["params"]])
        held = self._offload
        if not isinstance(held, Session):
            return
        try:
            held.poison.check()
            held.scan(self)
            self._confirm(pact, list(self._subject().named())[-len(group["params"]) :])
        except BaseException:
            self._offload_owned.pop()
            self.param_groups.pop()
            for parameter in group["params"]:
                self.state.pop(parameter, None)
            held.anchor(self)
            raise

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[Agreement]:
        """Around everything in `what` that one rank alone may refuse: offloaded, its peers then raise too, at once.

        Each rank confirms as the last thing inside.
        """
        held = self._offload
        ranks, seconds = (held.ranks, held.policy.verify_seconds) if isinstance(held, Session) else (None, 0.0)
        with agreement(ranks, seconds, what) as pact:
            yield pact

    def _confirm(self, pact: Agreement, named: Sequence[tuple[str, Tensor]]) -> None:
        if pact.needed:
            pact.confirm(fingerprint(named))

    # --- copies ---

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied while offload is on: the copy would believe that it is resident."""
        if self._offload is not None:
            what, advice = "poisoned", "load a known-good checkpoint first"
            if self.state_offload_active:
                what, advice = "offloaded", "copy state_dict(), or call restore_state_() first"
            raise OffloadCopyError(f"{type(self).__name__} cannot be copied or pickled while {what}: {advice}")
        return super().__getstate__()  # type: ignore[misc,no-any-return]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` gave; the groups are this optimizer's own."""
        super().__setstate__(state)  # type: ignore[misc]
        self._offload_owned = [[weakref.ref(p) for p in group["params"]] for group in self.param_groups]

    # --- what the checks look at ---

    def _subject(self) -> Subject:
        return Subject(
            type(self),
            self.STATE_SCHEMA,
            self.param_groups,
            self.state,
            self._shared_tensors(),
            self._offload_owned,
            bool(getattr(self, "_capturable", False)),
        )

    def _schema(self) -> StateSchema:
        if self.STATE_SCHEMA is None:
            raise TypeError(f"{type(self).__name__} declares no STATE_SCHEMA: name every entry of its state there")
        return self.STATE_SCHEMA


def _check_policy(policy: object) -> None:
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(f"policy must be an OffloadPolicy, not {policy!r}")

"""Activation, restoration and moves: each stages everything first, and returns what commits it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gefen_offload.offload import accelerator as seam
from gefen_offload.offload import refusals
from gefen_offload.offload.accelerator import Accelerator
from gefen_offload.offload.anchors import anchor
from gefen_offload.offload.engine import Engine
from gefen_offload.offload.policy import OffloadPolicy
from gefen_offload.offload.refusals import Subject
from gefen_offload.offload.replicas import Ranks
from gefen_offload.offload.session import Session
from gefen_offload.offload.slab import HostStore, aligned
from gefen_offload.offload.staging import replaced, stage_on_device, stage_on_host, tensors_of
from gefen_offload.offload.turns import ABREAST

WORST_BYTES = 9  # of state for one element, with a period of one


class Optimizer(Protocol):
    """What a transition reads and replaces."""

    state: Any
    param_groups: list[dict[str, Any]]

    def _subject(self) -> Subject: ...
    def _shared_tensors(self) -> dict[str, Tensor]: ...
    def _set_shared_tensors(self, tensors: dict[str, Tensor]) -> None: ...
    def _state_replaced(self) -> None: ...


@dataclass(frozen=True)
class Staged:
    """The new state, the new shared tensors (None: as they are), and the new value of `_offload`."""

    state: Mapping[Any, Any]
    shared: dict[str, Tensor] | None
    offload: Any

    def commit(self, optimizer: Optimizer) -> None:
        """Swap everything in, in one assignment; the shared tensors, where they moved, just before it."""
        if self.shared is not None:
            optimizer._set_shared_tensors(self.shared)
        vars(optimizer).update(state=self.state, _offload=self.offload)
        optimizer._state_replaced()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter, in the groups' order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def home_of(optimizer: Optimizer) -> Accelerator:
    """The seam to the device of the first parameter."""
    parameters = parameters_of(optimizer)
    return seam.accelerator_for(parameters[0].device if parameters else torch.device("cpu"))


# --- activation -----------------------------------------------------------------------------------------------------


def stage_activation(optimizer: Optimizer, policy: OffloadPolicy, ranks: Ranks | None) -> Staged:
    """Everything that offload needs, with a complete copy of the state on the host. Raises without effect."""
    accelerator = home_of(optimizer)
    refusals.check(optimizer._subject(), accelerator)
    parameters = parameters_of(optimizer)
    store = HostStore(lambda nbytes: accelerator.host(nbytes, pinned=policy.pinned))
    schema = optimizer._subject().schema
    if schema is None:  # refused above
        raise TypeError(f"{type(optimizer).__name__} declares no STATE_SCHEMA")
    engine = Engine(accelerator, schema, store, policy.staging_bytes)
    live = [tensors_of(optimizer.state.get(parameter)) for parameter in parameters]
    engine.reserve(min(ABREAST * aligned(policy.staging_bytes), _state_bound(parameters, live)))
    copies = stage_on_host(live, accelerator, store)
    shared = _shared_beside(optimizer, accelerator, parameters[0])
    state = replaced(optimizer.state, dict(zip(parameters, copies, strict=True)))
    session = Session(policy, accelerator, engine, store, ranks, anchor(optimizer.param_groups, state))
    return Staged(state, shared, session)


def _state_bound(parameters: list[Tensor], live: list[dict[str, Tensor]]) -> int:
    """An upper bound of the bytes of all state, as far as it can be known now."""
    known = sum(t.numel() * t.element_size() + 64 for tensors in live for t in tensors.values())
    unknown = sum(WORST_BYTES * p.numel() + 256 for p, tensors in zip(parameters, live, strict=True) if not tensors)
    return known + unknown


def _shared_beside(optimizer: Optimizer, accelerator: Accelerator, parameter: Tensor) -> dict[str, Tensor] | None:
    """The shared tensors on the parameters' device; None where all of them are there."""
    shared = optimizer._shared_tensors()
    away = {name: tensor for name, tensor in shared.items() if not accelerator.beside(tensor, parameter)}
    return {**shared, **stage_on_device([away], accelerator)[0]} if away else None


# --- restoration and moves ------------------------------------------------------------------------------------------


def stage_restoration(optimizer: Optimizer, session: Session, offload: Any) -> Staged:
    """The state beside the parameters again, wherever it is now. Raises without effect."""
    copies = _stage_beside(optimizer, lambda tensor, parameter, accelerator: True, session.accelerator)
    return Staged(replaced(optimizer.state, copies), None, offload)


def stage_move(optimizer: Optimizer, device: torch.device | None, offload: Any) -> Staged:
    """The state that is not beside its parameter, there. Raises without effect."""
    parameters = parameters_of(optimizer)
    if device is not None:
        _check_target(parameters, device)
    home = home_of(optimizer)
    copies = _stage_beside(optimizer, lambda t, p, accelerator: not accelerator.beside(t, p), home)
    shared = _shared_beside(optimizer, home, parameters[0]) if parameters else None
    state = replaced(optimizer.state, copies) if copies else optimizer.state
    return Staged(state, shared, offload)


def _check_target(parameters: list[Tensor], device: torch.device) -> None:
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    elsewhere = {parameter.device for parameter in parameters} - {device}
    if elsewhere:
        raise ValueError(
            f"move_state_({str(device)!r}): parameters are on {sorted(map(str, elsewhere))}. State moves to where "
            "every parameter already is; move the model first, or leave the device out"
        )


def _stage_beside(
    optimizer: Optimizer, wanted: Callable[[Tensor, Tensor, Accelerator], bool], home: Accelerator
) -> dict[Tensor, dict[str, Tensor]]:
    """Copies beside each parameter of the tensors that are `wanted`, device by device."""
    by_device: dict[torch.device, dict[Tensor, dict[str, Tensor]]] = {}
    seams = {home.device: home}
    for parameter in parameters_of(optimizer):
        device = parameter.device
        accelerator = seams.setdefault(device, home if device == home.device else seam.accelerator_for(device))
        entries = tensors_of(optimizer.state.get(parameter))
        chosen = {name: tensor for name, tensor in entries.items() if wanted(tensor, parameter, accelerator)}
        if chosen:
            by_device.setdefault(device, {})[parameter] = chosen
    copies: dict[Tensor, dict[str, Tensor]] = {}
    for device, states in by_device.items():
        copies.update(zip(states, stage_on_device(list(states.values()), seams[device]), strict=True))
    return copies

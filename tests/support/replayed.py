"""Steps on interpreted kernels that are taken again as an earlier one, beside the same steps prepared anew.

`python -m support.interpreted support.replayed` prints one JSON object for each change that happens on the way.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gefen_offload import Gefen
from gefen_offload.optim.fused.launch import Kernel, Scratch
from gefen_offload.ranks import identical
from support.simulated import SimulatedAccelerator, simulated

SHAPES = {"matrix": (8, 12), "bias": (12,), "late": (0,)}
STEPS, AT = 5, 2  # the change comes before step AT, counted from 0


class Training:
    """A few parameters with drawn gradients."""

    def __init__(self, options: dict[str, Any], *, apart: bool) -> None:
        self.draw = torch.Generator().manual_seed(5)
        self.named = {name: nn.Parameter(self.random(shape)) for name, shape in SHAPES.items()}
        pairs: list[Any] = list(self.named.items())
        groups = [{"params": [pair]} for pair in pairs] if apart else pairs
        self.optimizer = Gefen(groups, lr=0.02, fused=True, **options)
        self.offload = False
        self.without: dict[int, str] = {}  # steps on which a parameter has no gradient
        self.transposed: str | None = None
        self.negated = False  # gradients are views that negate, as autograd makes of an imaginary part

    def random(self, shape: Sequence[int]) -> Tensor:
        """Normal numbers."""
        return torch.randn(tuple(shape), generator=self.draw)

    @property
    def scratch(self) -> Scratch:
        """What the kernels share, once there has been a step."""
        return self.optimizer._updater_for(torch.device("cpu"))._shared.scratch  # type: ignore[attr-defined]

    def tensors(self) -> list[Tensor]:
        """The tensors of the state."""
        return [value for entry in self.optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]

    def step(self, step: int) -> dict[str, Tensor]:
        """One step; the parameters after it."""
        for name, parameter in self.named.items():
            gradient = self.random(parameter.shape)
            if name == self.transposed:
                gradient = gradient.t().contiguous().t()
            if self.negated:
                gradient = torch._neg_view(-gradient)
            parameter.grad = None if self.without.get(step) == name else gradient
        self.optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self.named.items()}


Change = Callable[[Training], None]


def _move_parameter(training: Training) -> None:
    training.named["matrix"].data = training.named["matrix"].data.clone()


def _move_state(training: Training) -> None:
    state = training.optimizer.state[training.named["matrix"]]
    state["m_codebook"] = state["m_codebook"].clone()


def _flatten_parameter(training: Training) -> None:
    training.named["matrix"].data = training.named["matrix"].data.flatten()


def _fill_parameter(training: Training) -> None:
    training.named["late"].data = training.random((4,))


def _replace_parameter(training: Training) -> None:
    optimizer, old = training.optimizer, training.named["bias"]
    new = training.named["bias"] = nn.Parameter(old.detach().clone())
    optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][1] = new


def _regroup(training: Training) -> None:
    first, second, *_ = training.optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    second["lr"] = 0.3


def _edit_counter(training: Training) -> None:
    training.optimizer.state[training.named["matrix"]]["step"] += 5


def _reload(training: Training) -> None:
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def _reverse(training: Training) -> None:
    training.optimizer.param_groups[0]["params"].reverse()
    training.optimizer.param_groups[0]["param_names"].reverse()


def _offload_again(training: Training) -> None:
    if training.offload:
        training.optimizer.restore_state_()
        training.optimizer.offload_state_()


def _interrupt_binding(training: Training) -> None:
    """A program is interrupted while it takes the scratch that has grown since."""
    bind, calls = Kernel.bind, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return bind(*arguments)

    training.scratch.fit(training.scratch.tensor.numel() + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "bind", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step()


def _options(**options: Any) -> Change:
    return lambda training: training.optimizer.param_groups[0].update(options)


@dataclass(frozen=True)
class Scenario:
    """What happens before step AT, and how many steps are then taken again, resident and offloaded."""

    id: str
    change: Change
    resident: int
    offloaded: int | None = None  # as resident
    options: tuple[tuple[str, Any], ...] = ()
    resident_only: bool = False
    apart: bool = False  # each parameter in a group of its own


SCENARIOS = (
    Scenario("nothing", lambda training: None, 4),
    Scenario("block-moment", lambda training: None, 4, options=(("factored_v_2d", False),)),
    Scenario("refresh", lambda training: None, 3, options=(("codebook_refresh_every", 3),)),
    Scenario("other-lr", _options(lr=0.07, eps=1e-3), 4),
    Scenario("decay-begins", _options(weight_decay=0.3), 4),
    Scenario("beta1-below-half", _options(beta1=0.3), 3),
    Scenario("parameter-moved", _move_parameter, 3),
    Scenario("state-moved", _move_state, 3, resident_only=True),
    Scenario("parameter-flattened", _flatten_parameter, 3),
    Scenario("parameter-filled", _fill_parameter, 3),
    Scenario("parameter-replaced", _replace_parameter, 3, resident_only=True),
    Scenario("regrouped", _regroup, 3, resident_only=True, apart=True),
    Scenario("binding-interrupted", _interrupt_binding, 4, resident_only=True),
    Scenario("counter-edited", _edit_counter, 3),
    Scenario("reloaded", _reload, 3),
    Scenario("order-reversed", _reverse, 3, resident_only=True),
    Scenario("offloaded-again", _offload_again, 4, 3),
    Scenario("one-left-out", lambda training: training.without.update({2: "bias", 4: "bias"}), 2),
    Scenario("gradient-transposed", lambda training: setattr(training, "transposed", "matrix"), 1),
    Scenario("gradient-negated", lambda training: setattr(training, "negated", True), 1),
)


def trained(scenario: Scenario, *, offload: bool, allowed: bool) -> tuple[list[Any], int, int]:
    """Every step's parameters and the state at the end, how many steps were taken again, and what was kept alive.

    Of the state, that is what the change replaced; of parameters and scratch, what is no longer in use at the end.
    """
    replay, again = Gefen._replay, 0

    def counting(optimizer: Gefen, keys: Sequence[object], gradients: Sequence[torch.Tensor]) -> bool:
        nonlocal again
        taken = allowed and replay(optimizer, keys, gradients)
        again += taken
        return taken

    with pytest.MonkeyPatch.context() as patch, simulated(SimulatedAccelerator()) if offload else nullcontext():
        patch.setattr(Gefen, "_replay", counting)
        training = Training(dict(scenario.options), apart=scenario.apart)
        if offload:
            training.offload = True
            training.optimizer.offload_state_()
        seen: list[Any] = []
        kept, others = 0, list(map(weakref.ref, (*training.named.values(), training.scratch.tensor)))
        for step in range(STEPS):
            if step == AT:
                tensors = list(map(weakref.ref, training.tensors()))
                scenario.change(training)
                training.negated &= allowed  # beside plain gradients of the same values
                kept = _kept(tensors, training.tensors())
            seen.append(training.step(step))
        state = training.optimizer.state_dict()["state"]
        return (
            [*seen, {position: {**entry} for position, entry in state.items()}],
            again,
            kept + _kept(others, [*training.named.values(), training.scratch.tensor]),
        )


def _kept(before: Sequence[weakref.ref[Tensor]], now: Sequence[Tensor]) -> int:
    """How many of the tensors there were before are alive and not among those there are now."""
    return sum(tensor is not None and all(tensor is not other for other in now) for tensor in (ref() for ref in before))


def compare(scenario: Scenario) -> dict[str, Any]:
    """Prepared anew, taken again, and streamed: how the last two differ from the first, and how often."""
    anew, none, _ = trained(scenario, offload=False, allowed=False)
    found: dict[str, Any] = {"id": scenario.id, "anew": none}
    for name, offload in (("resident", False), ("offloaded", True)):
        if not (offload and scenario.resident_only):
            seen, again, kept = trained(scenario, offload=offload, allowed=True)
            compared = identical(anew, seen)
            found[name] = {"again": again, "kept": kept, "difference": "" if compared else str(compared)}
    return found


if __name__ == "__main__":
    for each in SCENARIOS:
        print(json.dumps(compare(each)), flush=True)

"""Steps on interpreted kernels that are taken again as an earlier one, beside the same steps prepared anew.

`python -m support.interpreted support.replayed` prints one JSON object for each change that happens on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gefen_offload import Gefen
from gefen_offload.ranks import identical
from support.simulated import SimulatedAccelerator, simulated

SHAPES = {"matrix": (8, 12), "bias": (12,)}
STEPS, AT = 5, 2  # the change comes before step AT, counted from 0


class Training:
    """A few parameters with drawn gradients."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.draw = torch.Generator().manual_seed(5)
        self.named = {name: nn.Parameter(self.random(shape)) for name, shape in SHAPES.items()}
        self.optimizer = Gefen(list(self.named.items()), lr=0.02, fused=True, **options)
        self.offload = False
        self.without: dict[int, str] = {}  # steps on which a parameter has no gradient
        self.transposed: str | None = None

    def random(self, shape: Sequence[int]) -> Tensor:
        """Normal numbers."""
        return torch.randn(tuple(shape), generator=self.draw)

    def step(self, step: int) -> dict[str, Tensor]:
        """One step; the parameters after it."""
        for name, parameter in self.named.items():
            gradient = self.random(parameter.shape)
            if name == self.transposed:
                gradient = gradient.t().contiguous().t()
            parameter.grad = None if self.without.get(step) == name else gradient
        self.optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self.named.items()}


Change = Callable[[Training], None]


def _move_parameter(training: Training) -> None:
    training.named["matrix"].data = training.named["matrix"].data.clone()


def _move_state(training: Training) -> None:
    state = training.optimizer.state[training.named["matrix"]]
    state["m_codebook"] = state["m_codebook"].clone()


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


SCENARIOS = (
    Scenario("nothing", lambda training: None, 4),
    Scenario("block-moment", lambda training: None, 4, options=(("factored_v_2d", False),)),
    Scenario("refresh", lambda training: None, 3, options=(("codebook_refresh_every", 3),)),
    Scenario("other-lr", _options(lr=0.07, eps=1e-3), 4),
    Scenario("decay-begins", _options(weight_decay=0.3), 4),
    Scenario("beta1-below-half", _options(beta1=0.3), 3),
    Scenario("parameter-moved", _move_parameter, 3),
    Scenario("state-moved", _move_state, 3, resident_only=True),
    Scenario("counter-edited", _edit_counter, 3),
    Scenario("reloaded", _reload, 3),
    Scenario("order-reversed", _reverse, 3, resident_only=True),
    Scenario("offloaded-again", _offload_again, 4, 3),
    Scenario("one-left-out", lambda training: training.without.update({2: "bias", 4: "bias"}), 2),
    Scenario("gradient-transposed", lambda training: setattr(training, "transposed", "matrix"), 1),
)


def trained(scenario: Scenario, *, offload: bool, allowed: bool) -> tuple[list[Any], int]:
    """Every step's parameters and the state at the end, and how many steps were taken again."""
    replay, again = Gefen._replay, 0

    def counting(optimizer: Gefen, keys: Sequence[Tensor]) -> bool:
        nonlocal again
        taken = allowed and replay(optimizer, keys)
        again += taken
        return taken

    with pytest.MonkeyPatch.context() as patch, simulated(SimulatedAccelerator()) if offload else nullcontext():
        patch.setattr(Gefen, "_replay", counting)
        training = Training(dict(scenario.options))
        if offload:
            training.offload = True
            training.optimizer.offload_state_()
        seen: list[Any] = []
        for step in range(STEPS):
            if step == AT:
                scenario.change(training)
            seen.append(training.step(step))
        state = training.optimizer.state_dict()["state"]
        return [*seen, {position: {**entry} for position, entry in state.items()}], again


def compare(scenario: Scenario) -> dict[str, Any]:
    """Prepared anew, taken again, and streamed: how the last two differ from the first, and how often."""
    anew, none = trained(scenario, offload=False, allowed=False)
    found: dict[str, Any] = {"id": scenario.id, "anew": none}
    for name, offload in (("resident", False), ("offloaded", True)):
        if not (offload and scenario.resident_only):
            seen, again = trained(scenario, offload=offload, allowed=True)
            compared = identical(anew, seen)
            found[name] = {"again": again, "difference": "" if compared else str(compared)}
    return found


if __name__ == "__main__":
    for each in SCENARIOS:
        print(json.dumps(compare(each)), flush=True)

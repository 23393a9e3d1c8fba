"""What an optimizer holds, by bits and by identity: to show that a refused or failed operation changed nothing."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor

from support.streamed import Training, on_cpu


def bits(optimizer: Any) -> dict[str, Any]:
    """Parameters, state, groups and shared tensors, copied."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "parameters": on_cpu(list(parameters)),
        "state": [on_cpu(dict(optimizer.state.get(p, {}))) for p in parameters],
        "groups": [{k: on_cpu(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "shared": on_cpu(optimizer._shared_tensors()),
        "active": optimizer.state_offload_active,
        "poisoned": optimizer.state_offload_poisoned,
        "step": int(optimizer._global_step),
    }


def identities(optimizer: Any) -> list[int]:
    """The containers and tensors themselves."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = [optimizer.state.get(p) for p in parameters]
    tensors = [t for entry in entries if entry for t in entry.values() if isinstance(t, Tensor)]
    shared = list(optimizer._shared_tensors().values())
    things = [
        optimizer.state,
        optimizer.param_groups,
        *optimizer.param_groups,
        *parameters,
        *entries,
        *tensors,
        *shared,
    ]
    return [id(thing) for thing in things]


class Witness:
    """Remembers an optimizer and the memory in use, and checks that they have not changed."""

    def __init__(self, optimizer: Any, accelerator: Any) -> None:
        gc.collect()
        self.optimizer, self.accelerator = optimizer, accelerator
        self.bits, self.identities, self.held = bits(optimizer), identities(optimizer), accelerator.held

    def check(self) -> None:
        """Raise AssertionError if anything differs."""
        from gefen_offload.ranks import identical

        identical(self.bits, bits(self.optimizer)).check()
        assert identities(self.optimizer) == self.identities
        if self.accelerator.held != self.held:
            gc.collect()
        assert self.accelerator.held == self.held


def trained(row: Any, device: Any, steps: int, *, offload: bool) -> Training:
    """A training after some steps."""
    training = Training(row, device)
    for step in range(steps):
        training.step(step, offload)
    return training

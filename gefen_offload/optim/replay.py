"""Steps like an earlier one: the same parameters have gradients, and nothing but those and the counters has changed.

Everything that such a step would look up for each parameter was looked up then; what could have changed since is
compared for all of them at once. A step of a few hundred parameters then takes the host less time than the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from gefen_offload.offload.anchors import Anchors, addresses, anchor_of, same
from gefen_offload.offload.pieces import Again
from gefen_offload.optim.levels import Levels
from gefen_offload.optim.work import Work

if TYPE_CHECKING:
    from gefen_offload.optim.fused.program import Program
    from gefen_offload.optim.gefen import Gefen

KEPT = 4  # steps alternate between few sets of parameters with gradients


@dataclass(frozen=True)
class Layout:
    """What kernels were prepared for: where tensors lie, or only how they are aligned, and of what kind they are."""

    facts: tuple[list[Any], ...]

    @classmethod
    def of(cls, parameters: Sequence[Tensor], gradients: Sequence[Tensor], starts: Sequence[int]) -> Layout:
        """Of these tensors now; `starts` are the addresses of the gradients."""
        return cls(
            (
                addresses(parameters),
                (np.array(starts) & 15).tolist(),
                [p.dtype for p in parameters],
                [g.dtype for g in gradients],
                list(map(Tensor.numel, parameters)),
                list(map(Tensor.numel, gradients)),
                list(map(Tensor.get_device, gradients)),
            )
        )


def tight(tensors: Sequence[Tensor]) -> bool:
    """Whether all of them are dense and row-major."""
    try:
        return all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:  # sparse ones have no strides
        return False


def graded_keys(groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """The parameters with a gradient, in the groups' order."""
    return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]


class Replay:
    """One earlier step of the fused kernels, which can be taken again."""

    def __init__(self, optimizer: Gefen, keys: list[Tensor], works: Sequence[Work], program: Program, again: Again):
        """After the step over `works`, before it is counted; `keys` had a gradient, perhaps without an element."""
        self.again = again
        self._program = program
        self._keys = keys
        self._parameters = [work.parameter for work in works]
        self._groups = list(optimizer.param_groups)
        self._levels: Levels = optimizer._levels
        self._anchors: Anchors | None = None
        if not optimizer.state_offload_active:  # otherwise the session has its own
            self._anchors = anchor_of([], self._parameters, optimizer.state)
        gradients = [work.gradient for work in works]
        self._layout = Layout.of(self._parameters, gradients, addresses(gradients))
        sharing = {id(work.scalars): work for work in works}  # one of those that share hyper-parameters and age
        self._ages = [(work.group, work.state, optimizer._counters(work.factored)) for work in sharing.values()]
        self._counters = [
            (work.state, name, sharing[id(work.scalars)].state, their)
            for work in works
            for name, their in zip(
                optimizer._counters(work.factored),
                optimizer._counters(sharing[id(work.scalars)].factored),
                strict=True,
            )
        ]

    def matches(self, keys: Sequence[Tensor]) -> bool:
        """Whether it was a step over these parameters."""
        return same(keys, self._keys)

    def take(self, optimizer: Gefen) -> bool:
        """Take the step if it still is the same one; False, with nothing changed, if it is not."""
        gradients = [parameter.grad for parameter in self._parameters]
        if not self._stands(optimizer) or not tight(self._parameters) or not tight(gradients):  # type: ignore[arg-type]
            return False
        starts = addresses(gradients)  # type: ignore[arg-type]
        if Layout.of(self._parameters, gradients, starts) != self._layout:  # type: ignore[arg-type]
            return False
        scalars = [
            optimizer._read_scalars(group, state[names[0]] + 1, state[names[-1]] + 1)
            for group, state, names in self._ages
        ]
        if not self._program.renew(starts, scalars):
            return False
        self.again()
        for state, name, _, _ in self._counters:
            state[name] += 1
        return True

    def _stands(self, optimizer: Gefen) -> bool:
        return (
            self.again.valid
            and optimizer._levels is self._levels
            and same(optimizer.param_groups, self._groups)
            and all(state[name] == other[their] for state, name, other, their in self._counters)
            and (self._anchors is None or self._anchors.holds(self._parameters, optimizer.state))
        )

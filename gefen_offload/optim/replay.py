"""Steps like an earlier one: the same parameters have gradients, and nothing but those and the counters has changed.

Everything that such a step would look up for each parameter was looked up then; what could have changed since is
compared for all of them at once. A step of a few hundred parameters then takes the host less time than the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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
                [p.shape for p in parameters],
                list(map(Tensor.numel, gradients)),
                list(map(Tensor.get_device, gradients)),
            )
        )


def tight(tensors: Sequence[Tensor]) -> bool:
    """Whether all of them are dense and row-major, and their memory holds their values, not those negated."""
    try:
        return all(map(Tensor.is_contiguous, tensors)) and not any(map(Tensor.is_neg, tensors))
    except RuntimeError:  # sparse ones have no strides
        return False


def graded_keys(groups: Sequence[dict[str, Any]]) -> list[object]:
    """Each parameter with a gradient that has elements, after its group: in the groups' order."""
    graded = [(g, p) for g in groups for p in g["params"] if p.grad is not None and p.grad.numel()]
    return list(chain.from_iterable(graded))


def stepped_keys(works: Sequence[Work]) -> list[object]:
    """The same, of those that stepped; shards instead of sharded parameters."""
    return list(chain.from_iterable((work.group, work.parameter) for work in works))


class Replay:
    """One earlier step of the fused kernels, which can be taken again. It keeps neither gradients nor state alive."""

    def __init__(self, optimizer: Gefen, works: Sequence[Work], program: Program, again: Again):
        """After the step over `works`, before it is counted."""
        self._again = again
        self._program = program
        self._keys = stepped_keys(works)
        self._parameters = [work.parameter for work in works]
        self._levels: Levels = optimizer._levels
        self._anchors: Anchors | None = None
        if not optimizer.state_offload_active:  # otherwise the session has its own
            self._anchors = anchor_of([], self._parameters, optimizer.state)
        gradients = [work.gradient for work in works]
        self._layout = Layout.of(self._parameters, gradients, addresses(gradients))
        names = [optimizer._counters(work.factored) for work in works]
        sharing = {id(work.scalars): i for i, work in enumerate(works)}  # one that has its hyper-parameters and age
        self._ages = [(works[i].group, i, names[i]) for i in sharing.values()]
        others = [sharing[id(work.scalars)] for work in works]
        self._counters = [
            (i, name, other, their)
            for i, other in enumerate(others)
            for name, their in zip(names[i], names[other], strict=True)
        ]

    def matches(self, keys: Sequence[object]) -> bool:
        """Whether it was a step over these."""
        return same(keys, self._keys)

    def take(self, optimizer: Gefen) -> bool:
        """Take the step if it still is the same one; False, with nothing changed, if it is not."""
        gradients = [parameter.grad for parameter in self._parameters]
        if not self.stands(optimizer) or not tight(self._parameters) or not tight(gradients):  # type: ignore[arg-type]
            return False
        states = [optimizer.state[parameter] for parameter in self._parameters]
        if not all(states[i][name] == states[other][their] for i, name, other, their in self._counters):
            return False
        starts = addresses(gradients)  # type: ignore[arg-type]
        if Layout.of(self._parameters, gradients, starts) != self._layout:  # type: ignore[arg-type]
            return False
        scalars = [
            optimizer._read_scalars(group, states[i][names[0]] + 1, states[i][names[-1]] + 1)
            for group, i, names in self._ages
        ]
        if not self._program.renew(starts, scalars):
            return False
        self._again()
        for i, name, _, _ in self._counters:
            states[i][name] += 1
        return True

    def stands(self, optimizer: Gefen) -> bool:
        """Whether codebook and state are those it was prepared for, where they were."""
        return (
            self._again.valid
            and optimizer._levels is self._levels
            and (self._anchors is None or self._anchors.holds(self._parameters, optimizer.state))
        )

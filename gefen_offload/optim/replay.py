"""Steps like an earlier one: the same parameters have gradients, and nothing but those and the counters has changed.

Everything that such a step would look up for each parameter was looked up then; what could have changed since is
compared for all of them at once. A step of a few hundred parameters then takes the host less time than the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

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
                [start & 15 for start in starts],
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


def with_gradients(groups: Sequence[dict[str, Any]]) -> tuple[list[object], list[Tensor]]:
    """Each parameter with a gradient that has elements, after its group, in the groups' order; and these gradients."""
    found = [(group, parameter, parameter.grad) for group in groups for parameter in group["params"]]
    found = [each for each in found if each[2] is not None and each[2].numel()]
    keys = chain.from_iterable((group, parameter) for group, parameter, _ in found)
    return list(keys), [gradient for _, _, gradient in found]


def stepped_keys(works: Sequence[Work]) -> list[object]:
    """The same, of those that stepped; shards instead of sharded parameters."""
    return list(chain.from_iterable((work.group, work.parameter) for work in works))


@dataclass(frozen=True)
class Cohort:
    """Works that shared hyper-parameters and ages: the counters of all of them were equal, and have to be again."""

    group: dict[str, Any]
    members: list[tuple[tuple[str, ...], list[int]]]
    """The names of counters, and the positions of the works that have these."""

    def ages(self, states: Sequence[dict[str, Any]]) -> tuple[int, ...] | None:
        """The counters of all of them; None if some differ."""
        found = [row for names, positions in self.members for row in map(itemgetter(*names), _at(states, positions))]
        return found[0] if found.count(found[0]) == len(found) else None

    def advance(self, states: Sequence[dict[str, Any]], ages: tuple[int, ...]) -> None:
        """Count one more step, after those of `ages`."""
        for names, positions in self.members:
            later = dict(zip(names, (age + 1 for age in ages), strict=True))
            for state in _at(states, positions):
                state.update(later)


def cohorts(works: Sequence[Work], names: Sequence[tuple[str, ...]]) -> list[Cohort]:
    """The works by whose hyper-parameters they have; `names` are the counters of each work, two at least."""
    found: dict[int, Cohort] = {}
    for position, work in enumerate(works):
        cohort = found.setdefault(id(work.scalars), Cohort(work.group, []))
        for known, positions in cohort.members:
            if known == names[position]:
                positions.append(position)
                break
        else:
            cohort.members.append((names[position], [position]))
    return list(found.values())


def _at(states: Sequence[dict[str, Any]], positions: Sequence[int]) -> Iterator[dict[str, Any]]:
    return map(states.__getitem__, positions)


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
        self._cohorts = cohorts(works, [optimizer._counters(work.factored) for work in works])

    def matches(self, keys: Sequence[object]) -> bool:
        """Whether it was a step over these."""
        return same(keys, self._keys)

    def take(self, optimizer: Gefen, gradients: Sequence[Tensor]) -> bool:
        """Take the step if it still is the same one; False, with nothing changed, if it is not."""
        if not self.stands(optimizer) or not tight(self._parameters) or not tight(gradients):
            return False
        states = list(map(optimizer.state.__getitem__, self._parameters))
        ages = [cohort.ages(states) for cohort in self._cohorts]
        if None in ages:
            return False
        starts = addresses(gradients)
        if Layout.of(self._parameters, gradients, starts) != self._layout:
            return False
        scalars = [
            optimizer._read_scalars(cohort.group, age[0] + 1, age[-1] + 1)  # type: ignore[index]
            for cohort, age in zip(self._cohorts, ages, strict=True)
        ]
        if not self._program.renew(starts, scalars):
            return False
        self._again()
        for cohort, age in zip(self._cohorts, ages, strict=True):
            cohort.advance(states, age)  # type: ignore[arg-type]
        return True

    def stands(self, optimizer: Gefen) -> bool:
        """Whether codebook and state are those it was prepared for, where they were."""
        return (
            self._again.valid
            and optimizer._levels is self._levels
            and (self._anchors is None or self._anchors.holds(self._parameters, optimizer.state))
        )

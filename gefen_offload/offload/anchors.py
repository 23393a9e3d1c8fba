"""What an optimizer's state was when it was last looked at, so that a change behind its back costs little to notice."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch import Tensor


def same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether both hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


@dataclass(frozen=True)
class Anchors:
    """Every parameter of every group, its type, its state and the state's tensors, by identity and address.

    [Note: cost] They are compared on every step, so each question is put to all parameters in one go.

    The state is not kept alive: whoever moves or drops it frees its memory then.
    """

    lengths: list[int]
    parameters: list[Tensor]
    kinds: list[type]
    sizes: list[int]  # of each state; -1 for none
    owners: list[int]  # of `tensors`, as positions of parameters, with their `names`
    names: list[str]
    tensors: list[weakref.ref[Tensor]]
    addresses: list[int]

    def hold(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any], usable: Callable[[Tensor], bool]
    ) -> bool:
        """Whether groups and state are those seen then, and every parameter is still `usable`. O(parameters)."""
        return (
            [len(group["params"]) for group in groups] == self.lengths
            and not any(group.get("capturable") for group in groups)
            and self.holds([parameter for group in groups for parameter in group["params"]], state)
            and all(map(usable, self.parameters))
        )

    def holds(self, parameters: Sequence[Tensor], state: Mapping[Tensor, Any]) -> bool:
        """Whether these are the parameters, and neither their state nor its tensors were replaced or moved."""
        entries: list[Any] = list(map(state.get, parameters))
        if not (
            same(parameters, self.parameters)
            and same(list(map(type, parameters)), self.kinds)
            and _sizes(entries) == self.sizes
        ):
            return False
        tensors: list[Any] = list(map(dict.get, map(entries.__getitem__, self.owners), self.names))
        seen = [tensor() for tensor in self.tensors]
        alive = all(map(operator.is_not, seen, repeat(None)))
        return alive and same(tensors, seen) and addresses(tensors) == self.addresses


def _sizes(entries: Sequence[Any]) -> list[int]:
    return [len(entry) if isinstance(entry, dict) else -1 for entry in entries]


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where they lie."""
    return list(map(Tensor.data_ptr, tensors))


def anchor(groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> Anchors:
    """What there is now."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return anchor_of([len(group["params"]) for group in groups], parameters, state)


def anchor_of(lengths: list[int], parameters: list[Tensor], state: Mapping[Tensor, Any]) -> Anchors:
    """As `anchor`, for groups of these lengths."""
    entries = list(map(state.get, parameters))
    there = [(position, entry) for position, entry in enumerate(entries) if isinstance(entry, dict)]
    held = [
        (position, name, value)
        for position, entry in there
        for name, value in entry.items()
        if isinstance(value, Tensor)
    ]
    return Anchors(
        lengths,
        parameters,
        list(map(type, parameters)),
        _sizes(entries),
        [position for position, _, _ in held],
        [name for _, name, _ in held],
        [weakref.ref(tensor) for _, _, tensor in held],
        addresses(tensor for _, _, tensor in held),
    )

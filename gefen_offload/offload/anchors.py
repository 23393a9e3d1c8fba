"""What an optimizer's state was when it was last looked at, so that a change behind its back costs little to notice."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether both hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


@dataclass(frozen=True)
class Anchors:
    """Every parameter of every group, its type, its state and the state's tensors, by identity and address.

    [Note: cost] They are compared on every step, so each question is put to all parameters in one go.
    """

    lengths: list[int]
    parameters: list[Tensor]
    kinds: list[type]
    entries: list[dict[str, Any] | None]
    sizes: list[int]
    owners: list[dict[str, Any]]  # of `tensors`, with their `names`
    names: list[str]
    tensors: list[Tensor]
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
        return (
            same(parameters, self.parameters)
            and same(list(map(type, parameters)), self.kinds)
            and same(list(map(state.get, parameters)), self.entries)
            and [len(entry) for entry in self.entries if entry is not None] == self.sizes
            and same(list(map(dict.get, self.owners, self.names)), self.tensors)
            and addresses(self.tensors) == self.addresses
        )


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where they lie."""
    return list(map(Tensor.data_ptr, tensors))


def anchor(groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> Anchors:
    """What there is now."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return anchor_of([len(group["params"]) for group in groups], parameters, state)


def anchor_of(lengths: list[int], parameters: list[Tensor], state: Mapping[Tensor, Any]) -> Anchors:
    """As `anchor`, for groups of these lengths."""
    entries = [entry if isinstance(entry, dict) else None for entry in map(state.get, parameters)]
    there = [entry for entry in entries if entry is not None]
    held = [(entry, name, value) for entry in there for name, value in entry.items() if isinstance(value, Tensor)]
    return Anchors(
        lengths,
        parameters,
        list(map(type, parameters)),
        entries,
        [len(entry) for entry in there],
        [entry for entry, _, _ in held],
        [name for _, name, _ in held],
        [tensor for _, _, tensor in held],
        addresses(tensor for _, _, tensor in held),
    )

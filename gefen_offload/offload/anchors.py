"""What offload saw when it last looked at the optimizer, so that a change behind its back costs little to notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Anchor:
    """One parameter, its type, its state and the state's tensors, by identity and address."""

    parameter: Tensor
    kind: type
    state: dict[str, Any] | None
    size: int
    tensors: tuple[tuple[str, Tensor, int], ...]

    def holds(self, parameter: Tensor, state: Mapping[Tensor, Any]) -> bool:
        """Whether nothing of it was replaced."""
        entry = state.get(parameter)
        if parameter is not self.parameter or type(parameter) is not self.kind or entry is not self.state:
            return False
        if entry is None:
            return True
        if len(entry) != self.size:
            return False
        return all(entry.get(name) is tensor and tensor.data_ptr() == address for name, tensor, address in self.tensors)


@dataclass(frozen=True)
class Anchors:
    """Every parameter of every group."""

    groups: tuple[tuple[Anchor, ...], ...]

    def hold(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any], usable: Callable[[Tensor], bool]
    ) -> bool:
        """Whether groups and state are those seen then, and every parameter is still `usable`. O(parameters)."""
        if len(groups) != len(self.groups):
            return False
        for group, anchors in zip(groups, self.groups, strict=True):
            parameters = group["params"]
            if len(parameters) != len(anchors) or group.get("capturable"):
                return False
            for parameter, anchor in zip(parameters, anchors, strict=True):
                if not (anchor.holds(parameter, state) and usable(parameter)):
                    return False
        return True


def anchor(groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> Anchors:
    """What there is now."""
    return Anchors(tuple(tuple(_anchor(p, state.get(p)) for p in group["params"]) for group in groups))


def _anchor(parameter: Tensor, entry: Any) -> Anchor:
    if not isinstance(entry, dict):
        return Anchor(parameter, type(parameter), None, 0, ())
    tensors = tuple((name, value, value.data_ptr()) for name, value in entry.items() if isinstance(value, Tensor))
    return Anchor(parameter, type(parameter), entry, len(entry), tensors)

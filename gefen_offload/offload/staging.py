"""Complete, validated copies of state, made beside the live one without touching it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gefen_offload.offload.accelerator import Accelerator, Pair, transfer
from gefen_offload.offload.pieces import Shapes
from gefen_offload.offload.slab import HostStore

States = Sequence[Mapping[str, Tensor]]


class StagingError(RuntimeError):
    """A staged copy is not what it should be; nothing was committed."""


def stage_on_host(states: States, accelerator: Accelerator, store: HostStore) -> list[dict[str, Tensor]]:
    """Copies in one slab of `store`, in their own dtypes; complete when this returns."""
    copies = store.zeros([shapes_of(state) for state in states])
    _fill(copies, states, accelerator)
    for copy in _tensors(copies):
        if copy.numel() and store.find(copy) is None:
            raise StagingError(f"a host copy of {tuple(copy.shape)} {copy.dtype} is not a tight part of its slab")
    return copies


def stage_on_device(states: States, accelerator: Accelerator) -> list[dict[str, Tensor]]:
    """Copies on the accelerator's device, in their own dtypes; complete when this returns."""
    with accelerator.scope():
        copies = [{name: accelerator.empty(t.shape, t.dtype) for name, t in state.items()} for state in states]
        _fill(copies, states, accelerator)
    for copy in _tensors(copies):
        if copy.device != accelerator.device:
            raise StagingError(f"a copy meant for {accelerator.device} is on {copy.device}")
    return copies


def _fill(copies: Sequence[dict[str, Tensor]], states: States, accelerator: Accelerator) -> None:
    pairs: list[Pair] = []
    for copy, state in zip(copies, states, strict=True):
        pairs += [(copy[name], tensor.detach()) for name, tensor in state.items() if tensor.numel()]
    transfer(accelerator, pairs)
    validate(copies, states)


def validate(copies: States, states: States) -> None:
    """Raise StagingError unless every copy is a tight tensor of its own storage, shaped and typed as its source."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in _tensors(states) if tensor.numel()}
    for copy, state in zip(copies, states, strict=True):
        for name, tensor in copy.items():
            source = state[name]
            wrong = _wrong(tensor, source)
            if wrong is not None:
                raise StagingError(f"the staged copy of {name} {tuple(source.shape)} {wrong}")
            address = tensor.untyped_storage().data_ptr()
            if tensor.numel() and address in seen:
                raise StagingError(f"the staged copy of {name} {tuple(source.shape)} shares its storage")
            seen.add(address)


def _wrong(copy: Tensor, source: Tensor) -> str | None:
    if copy.dtype is not source.dtype or copy.shape != source.shape:
        return f"is {tuple(copy.shape)} {copy.dtype} instead of {tuple(source.shape)} {source.dtype}"
    if copy.requires_grad or copy.grad is not None or copy.grad_fn is not None:
        return "carries a gradient"
    if copy.numel() and not copy.is_contiguous():
        return "is not contiguous"
    if copy.numel() and copy.untyped_storage().nbytes() != copy.numel() * copy.element_size():
        return "does not fill its storage"
    return None


def _tensors(states: States) -> list[Tensor]:
    return [tensor for state in states for tensor in state.values()]


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    """The shapes and dtypes of state tensors."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def tensors_of(entry: Any) -> dict[str, Tensor]:
    """The tensors among a parameter's state entries."""
    if not isinstance(entry, dict):
        return {}
    return {name: value for name, value in entry.items() if isinstance(value, Tensor)}


def replaced(state: Mapping[Any, Any], copies: Mapping[Any, Mapping[str, Tensor]]) -> defaultdict[Any, Any]:
    """A new state in which these parameters have these tensors, and everything else is as it was."""
    new: defaultdict[Any, Any] = defaultdict(dict)
    for key, entry in state.items():
        new[key] = {**entry, **copies[key]} if key in copies else entry
    return new

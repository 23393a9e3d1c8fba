"""Parameter groups: their options, and the names of their parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gefen_offload.optim import fused

NAME_PREFIX = "_gefen_name_prefix"  # how the constructor tells add_param_group that the caller gave no groups
GROUP_OPTIONS = ("lr", "beta1", "beta2", "eps", "weight_decay")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise a ValueError naming the option, and its value, where one of a group's is missing or out of range."""
    for name in GROUP_OPTIONS:
        if name not in options:
            raise ValueError(f"the parameter group has no {name!r}")
    check_lr(options["lr"])
    for name in ("beta1", "beta2"):
        check_number(name, options[name], least=0.0, below=1.0)
    check_number("eps", options["eps"], above=0.0)
    check_number("weight_decay", options["weight_decay"], least=0.0)


def check_lr(lr: object) -> None:
    """Raise where `lr` is neither a number nor a 1-element tensor, or is negative or not finite."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; a tensor lr has exactly one element")
        lr = float(lr)
    check_number("lr", lr, least=0.0)


def check_number(
    name: str, value: object, *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> None:
    """Raise where `value` is not a finite number with least <= value, above < value < below."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, not {value!r}")
    if math.isfinite(value) and value >= least and above < value < below:
        return
    wanted = " and ".join(
        f"{sign} {bound:g}" for sign, bound in ((">=", least), (">", above), ("<", below)) if math.isfinite(bound)
    )
    raise ValueError(f"{name} must be finite and {wanted or 'a number'}, not {value!r}")


def split_betas(group: dict[str, Any]) -> dict[str, Any]:
    """The group with a `betas` pair, if it has one, written as `beta1` and `beta2`."""
    if "betas" not in group:
        return dict(group)
    beta1, beta2 = pair(group["betas"])
    return {"beta1": beta1, "beta2": beta2, **{key: value for key, value in group.items() if key != "betas"}}


def pair(betas: Any) -> tuple[float, float]:
    """The two of `betas`; raises where it is no pair."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be a pair of numbers, not {betas!r}")
    return betas[0], betas[1]


def fragments(substrings: Iterable[str]) -> tuple[str, ...]:
    """What `period_one_substrings` lists, in lower case; a single string is one of them."""
    wrong = TypeError(f"period_one_substrings must list strings, not {substrings!r}")
    if not isinstance(substrings, Iterable):
        raise wrong
    listed = (substrings,) if isinstance(substrings, str) else tuple(substrings)
    if not all(isinstance(each, str) for each in listed):
        raise wrong
    return tuple(each.lower() for each in listed)


def named(parameters: Tensor | Iterable[Any], prefix: str) -> tuple[list[Tensor], list[str], list[bool]]:
    """The tensors, their names, and which of the names were made up (`prefix` and the position).

    `parameters` is a tensor, or tensors and (name, tensor) pairs in an ordered collection.
    """
    if isinstance(parameters, (set, frozenset)):
        raise TypeError("parameters must come in an ordered collection: a set's order changes between runs; use a list")
    items: Sequence[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    tensors, names, made_up = [], [], []
    for position, item in enumerate(items):
        if isinstance(item, tuple) and len(item) != 2:
            raise TypeError(f"parameter {position} is a tuple of {len(item)}; give tensors or (name, tensor) pairs")
        name, tensor = item if isinstance(item, tuple) else (None, item)
        name = f"{prefix}param_{position}" if name is None else name
        _check_parameter(tensor, name)
        tensors.append(tensor)
        names.append(name)
        made_up.append(not isinstance(item, tuple))
    return tensors, names, made_up


def _check_parameter(tensor: object, name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a parameter's name must be a string, not {name!r}")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; Gefen optimizes tensors")
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        wanted = "float16, bfloat16, float32 or float64"
        raise TypeError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}; Gefen takes {wanted}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} has the layout {tensor.layout}; Gefen takes dense parameters")


def check_distinct(new: Sequence[tuple[str, Tensor]], old: Iterable[Tensor]) -> None:
    """Raise where a parameter comes twice; a tied one belongs in once, under one of its names."""
    old = list(old)
    seen = {id(tensor): "an earlier group" for tensor in old}
    for name, tensor in new:
        if id(tensor) in seen:
            raise ValueError(
                f"{name} is also in {seen[id(tensor)]}: some parameters appear in more than one parameter group or "
                "position; pass a tied parameter once"
            )
        seen[id(tensor)] = f"this group as {name}"
    _check_apart([*new, *(("a parameter of an earlier group", tensor) for tensor in old)])


def _check_apart(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise where two parameters lie on the same memory: one step would update it twice, in no set order."""
    extents: list[tuple[int, int, str]] = []
    strided: dict[tuple[Any, ...], str] = {}
    for name, tensor in parameters:
        extent = _extent(tensor)
        if extent is not None:
            extents.append((*extent, name))
        elif (view := _strided(tensor)) is not None:
            if view in strided:
                raise _on_same_memory(strided[view], name)
            strided[view] = name
    for (_, end, one), (start, _, other) in pairwise(sorted(extents)):
        if start < end:
            raise _on_same_memory(one, other)


def _on_same_memory(one: str, other: str) -> ValueError:
    return ValueError(
        f"{one} and {other} are different parameters on the same memory; tie them by using one nn.Parameter in both "
        "places, and pass it once"
    )


def _extent(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses that a plain contiguous tensor covers; None for any other, and for one without memory."""
    if type(tensor) not in (Tensor, Parameter) or tensor.is_meta or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or not tensor.data_ptr():
        return None
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _strided(tensor: Tensor) -> tuple[Any, ...] | None:
    """Where the elements of a plain tensor lie that is not contiguous; None for any other."""
    if type(tensor) not in (Tensor, Parameter) or tensor.is_meta or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or tensor.is_contiguous() or not tensor.data_ptr():
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """The groups that the constructor was given; a plain list of parameters is one group without a number."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of tensors, (name, tensor) pairs or dicts, not a single tensor")
    items = params if isinstance(params, (set, frozenset)) else list(params)
    if len(items) == 0:
        raise ValueError("the optimizer got an empty parameter list")
    if isinstance(items, list) and isinstance(items[0], dict):
        return items
    return [{"params": items, NAME_PREFIX: ""}]


def own_names(group: dict[str, Any]) -> list[str | None]:
    """The names that the caller gave; None for made-up ones, and throughout where a wrapper replaced the parameters."""
    names = group.get("param_names", [])
    made_up = group.get("param_names_synthesized", [True] * len(names))
    if len(names) != len(group["params"]):
        return [None] * len(group["params"])
    return [None if synthetic else name for name, synthetic in zip(names, made_up, strict=True)]


def require_kernels(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise, for `fused=True`, where the fused kernels cannot step one of these (name, tensor) pairs."""
    for name, tensor in parameters:
        reason = fused.why_not(tensor.device, tensor.dtype)
        if reason is not None:
            raise ValueError(f"fused=True, but the fused kernels cannot step {name}: {reason}; leave fused at None")

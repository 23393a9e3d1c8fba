"""torch's AdamW as a backup: what a checkpoint of it must hold, and moving its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def check_state_dict(state_dict: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise a ValueError naming the entry where the checkpoint does not fit AdamW's parameters. Changes nothing.

    torch itself looks only at the number of groups and parameters.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the checkpoint's backup part has no {key!r}: it is not an AdamW state_dict()")
    saved = state_dict["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint's backup has {len(saved)} parameter groups, this optimizer's {len(optimizer.param_groups)}"
        )
    for index, (theirs, ours) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        _check_group(theirs, ours, f"group {index} of the checkpoint's backup")
        for position, (key, parameter) in enumerate(zip(theirs["params"], ours["params"], strict=True)):
            _check_entry(state_dict["state"].get(key, {}), parameter, _name(ours, position))


def stage_move(optimizer: Optimizer, device: torch.device | str | None) -> Callable[[], None]:
    """Copy the moments that are not beside their parameters there; calling what this returns puts them in place.

    Raises a ValueError where `device` is given and a parameter is elsewhere.
    """
    if device is not None:
        target = torch.empty(0, device=device).device
        elsewhere = {p.device for group in optimizer.param_groups for p in group["params"]} - {target}
        if elsewhere:
            raise ValueError(f"move_state_({str(device)!r}): parameters are on {sorted(map(str, elsewhere))}")
    staged = [
        (entry, name, entry[name].to(parameter.device))
        for parameter, entry in optimizer.state.items()
        for name in (*MOMENTS, "max_exp_avg_sq")
        if name in entry and entry[name].device != parameter.device
    ]

    def commit() -> None:
        for entry, name, tensor in staged:
            entry[name] = tensor

    return commit


def _check_group(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> None:
    for option in ("lr", "betas", "eps", "weight_decay"):
        if option not in theirs:
            raise ValueError(f"{where} has no {option!r}")
    if len(theirs["params"]) != len(ours["params"]):
        raise ValueError(f"{where} has {len(theirs['params'])} parameters, this optimizer's {len(ours['params'])}")
    names = theirs.get("param_names")
    if names is not None and "param_names" in ours and list(names) != list(ours["param_names"]):
        first = next((a, b) for a, b in zip(names, ours["param_names"], strict=False) if a != b)
        raise ValueError(f"{where} has {first[0]!r} where this optimizer has {first[1]!r}")


def _check_entry(entry: Mapping[str, Any], parameter: Tensor, name: str) -> None:
    if not entry:
        return
    if "step" not in entry:
        raise ValueError(f"the checkpoint's backup state of {name} has no 'step'")
    for moment in MOMENTS:
        value = entry.get(moment)
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(
                f"the checkpoint's backup state of {name}: {moment} must be a tensor of shape "
                f"{tuple(parameter.shape)}, not {found!r}"
            )
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"the checkpoint's backup state of {name}: {moment} holds an infinity or a NaN")


def _name(group: Mapping[str, Any], position: int) -> str:
    names = group.get("param_names", ())
    return str(names[position]) if position < len(names) else f"parameter {position}"

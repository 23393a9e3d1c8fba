"""Checkpoints: what `state_dict()` holds, and the reading of one, which checks everything and changes nothing.

Per parameter: `name`; and once it has stepped, `automatic_period` p and `step`, `m_codebook` uint8 (n/p, p),
`m_magnitude` float32 (n/p, 1), and a second moment with its age: `vmean` float32 (n/p, 1) and `vmean_step`, or `v_row`
(rows,) and `v_col` (cols,), float32, and `factored_step`; both after a change of mode. The header, codebook and step
count, stands at the top level and again in every group, since torch.distributed.checkpoint drops the top level. State
of sharded parameters is this rank's, and the group then says which shards it is of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gefen_offload.optim.codebook import LEVELS
from gefen_offload.optim.shard import is_sharded, shard_tag

METADATA = "_gefen_checkpoint_metadata"
SHARDS = "_gefen_shards"
FORMAT_VERSION = 1

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

# --- shapes ---------------------------------------------------------------------------------------------------------


def momentum_shapes(shape: torch.Size, period: int) -> Shapes:
    """The quantised momentum's tensors for a parameter of `shape`."""
    blocks = shape.numel() // period
    return {"m_codebook": ((blocks, period), torch.uint8), "m_magnitude": ((blocks, 1), torch.float32)}


def block_shapes(shape: torch.Size, period: int) -> Shapes:
    """The block second moment's tensor."""
    return {"vmean": ((shape.numel() // period, 1), torch.float32)}


def factor_shapes(shape: torch.Size, period: int) -> Shapes:
    """The factored second moment's tensors, for a matrix."""
    rows, cols = shape
    return {"v_row": ((rows,), torch.float32), "v_col": ((cols,), torch.float32)}


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """What all parameters share."""

    codebook: Tensor | None
    global_step: int


@dataclass(frozen=True)
class Entries:
    """The checked state of one parameter; `tensors` are still the checkpoint's."""

    plain: dict[str, Any]
    counters: dict[str, int]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Moment:
    """A second moment that state may hold: the name of its age, and its tensors' shapes for a shape and a period."""

    age: str
    shapes: Callable[[torch.Size, int], Shapes]
    matrices_only: bool = False


@dataclass(frozen=True)
class Target:
    """One parameter that a checkpoint is read for."""

    name: str
    shape: torch.Size
    trainable: bool
    shard: dict[str, Any] | None = None


@dataclass(frozen=True)
class Expected:
    """The optimizer that a checkpoint is read for."""

    optimizer: str
    groups: Sequence[Sequence[Target]]
    names: Sequence[Sequence[str | None]]  # the caller's own; None where a name was made up
    moments: tuple[Moment, ...]
    check_group: Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that passed every check: groups without `params`, and each parameter's entries in their order."""

    header: Header
    groups: list[dict[str, Any]]
    entries: list[Entries]


# --- writing --------------------------------------------------------------------------------------------------------


def pack(
    groups: Sequence[Mapping[str, Any]], states: Mapping[int, Mapping[str, Any]], header: Header
) -> dict[str, Any]:
    """The state dict of these groups, in which `states` are keyed by the parameter's position."""
    packed, position = [], 0
    for group in groups:
        count = len(group["params"])
        body = {key: list(value) if isinstance(value, list) else value for key, value in group.items()}
        if len(body.get("param_names", ())) != count:  # a wrapper replaced the parameters: the names are not theirs
            body = {key: value for key, value in body.items() if key not in ("param_names", "param_names_synthesized")}
        body["params"] = list(range(position, position + count))
        body[METADATA] = _metadata(header, group["params"])
        shards = [shard_tag(p) if is_sharded(p) else None for p in group["params"]]
        if any(shards):
            body[SHARDS] = shards
        packed.append(body)
        position += count
    return {
        "state": dict(states),
        "param_groups": packed,
        "gefen_global_step": header.global_step,
        "gefen_deterministic": False,
        "gefen_codebook": header.codebook,
    }


def _metadata(header: Header, parameters: Sequence[Tensor]) -> dict[str, Any]:
    device = parameters[0].device if parameters else torch.device("cpu")
    return {
        "format_version": FORMAT_VERSION,
        "global_step": header.global_step,
        "codebook": header.codebook,
        "deterministic": False,
        "device_anchor": torch.zeros(1, dtype=torch.uint8, device=device),
    }


def cloned(value: Any) -> Any:
    """The same containers and plain values with a copy of each tensor."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    return [cloned(item) for item in value] if isinstance(value, list) else value


def warn_if_not_finite(states: Iterable[Mapping[str, Any]]) -> None:
    """Warn, naming the parameters, where a float state tensor holds an infinity or a NaN: such state does not load."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for state in states:
        for tensor in state.values():
            if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point and tensor.dim():
                by_device.setdefault(tensor.device, []).append((state["name"], tensor.isfinite().all()))
    broken: dict[str, None] = {}
    for checks in by_device.values():
        finite = torch.stack([ok for _, ok in checks]).tolist()
        broken.update({name: None for (name, _), ok in zip(checks, finite, strict=True) if not ok})
    if broken:
        shown = ", ".join(list(broken)[:8]) + (f" and {len(broken) - 8} more" if len(broken) > 8 else "")
        warnings.warn(
            f"the optimizer state of {shown} is not finite, as a gradient was not; it will be refused on loading",
            stacklevel=3,
        )


# --- reading --------------------------------------------------------------------------------------------------------


def read(state_dict: Mapping[str, Any], expected: Expected) -> Loaded:
    """Check a checkpoint against the optimizer it is for. Raises a ValueError that names the entry that is wrong."""
    check_containers(state_dict, expected.optimizer)
    groups = state_dict["param_groups"]
    keys = _match_groups(groups, expected)
    header = _read_header(state_dict, groups)
    states = state_dict["state"]
    targets = [target for group in expected.groups for target in group]
    listed = set(keys)
    unknown = [key for key in states if key not in listed]
    if unknown:
        raise ValueError(f"the checkpoint has state for {unknown[0]!r}, which none of its groups lists")
    entries = [_read_entries(states.get(key), target, expected) for key, target in zip(keys, targets, strict=True)]
    for target, entry in zip(targets, entries, strict=True):
        if entry.tensors and header.codebook is None:
            raise ValueError(f"the checkpoint has indices for {target.name} but no codebook (gefen_codebook)")
    return Loaded(header, [_read_group(group, i, expected) for i, group in enumerate(groups)], entries)


def check_containers(state_dict: Any, optimizer: str) -> None:
    """Raise where a dict or a list is something else, or lists something else."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"a {type(state_dict).__name__} is not a {optimizer} state_dict()")
    kinds: dict[str, tuple[type, ...]] = {"state": (Mapping,), "param_groups": (list, tuple)}
    for key, allowed in kinds.items():
        if key not in state_dict:
            raise ValueError(f"the checkpoint has no {key!r}: it is not a {optimizer} state_dict()")
        if not isinstance(state_dict[key], allowed):
            raise ValueError(f"{key!r} of the checkpoint cannot be a {type(state_dict[key]).__name__}")
    lists: dict[str, tuple[type, ...]] = {
        "params": (int, str),
        "param_names": (str,),
        "param_names_synthesized": (bool,),
    }
    for index, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping):
            raise ValueError(f"group {index} of the checkpoint must be a dict, not a {type(group).__name__}")
        for key, items in lists.items():
            value = group.get(key)
            if value is None:
                continue
            if not isinstance(value, (list, tuple)) or not all(isinstance(item, items) for item in value):
                raise ValueError(f"{key!r} of group {index} of the checkpoint is not the list it should be: {value!r}")


def _match_groups(groups: Sequence[Mapping[str, Any]], expected: Expected) -> list[Any]:
    """The checkpoint's key for each parameter, in the optimizer's order."""
    if len(groups) != len(expected.groups):
        raise ValueError(f"the checkpoint has {len(groups)} parameter groups, this optimizer {len(expected.groups)}")
    keys: list[Any] = []
    for index, (group, targets, names) in enumerate(zip(groups, expected.groups, expected.names, strict=True)):
        saved = group.get("params")
        if saved is None or len(saved) != len(targets):
            count = "no" if saved is None else len(saved)
            raise ValueError(f"group {index} of the checkpoint has {count} parameters, this optimizer's {len(targets)}")
        _match_names(group, names, index)
        _match_shards(group, targets, index)
        keys.extend(saved)
    if len(set(keys)) != len(keys):
        raise ValueError("the checkpoint's groups list a parameter twice")
    return keys


def _match_names(group: Mapping[str, Any], names: Sequence[str | None], index: int) -> None:
    """Refuse another order or another model, where both sides have names of the caller's."""
    saved = group.get("param_names")
    if saved is None:
        return
    made_up = group.get("param_names_synthesized") or [False] * len(saved)
    if len(saved) != len(names) or len(made_up) != len(names):
        raise ValueError(f"group {index} of the checkpoint has {len(saved)} param_names for {len(names)} parameters")
    for position, (theirs, synthetic, ours) in enumerate(zip(saved, made_up, names, strict=True)):
        if synthetic or ours is None or _bare(theirs) == _bare(ours):
            continue
        raise ValueError(
            f"parameter {position} of group {index} is {theirs!r} in the checkpoint and {ours!r} here: pass the "
            "parameters in the order they were saved in"
        )


def _match_shards(group: Mapping[str, Any], targets: Sequence[Target], index: int) -> None:
    """Refuse shards of another topology or rank: state in blocks of a shard cannot be put together again."""
    saved = group.get(SHARDS) or [None] * len(targets)
    if len(saved) != len(targets):
        raise ValueError(f"group {index} of the checkpoint has {len(saved)} {SHARDS} for {len(targets)} parameters")
    for theirs, target in zip(saved, targets, strict=True):
        if theirs != target.shard:
            raise ValueError(
                f"the checkpoint's state of {target.name} is of {_shard_words(theirs)}, and this rank holds "
                f"{_shard_words(target.shard)}: sharded state is rank-local, so save and load one file a rank, on the "
                "same topology"
            )


def _shard_words(shard: Mapping[str, Any] | None) -> str:
    if shard is None:
        return "the whole parameter"
    return (
        f"the shard {shard.get('local_shape')} of {shard.get('shape')} at {shard.get('coordinate')} of the mesh "
        f"{shard.get('mesh')}, placed {shard.get('placements')}"
    )


def _bare(name: str) -> str:
    """A parameter's name without the prefixes that wrappers add."""
    for prefix in ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(prefix, "")
    return name


def _read_group(group: Mapping[str, Any], index: int, expected: Expected) -> dict[str, Any]:
    """The group's options, checked, copied, and with the caller's own names where there are any."""
    options = {key: cloned(value) for key, value in group.items() if key not in ("params", METADATA, SHARDS)}
    try:
        expected.check_group(options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"group {index} of the checkpoint: {error}") from error
    names = expected.names[index]
    saved = options.get("param_names") or [target.name for target in expected.groups[index]]
    made_up = options.get("param_names_synthesized") or [False] * len(names)
    options["param_names"] = [ours or theirs for ours, theirs in zip(names, saved, strict=True)]
    options["param_names_synthesized"] = [
        ours is None and synthetic for ours, synthetic in zip(names, made_up, strict=True)
    ]
    return options


def _read_header(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Header:
    """The header from the top level, or from the groups, which must be complete and agree with it."""
    headers = []
    if "gefen_global_step" in state_dict or "gefen_codebook" in state_dict:
        for key in ("gefen_global_step", "gefen_codebook"):
            if key not in state_dict:
                raise ValueError(f"the checkpoint has no {key!r}")
        headers.append(_checked_header(state_dict["gefen_codebook"], state_dict["gefen_global_step"], "gefen_"))
    for index, group in enumerate(groups):
        if METADATA in group:
            headers.append(_read_metadata(group[METADATA], index))
        elif any(METADATA in other for other in groups):
            raise ValueError(f"group {index} of the checkpoint has no {METADATA!r} although another group has")
    if not headers:
        raise ValueError(f"the checkpoint has neither 'gefen_global_step' nor {METADATA!r} in its groups")
    for other in headers[1:]:
        if not _same(headers[0], other):
            raise ValueError(f"{METADATA!r} differs between the groups, or from the top level, of the checkpoint")
    return headers[0]


def _read_metadata(metadata: Any, index: int) -> Header:
    where = f"{METADATA!r} of group {index}"
    keys = {"format_version", "global_step", "codebook", "deterministic", "device_anchor"}
    if not isinstance(metadata, Mapping) or set(metadata) != keys:
        found = sorted(map(str, metadata)) if isinstance(metadata, Mapping) else metadata
        raise ValueError(f"{where} must have exactly {sorted(keys)}, not {found!r}")
    if _counter(metadata["format_version"], f"{where}: format_version") != FORMAT_VERSION:
        raise ValueError(f"{where} has format_version {metadata['format_version']!r}; {FORMAT_VERSION} is known here")
    return _checked_header(metadata["codebook"], metadata["global_step"], f"{where}: ")


def _checked_header(codebook: Any, global_step: Any, where: str) -> Header:
    step = _counter(global_step, f"{where}global_step")
    if codebook is None:
        return Header(None, step)
    tensor = _tensor(codebook, f"{where}codebook", (LEVELS,), torch.float32).cpu()
    _require_finite(tensor, f"{where}codebook")
    if tensor[0] != -1 or tensor[-1] != 1 or bool((tensor.diff() < 0).any()):
        raise ValueError(f"{where}codebook must ascend from -1 to 1; it goes from {tensor[0]:g} to {tensor[-1]:g}")
    return Header(tensor, step)


def _same(a: Header, b: Header) -> bool:
    if a.codebook is None or b.codebook is None:
        return a.codebook is b.codebook and a.global_step == b.global_step
    return torch.equal(a.codebook, b.codebook) and a.global_step == b.global_step


def _read_entries(state: Any, target: Target, expected: Expected) -> Entries:
    """One parameter's entries: its name only, or all that it steps with."""
    where = f"state of {target.name}"
    if state is None:
        if target.trainable:
            raise ValueError(f"the checkpoint has no {where}")
        return Entries({"name": target.name}, {}, {})  # torch.distributed.checkpoint leaves frozen parameters out
    if not isinstance(state, Mapping):
        raise ValueError(f"the {where} must be a dict, not a {type(state).__name__}")
    body = {key: value for key, value in state.items() if key != "name"}
    if not body:
        return Entries({"name": target.name}, {}, {})
    period = _period(_take(body, "automatic_period", where), target, where)
    counters = {"step": _counter(_take(body, "step", where), f"{where}: step")}
    tensors = _take_tensors(body, momentum_shapes(target.shape, period), where)
    moments = [moment for moment in expected.moments if moment.age in body]
    if expected.moments and not moments:
        raise ValueError(f"the {where} has no second moment: none of {[moment.age for moment in expected.moments]}")
    for moment in moments:
        if moment.matrices_only and len(target.shape) != 2:
            raise ValueError(f"the {where} has {moment.age!r}, but the shape {tuple(target.shape)} is not a matrix")
        counters[moment.age] = _counter(body.pop(moment.age), f"{where}: {moment.age}")
        if counters[moment.age] > counters["step"]:
            ages = f"{counters[moment.age]}, older than its step, {counters['step']}"
            raise ValueError(f"{where}: {moment.age} is {ages}")
        tensors |= _take_tensors(body, moment.shapes(target.shape, period), where)
    if body:
        raise ValueError(f"the {where} has an unknown entry {min(map(str, body))!r}")
    return Entries({"name": target.name, "automatic_period": period}, counters, tensors)


def _take(body: dict[str, Any], name: str, where: str) -> Any:
    if name not in body:
        raise ValueError(f"the {where} has no {name!r}")
    return body.pop(name)


def _take_tensors(body: dict[str, Any], shapes: Shapes, where: str) -> dict[str, Tensor]:
    tensors = {}
    for name, (shape, dtype) in shapes.items():
        tensor = tensors[name] = _tensor(_take(body, name, where), f"{where}: {name}", shape, dtype)
        if dtype.is_floating_point:
            _require_finite(tensor, f"{where}: {name}")
            if tensor.numel() and bool((tensor < 0).any()):
                raise ValueError(f"{where}: {name} holds {float(tensor.min()):g}; it cannot be negative")
    return tensors


def _tensor(value: Any, where: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} must be a tensor, not a {type(value).__name__}")
    if value.dtype is not dtype or tuple(value.shape) != shape or value.layout is not torch.strided:
        raise ValueError(f"{where} must be {dtype} of shape {shape}, not {value.dtype} of shape {tuple(value.shape)}")
    if value.is_meta:
        raise ValueError(f"{where} is on the meta device: it has a shape but no values")
    return value.detach()


def _require_finite(tensor: Tensor, where: str) -> None:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{where} holds an infinity or a NaN")


def _period(value: Any, target: Target, where: str) -> int:
    period = _counter(value, f"{where}: automatic_period")
    if period < 1 or target.shape.numel() % period:
        count = target.shape.numel()
        raise ValueError(
            f"{where}: automatic_period is {period}, which does not divide the {count} elements it has here"
        )
    return period


def _counter(value: Any, where: str) -> int:
    """A count as an int; a 0-d tensor of a capturable optimizer is read."""
    if isinstance(value, Tensor) and value.numel() == 1 and not (value.dtype.is_complex or value.is_meta):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{where} must be a count, 0 or more, not {value!r}")
    return value

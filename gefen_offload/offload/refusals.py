"""The fail-closed table, without the rows that several ranks decide: each check raises, and none changes anything."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from gefen_offload.offload.accelerator import Accelerator
from gefen_offload.offload.errors import OffloadReason, OffloadUnsupportedError
from gefen_offload.offload.schema import StateSchema

Owned = list[list["weakref.ref[Tensor]"]]
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Subject:
    """What the checks look at. `owned` are the groups as the optimizer was given them, None where that is unknown."""

    kind: type
    schema: StateSchema | None
    groups: Sequence[Mapping[str, Any]]
    state: Mapping[Tensor, Any]
    shared: Mapping[str, Tensor]
    owned: Owned | None
    capturable: bool

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its name."""
        for index, group in enumerate(self.groups):
            names = group.get("param_names") or ()
            for position, parameter in enumerate(group["params"]):
                known = position < len(names) and len(names) == len(group["params"])
                yield (names[position] if known else f"group_{index}_param_{position}"), parameter


def check(subject: Subject, accelerator: Accelerator, *, state: bool = True) -> None:
    """Raise OffloadUnsupportedError for the first row that applies: structure, then graphs, then device, then state."""
    refuse_compiling()
    refuse_structure(subject)
    refuse_graphs(subject, accelerator)
    refuse_devices(subject, accelerator)
    if state:
        refuse_custom_state(subject)
        refuse_aliases(subject)


# --- structure ------------------------------------------------------------------------------------------------------


def refuse_structure(subject: Subject) -> None:
    """DTensors, flat parameters, groups that a wrapper replaced, tensor subclasses, other optimizers."""
    parameters = list(subject.named())
    for name, parameter in parameters:
        if _is_dtensor(parameter):
            refuse(
                OffloadReason.DTENSOR,
                f"{name} is a DTensor (FSDP2, tensor parallel or another mesh): each rank holds a shard, and offload "
                "works on whole parameters. Leave offload off: the optimizer steps shards without it; or train with "
                "DistributedDataParallel",
            )
    for name, parameter in parameters:
        if _is_flat(parameter):
            refuse(
                OffloadReason.FLAT_PARAMETER,
                f"{name} is part of an FSDP1 flat parameter, whose memory FSDP frees and rebuilds. Leave offload off, "
                "or train with DistributedDataParallel",
            )
    _refuse_ownership(subject)
    for name, parameter in parameters:
        _refuse_subclass(name, parameter)
    _refuse_optimizer(subject)


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before its module is imported
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def _is_flat(tensor: Tensor) -> bool:
    return bool(
        getattr(tensor, "_is_flat_param", False)
        or getattr(tensor, "_fsdp_flattened", False)
        or type(tensor).__name__ == "FlatParameter"
    )


def _refuse_ownership(subject: Subject) -> None:
    if subject.owned is None:
        return
    now = [[id(parameter) for parameter in group["params"]] for group in subject.groups]
    given = [[id(ref()) for ref in group] for group in subject.owned]
    if now != given:
        refuse(
            OffloadReason.OWNERSHIP,
            f"the parameter groups ({_count(now)}) are not those that the optimizer was given ({_count(given)}): a "
            "wrapper such as DeepSpeed ZeRO replaced, cleared or re-partitioned them, and owns the state now. Use the "
            "wrapper's own offload, or DistributedDataParallel without it; add parameters with add_param_group()",
        )


def _count(groups: Sequence[Sequence[int]]) -> str:
    return f"{sum(map(len, groups))} parameters in {len(groups)} groups"


def _refuse_subclass(name: str, parameter: Tensor) -> None:
    what = _peculiarity(parameter)
    if what is not None:
        refuse(
            OffloadReason.SUBCLASS,
            f"{name} is {what}; offload takes plain dense real tensors. Leave offload off, or replace the parameter by "
            "an ordinary torch.nn.Parameter",
        )


def _peculiarity(tensor: Tensor) -> str | None:
    if type(tensor) not in (Tensor, Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.is_meta:
        return "on the meta device, without memory"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"nested or sparse ({tensor.layout})"
    if tensor.is_quantized or tensor.is_complex():
        return f"of {tensor.dtype}"
    return None


def _refuse_optimizer(subject: Subject) -> None:
    """[Note: whose update] The class that declares STATE_SCHEMA must be the one whose `step` runs."""
    kind = subject.kind
    owner = next((base for base in kind.__mro__ if vars(base).get("STATE_SCHEMA") is not None), None)
    first = next((base for base in kind.__mro__ if "STATE_SCHEMA" in vars(base)), None)
    if subject.schema is None or owner is None or first is not owner:
        refuse(
            OffloadReason.OPTIMIZER,
            f"{kind.__name__} declares no STATE_SCHEMA, so that its state cannot be streamed (GefenMuon needs whole "
            "matrices). Offload Gefen; move this optimizer's state with move_state_()",
        )
    declared = _methods(owner)
    for base in kind.__mro__[: kind.__mro__.index(owner)]:
        for name in sorted(set(vars(base)) & set(declared)):
            if inspect.unwrap(vars(base)[name]) is not declared[name]:
                refuse(
                    OffloadReason.OPTIMIZER,
                    f"{base.__name__} overrides {name}() of {owner.__name__} but declares no STATE_SCHEMA of its own. "
                    "Declare there every entry that its update reads or writes",
                )


def _methods(owner: type) -> dict[str, Any]:
    """What makes the update: `step`, without the wrapper that torch puts around it, and private functions."""
    return {
        name: inspect.unwrap(value)
        for name, value in vars(owner).items()
        if inspect.isfunction(value) and (name == "step" or (name.startswith("_") and not name.startswith("__")))
    }


# --- moment and device ----------------------------------------------------------------------------------------------


def refuse_compiling() -> None:
    """Tracing by torch.compile; asked first, since what follows would be traced."""
    if torch.compiler.is_compiling():
        refuse(
            OffloadReason.COMPILING,
            "torch.compile is tracing this call, and streamed copies cannot be traced. Keep step() and the offload "
            "calls outside the compiled function",
        )


def refuse_graphs(subject: Subject, accelerator: Accelerator) -> None:
    """CUDA graphs: counters on the device, a capture in progress."""
    if subject.capturable or any(group.get("capturable") for group in subject.groups):
        refuse(
            OffloadReason.CAPTURABLE,
            "capturable=True keeps counters on the device for CUDA graphs, which cannot hold streamed copies. Make the "
            "optimizer with capturable=False",
        )
    if accelerator.is_capturing():
        refuse(
            OffloadReason.CAPTURABLE,
            f"the current stream of {accelerator.device} is capturing a CUDA graph. Call this outside the capture",
        )


def refuse_devices(subject: Subject, accelerator: Accelerator) -> None:
    """Parameters off the device, or on several."""
    devices: dict[torch.device, str] = {}
    for name, parameter in subject.named():
        if not accelerator.is_compute(parameter):
            refuse(
                OffloadReason.CPU_PARAMETER,
                f"{name} is on {parameter.device}; offload streams state to parameters on CUDA. Move the model first "
                "(`model.cuda()`), or leave offload off: beside CPU parameters the state takes no GPU memory",
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        refuse(
            OffloadReason.MIXED_DEVICES,
            f"the parameters are on {len(devices)} devices ({where}). Make one optimizer for each device",
        )


# --- state ----------------------------------------------------------------------------------------------------------


def refuse_custom_state(subject: Subject) -> None:
    """Entries that the schema does not know and that hold, or may hold, tensors; declared ones of another kind."""
    schema = subject.schema
    if schema is None:
        return
    tensors = {entry.name: entry for entry in schema.tensors}
    names = {id(parameter): name for name, parameter in subject.named()}
    for parameter, entries in subject.state.items():
        where = names.get(id(parameter), f"the state key {type(parameter).__name__}")
        if id(parameter) not in names and not _tensor_free(entries):
            _refuse_entry(where, "state of no parameter", entries)
        if id(parameter) not in names:
            continue
        if not isinstance(entries, dict):
            _refuse_entry(where, "state that is not a dict", entries)
        for name, value in entries.items():
            declared = tensors.get(name)
            if declared is None and not _tensor_free(value):
                _refuse_entry(where, f"the entry {name!r}", value)
            if declared is not None and not (type(value) is Tensor and value.dtype is declared.dtype):
                _refuse_entry(where, f"the entry {name!r}, declared as a tensor of {declared.dtype}", value)


def _refuse_entry(where: str, what: str, value: Any) -> NoReturn:
    kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    refuse(
        OffloadReason.CUSTOM_STATE,
        f"{where} has {what}: {kind}, which the optimizer's STATE_SCHEMA does not provide for, so that it would be "
        "left behind. Remove it, keep plain numbers and strings only, or declare it in a subclass's STATE_SCHEMA",
    )


def _tensor_free(value: Any) -> bool:
    """Whether this is plain data through and through."""
    if type(value) in PLAIN:
        return True
    if type(value) in (tuple, list, set, frozenset):
        return all(map(_tensor_free, value))
    return type(value) is dict and all(_tensor_free(k) and _tensor_free(v) for k, v in value.items())


def refuse_aliases(subject: Subject) -> None:
    """State tensors that share storage with any other live tensor: apart, they would no longer be one."""
    owners: dict[tuple[torch.device, int], str] = {}
    for name, parameter in subject.named():
        owners.setdefault(_storage(parameter), name)
        if parameter.grad is not None and type(parameter.grad) is Tensor:
            owners.setdefault(_storage(parameter.grad), f"the gradient of {name}")
    for label, tensor in _state_tensors(subject):
        if tensor.numel() == 0:
            continue
        key = _storage(tensor)
        if key in owners:
            refuse(
                OffloadReason.ALIASED,
                f"{label} shares its storage with {owners[key]}: a copy elsewhere would no longer be shared. Give each "
                "a storage of its own (`.clone()`)",
            )
        owners[key] = label


def _state_tensors(subject: Subject) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in subject.named():
        entries = subject.state.get(parameter)
        if isinstance(entries, dict):
            yield from ((f"{k} of {name}", v) for k, v in entries.items() if isinstance(v, Tensor))
    yield from subject.shared.items()


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def refuse(reason: OffloadReason, message: str) -> NoReturn:
    """Raise."""
    raise OffloadUnsupportedError(reason, message)

"""The options of a group of matrices: how they are given, kept and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gefen_offload.optim.groups import check_number
from gefen_offload.optim.newton_schulz import LR_ADJUSTMENTS, check_quintic, check_schedule

MUON_OPTIONS = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "sharded_mode")
LACKING = ("normuon", "cautious", "fp8_ns", "batched_ns")  # options of gefen-x that change numbers


def check_muon_options(options: Mapping[str, Any]) -> None:
    """Raise a ValueError naming the option of a group that is missing, out of range, or not known here."""
    for name in MUON_OPTIONS:
        if name not in options:
            raise ValueError(f"the parameter group has no {name!r}")
    check_number("momentum", options["momentum"], least=0.0, below=1.0)
    _check_choice("nesterov", options["nesterov"], (True, False))
    _check_choice("adjust_lr_fn", options["adjust_lr_fn"], LR_ADJUSTMENTS)
    _check_choice("sharded_mode", options["sharded_mode"], ("exact",))
    _check_choice("beta2", options.get("beta2", 0.0), (0.0,))
    coefficients = options["ns_coefficients"]
    if is_schedule(coefficients) or isinstance(coefficients, str):
        check_schedule("ns_schedule", coefficients)
    else:
        check_quintic("ns_coefficients", coefficients)
    if type(options["ns_steps"]) is not int or not 1 <= options["ns_steps"] < 100:
        raise ValueError(f"ns_steps must be an int from 1 to 99, not {options['ns_steps']!r}")
    refuse_lacking(options, "the parameter group")


def refuse_lacking(group: Mapping[str, Any], where: str) -> None:
    """Raise where a group was made with an option of gefen-x that this implementation lacks."""
    for name in LACKING:
        if group.get(name):
            raise ValueError(f"{where} has {name}={group[name]!r}; this implementation has no {name}")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")


def with_aliases(options: dict[str, Any]) -> dict[str, Any]:
    """A group's options as they are kept: a schedule as its coefficients, and `beta1` beside `momentum`."""
    for name in ("betas", "beta1", "beta2"):
        if name in options and not (name == "beta2" and options[name] == 0):
            raise ValueError(f"{name}={options[name]!r}: GefenMuon takes momentum instead")
    kept = dict(options)
    schedule = kept.pop("ns_schedule", None)
    if schedule is not None:
        check_schedule("ns_schedule", schedule)
        kept["ns_coefficients"] = [tuple(step) for step in schedule]
        kept["ns_steps"] = len(schedule)
    if "momentum" in kept:
        kept["beta1"] = kept["momentum"]
    return kept


def is_schedule(coefficients: object) -> bool:
    return isinstance(coefficients, Sequence) and bool(coefficients) and isinstance(coefficients[0], Sequence)


def same_schedule(a: Any, b: Any) -> bool:
    return is_schedule(b) and [tuple(step) for step in a] == [tuple(step) for step in b]


def check_matrix(tensor: Tensor, name: object, error: type[Exception] = ValueError) -> None:
    if tensor.dim() != 2:
        raise error(
            f"{name} has {tensor.dim()} dimensions; GefenMuon takes 2-D parameters only, since it orthogonalises whole "
            "matrices. Flat partitions, as DeepSpeed ZeRO and FSDP1 make them, are pieces of no matrix: use FSDP2 "
            "(fully_shard) or DDP, or give the parameter to Gefen, as GefenMuonHybrid does"
        )

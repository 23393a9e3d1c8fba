"""GefenMuonHybrid: Muon for a model's hidden matrices, a backup optimizer for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gefen_offload.offload.errors import OffloadReason, OffloadUnsupportedError
from gefen_offload.optim import adamw, checkpoint
from gefen_offload.optim.gefen import Gefen
from gefen_offload.optim.muon import GefenMuon
from gefen_offload.optim.newton_schulz import QUINTIC, STEPS, Quintic
from gefen_offload.optim.split import BACKUP_SUBSTRINGS, Named, check_split, split_params_for_muon

BACKENDS = ("gefen", "adamw")


class GefenMuonHybrid(Optimizer):
    """`GefenMuon` on the hidden matrices of `model`, `Gefen` or torch's `AdamW` on its other trainable parameters.

    The split is `split_params_for_muon`'s, with `backup_substrings`; `muon_params` and `backup_params`, (name,
    parameter) pairs given together, replace it. A parameter in both or neither, or a repeated name, is an error. `lr`
    and `weight_decay` hold for a side that has none of its own. `betas`, `eps`, `fused` and, for Gefen, `factored_v_2d`
    are the backup's; `momentum` to `adjust_lr_fn` are Muon's. The others are as in `Gefen`. The defaults are gefen-x's,
    without its NorMuon and its tuned schedule.

    `muon` and `backup` are the two optimizers, either of them None where it has no parameter. `param_groups` is Muon's
    groups followed by the backup's, live, for schedulers and scalers; `state` is a snapshot of both. `state_dict()` is
    `{"muon": ..., "backup": ..., "backup_optimizer": "gefen" | "adamw"}`, and loading changes both or neither. Hooks
    registered here run once for the whole; torch's global step hooks run for this optimizer and for each child.
    `offload_state_()` is refused; `move_state_()` moves both.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor,
        backup_optimizer: str = "gefen",
        *,
        muon_params: Iterable[tuple[str, Tensor]] | None = None,
        backup_params: Iterable[tuple[str, Tensor]] | None = None,
        backup_substrings: Iterable[str] = BACKUP_SUBSTRINGS,
        muon_lr: float | Tensor | None = None,
        backup_lr: float | Tensor | None = None,
        weight_decay: float = 0.0,
        muon_weight_decay: float | None = None,
        backup_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        factored_v_2d: bool = False,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Quintic = QUINTIC,
        ns_steps: int = STEPS,
        ns_schedule: Sequence[Quintic] | None = None,
        adjust_lr_fn: str | None = "match_rms_adamw",
        fused: bool | None = None,
        codebook_refresh_every: int = 0,
        capturable: bool = False,
        verbose: bool = False,
    ) -> None:
        if backup_optimizer not in BACKENDS:
            raise ValueError(f"backup_optimizer must be 'gefen' or 'adamw', not {backup_optimizer!r}")
        muon, backup = _split(model, muon_params, backup_params, backup_substrings)
        shared: dict[str, Any] = {
            "codebook_refresh_every": codebook_refresh_every,
            "capturable": capturable,
            "verbose": verbose,
        }
        muon_options: dict[str, Any] = {
            "lr": _first(muon_lr, lr),
            "weight_decay": _first(muon_weight_decay, weight_decay),
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_schedule": ns_schedule,
            "adjust_lr_fn": adjust_lr_fn,
        }
        backup_options: dict[str, Any] = {
            "lr": _first(backup_lr, lr),
            "weight_decay": _first(backup_weight_decay, weight_decay),
            "betas": betas,
            "eps": eps,
            "fused": fused,
        }
        self.muon = GefenMuon(muon, **muon_options, **shared) if muon else None
        self.backup: Gefen | AdamW | None = None
        if backup and backup_optimizer == "gefen":
            self.backup = Gefen(backup, **backup_options, factored_v_2d=factored_v_2d, **shared)
        elif backup:
            self.backup = AdamW(backup, **backup_options, capturable=capturable)
        self.backup_optimizer = backup_optimizer
        super().__setstate__({"defaults": {"lr": lr, "weight_decay": weight_decay}})

    # --- the face of one optimizer ---

    @property
    def children(self) -> tuple[Optimizer, ...]:
        """The optimizers there are: Muon first."""
        return tuple(child for child in (self.muon, self.backup) if child is not None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The live groups of both, in a new list: Muon's first. A group is changed here, and added to a child."""
        return [group for child in self.children for group in child.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The live state of each parameter of both, in a new dict."""
        return {parameter: entry for child in self.children for parameter, entry in child.state.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a group is Muon's or the backup's. Call `hybrid.muon.add_param_group` or `hybrid.backup...`."""
        raise RuntimeError("GefenMuonHybrid cannot tell whose group this is: add it to hybrid.muon or hybrid.backup")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of every parameter of both."""
        for child in self.children:
            child.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both; `closure` is called once, first. A gradient that either would refuse is refused before both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _check_gradients(self.param_groups)
        if isinstance(self.backup, Gefen):
            self.backup._before_step()
        for child in self.children:
            child.step()
        return loss

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """`{"muon": ..., "backup": ..., "backup_optimizer": ...}`: both state dicts, None for a side without one."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed: dict[str, Any] = {
            "muon": self.muon.state_dict() if self.muon else None,
            "backup": self.backup.state_dict() if self.backup else None,
            "backup_optimizer": self.backup_optimizer,
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of gefen-x 0.5.0 with the same backup; both sides change, or neither.

        Raises a ValueError that names what is wrong: a flat checkpoint, one of the other backup, an option that this
        implementation lacks, or an entry that does not fit.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._check(state_dict)
        with _Undo(self.muon):
            if self.muon is not None:
                self.muon.load_state_dict(state_dict["muon"])
            if isinstance(self.backup, Gefen):
                self.backup.load_state_dict(state_dict["backup"])
            elif self.backup is not None:  # torch would share the checkpoint's tensors
                self.backup.load_state_dict(checkpoint.cloned(state_dict["backup"]))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _check(self, state_dict: Mapping[str, Any]) -> None:
        """Raise where the whole does not fit, or the backup would refuse its part; changes nothing."""
        _check_layout(state_dict)
        saved = state_dict["backup_optimizer"]
        if saved != self.backup_optimizer:
            raise ValueError(
                f"the checkpoint's backup_optimizer is {saved!r}, this optimizer's {self.backup_optimizer!r}: "
                f"construct it with backup_optimizer={saved!r} to load it"
            )
        for child, name in ((self.muon, "muon"), (self.backup, "backup")):
            if (state_dict[name] is None) != (child is None):
                have, lack = "this optimizer", "the checkpoint"
                have, lack = (lack, have) if child is None else (have, lack)
                raise ValueError(f"{have} has a {name!r} part and {lack} has none: the models are split differently")
        if self.backup is not None:  # Muon loads first, and checks its part itself
            _check_backup(self.backup, state_dict["backup"])

    # --- where the state lives ---

    def move_state_(self, device: torch.device | str | None = None) -> None:
        """Move the state of both to their parameters' devices, or to one that every parameter is already on."""
        commits = [
            child._stage_move(device) if isinstance(child, Gefen) else adamw.stage_move(child, device)
            for child in self.children
        ]
        for commit in commits:
            commit()

    def offload_state_(self, *args: Any, **kwargs: Any) -> None:
        """Refused: Muon's side steps whole matrices."""
        raise OffloadUnsupportedError(
            OffloadReason.OPTIMIZER,
            "GefenMuonHybrid does not stream its state: Muon steps whole matrices. Keep it resident, or train with "
            "Gefen, whose offload_state_() streams",
        )

    def restore_state_(self) -> None:
        """Nothing to do: offload is never on."""

    @property
    def state_offload_active(self) -> bool:
        """False: the state is always resident."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and `pickle` carry: both optimizers and what they were made with."""
        return {name: self.__dict__[name] for name in ("muon", "backup", "backup_optimizer", "defaults")}


class _Undo:
    """Undoes a load, should the block raise: the optimizer holds the very objects that it held before."""

    def __init__(self, optimizer: GefenMuon | None) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> None:
        if self._optimizer is not None:  # loading replaces these members, and writes to none of them
            self._members = dict(vars(self._optimizer))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._optimizer is not None:
            vars(self._optimizer).update(self._members)


def _split(
    model: nn.Module,
    muon: Iterable[tuple[str, Tensor]] | None,
    backup: Iterable[tuple[str, Tensor]] | None,
    substrings: Iterable[str],
) -> tuple[Named, Named]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the first argument must be the model, an nn.Module, not a {type(model).__name__}")
    if (muon is None) != (backup is None):
        given, missing = ("muon_params", "backup_params") if backup is None else ("backup_params", "muon_params")
        raise ValueError(f"{given} was given without {missing}: give both, or neither")
    if muon is None or backup is None:
        return _checked(model, *split_params_for_muon(model, substrings))
    return _checked(model, list(muon), list(backup))


def _checked(model: nn.Module, muon: Named, backup: Named) -> tuple[Named, Named]:
    check_split(model, muon, backup)
    if not muon and not backup:
        raise ValueError(f"the {type(model).__name__} has no trainable parameter")
    return muon, backup


def _first(own: Any, shared: Any) -> Any:
    return shared if own is None else own


def _check_gradients(groups: Sequence[Mapping[str, Any]]) -> None:
    for group in groups:
        for position, parameter in enumerate(group["params"]):
            gradient = parameter.grad
            if gradient is not None and (gradient.layout is not torch.strided or gradient.is_complex()):
                names = group.get("param_names") or {}
                name = names[position] if position < len(names) else f"parameter {position} of its group"
                raise RuntimeError(f"{name} has a sparse or complex gradient; GefenMuonHybrid takes dense real ones")


def _check_layout(state_dict: Any) -> None:
    keys = ("muon", "backup", "backup_optimizer")
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"a {type(state_dict).__name__} is not a GefenMuonHybrid state_dict()")
    if "param_groups" in state_dict or "state" in state_dict:
        raise ValueError(
            "this is the flat checkpoint of one optimizer ('state' and 'param_groups'); GefenMuonHybrid loads "
            "{'muon', 'backup', 'backup_optimizer'}, as its state_dict() gives it"
        )
    for key in keys:
        if key not in state_dict:
            raise ValueError(f"the checkpoint has no {key!r}: it is not a GefenMuonHybrid state_dict()")
    unknown = [key for key in state_dict if key not in keys]
    if unknown:
        raise ValueError(f"the checkpoint has an unknown entry {unknown[0]!r}")


def _check_backup(backup: Gefen | AdamW, part: dict[str, Any]) -> None:
    if isinstance(backup, Gefen):
        checkpoint.read(part, backup._expected())
    else:
        adamw.check_state_dict(part, backup)

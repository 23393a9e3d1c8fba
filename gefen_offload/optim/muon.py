"""GefenMuon: Muon for matrices, with its momentum kept in about one byte per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from gefen_offload.offload.schema import Cut, StateSchema, TensorEntry
from gefen_offload.optim import checkpoint
from gefen_offload.optim import fused as kernels
from gefen_offload.optim.codebook import BINS, nearest_level, solve_codebook
from gefen_offload.optim.gefen import Gefen, Graded, Updater, as_groups
from gefen_offload.optim.groups import check_options
from gefen_offload.optim.levels import Levels
from gefen_offload.optim.matrix_batches import most_together, orthogonalised
from gefen_offload.optim.muon_options import (
    check_matrix,
    check_muon_options,
    is_schedule,
    refuse_lacking,
    same_schedule,
    with_aliases,
)
from gefen_offload.optim.newton_schulz import QUINTIC, STEPS, Quintic, lr_ratio, schedule_of
from gefen_offload.optim.shard import is_sharded
from gefen_offload.optim.work import PIECE_ELEMENTS, Piece, Scalars, StagedPiece, Work, cut

if TYPE_CHECKING:
    from gefen_offload.optim.fused.momentum import FusedMomentum

# --- maths ----------------------------------------------------------------------------------------------------------


def dequantise(indices: Tensor, magnitude: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """The levels times the magnitudes of their blocks, both rounded to the gradient's `dtype`, in that dtype."""
    picked = levels.to(dtype).index_select(0, indices.reshape(-1).int()).view(indices.shape)
    return picked.mul_(magnitude.to(dtype))


def requantise(momentum: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The indices, uint8, and the blocks' magnitudes, float32, of a (blocks, period) momentum; its dtype throughout."""
    magnitude = momentum.abs().amax(1, keepdim=True)
    quotient = (momentum / magnitude).masked_fill_(magnitude == 0, 0)
    return nearest_level(quotient, levels), magnitude.float()


def momentum_step(
    gradient: Tensor, indices: Tensor, magnitude: Tensor, levels: Tensor, momentum: float, nesterov: bool
) -> Tensor:
    """Update indices and magnitudes in place from a (blocks, period) gradient; return what is to be orthogonalised."""
    average = dequantise(indices, magnitude, levels, gradient.dtype).lerp_(gradient, 1 - momentum)
    new_indices, new_magnitude = requantise(average, levels)
    indices.copy_(new_indices)
    magnitude.copy_(new_magnitude)
    stored = dequantise(indices, magnitude, levels, gradient.dtype)
    return stored.mul_(momentum).add_(gradient, alpha=1 - momentum) if nesterov else stored


def muon_update(staged: Sequence[StagedPiece], levels: Tensor, fused: FusedMomentum | None = None) -> None:
    """Step whole matrices, those of one shape together.

    Under FSDP2 each is gathered, one after the other, so that every rank must go through the same ones.
    """
    for alike in _alike(staged):
        works = [cast(MatrixWork, piece.piece.work) for piece in alike]
        updates = [_gathered(_averaged(piece, levels, fused), work) for piece, work in zip(alike, works, strict=True)]
        group = works[0].group
        steps = schedule_of(group["ns_coefficients"], group["ns_steps"])
        for work, direction in zip(works, orthogonalised(updates, steps, group["eps"]), strict=True):
            ratio = lr_ratio(work.group["adjust_lr_fn"], *direction.shape)
            apply(work.parameter, _sharded(direction, work), ratio, work.scalars)


def _alike(staged: Sequence[StagedPiece]) -> Iterator[list[StagedPiece]]:
    """Matrices of one group, device and shape, as many as may be taken together; a sharded one by itself."""
    alike: dict[object, list[StagedPiece]] = {}
    for piece in staged:
        work = cast(MatrixWork, piece.piece.work)
        parameter = work.parameter
        key = id(work) if is_sharded(work.key) else (id(work.group), parameter.device, parameter.shape)
        alike.setdefault(key, []).append(piece)
    for pieces in alike.values():
        most = most_together(pieces[0].piece.work.parameter.numel())
        yield from (pieces[first : first + most] for first in range(0, len(pieces), most))


def apply(parameter: Tensor, direction: Tensor, ratio: float, scalars: Scalars) -> None:
    """p = p (1 - lr wd), rounded; then p - lr ratio direction, rounded once. In place."""
    parameter.mul_(scalars.decay)
    if isinstance(scalars.lr, Tensor):
        wide = torch.promote_types(parameter.dtype, torch.float32)
        parameter.copy_(parameter.to(wide).sub(direction.to(wide).mul_(scalars.lr * ratio)))
    else:
        parameter.add_(direction, alpha=-scalars.lr * ratio)


def _averaged(staged: StagedPiece, levels: Tensor, fused: FusedMomentum | None) -> Tensor:
    """Update the momentum of a parameter, or of this rank's shard; return what it gives, bfloat16, in its shape.

    Without kernels in parts of whole blocks, so that only the bfloat16 result is as large as the matrix.
    """
    work, tensors = staged.piece.work, staged.tensors
    if fused is not None and fused.fits(work.gradient):
        state = (tensors["m_codebook"], tensors["m_magnitude"])
        moved = fused(work.gradient, *state, levels, work.scalars.beta1, work.group["nesterov"])
        return moved.view(work.parameter.shape)
    update = torch.empty(work.gradient.shape, dtype=torch.bfloat16, device=work.gradient.device)
    blocks = max(1, PIECE_ELEMENTS // work.period)
    for first in range(0, work.blocks, blocks):
        last = min(first + blocks, work.blocks)
        part = slice(first * work.period, last * work.period)
        gradient = work.gradient[part].view(-1, work.period)
        indices, magnitude = tensors["m_codebook"][first:last], tensors["m_magnitude"][first:last]
        result = momentum_step(gradient, indices, magnitude, levels, work.scalars.beta1, work.group["nesterov"])
        update[part].copy_(result.view(-1))
    return update.view(work.parameter.shape)


def _gathered(update: Tensor, work: MatrixWork) -> Tensor:
    """The whole matrix, from every rank's shard of it."""
    key: Any = work.key
    if not is_sharded(key):
        return update
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        update, key.device_mesh, key.placements, run_check=False, shape=key.shape, stride=key.stride()
    ).full_tensor()


def _sharded(direction: Tensor, work: MatrixWork) -> Tensor:
    """This rank's shard of a matrix that every rank has. Nothing is sent."""
    key: Any = work.key
    if not is_sharded(key):
        return direction
    from torch.distributed.tensor import DTensor, Replicate

    mesh = key.device_mesh
    whole = DTensor.from_local(direction.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=key.placements).to_local()


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MatrixWork(Work):
    """A matrix that steps now. `key` is the caller's: under FSDP2 the DTensor of which `parameter` is a shard."""

    key: Tensor


# --- the optimizer --------------------------------------------------------------------------------------------------


class GefenMuon(Gefen):
    """Muon for 2-D parameters: momentum in 8 bits with a learnt codebook, orthogonalised by Newton-Schulz in bfloat16.

    `params` are 2-D tensors, (name, tensor) pairs, or group dicts. Embeddings and output heads are better left to
    another optimizer: see `split_params_for_muon` and `GefenMuonHybrid`. `momentum` weighs the past, `nesterov`
    looks one gradient ahead. `ns_coefficients` (a, b, c) are applied `ns_steps` times, or those listed in `ns_schedule`
    once each. `adjust_lr_fn=None` or "original" scales the learning rate by sqrt(max(1, rows/cols)), "match_rms_adamw"
    by 0.2 sqrt(max(rows, cols)), so that an AdamW learning rate fits. A group may have its own of each of these. The
    other options are those of `Gefen`. The fused kernels move the momentum on, to the bits of the plain path on that
    GPU. Small matrices of one shape are orthogonalised together where that, too, changes no bit.

    Under FSDP2 each rank keeps the momentum of its shard, with blocks and codebook of its own, and the ranks gather the
    matrix to orthogonalise it, in the order of the groups: every rank must have a gradient for the same parameters. The
    flat partitions that DeepSpeed ZeRO and FSDP1 make are refused.

    The momentum of an optimizer of this class stays beside the parameters: `offload_state_()` is refused.
    """

    RESIDENT: ClassVar[str | None] = (
        "does not stream its state: it steps whole matrices. Keep it resident, or give the parameters to Gefen, whose "
        "offload_state_() does"
    )
    STATE_SCHEMA: ClassVar[StateSchema] = StateSchema(
        tensors=(
            TensorEntry("m_codebook", torch.uint8, Cut.BLOCKS),
            TensorEntry("m_magnitude", torch.float32, Cut.BLOCKS),
        ),
        plain={"name": str, "automatic_period": int, "step": int},
    )

    _moments: ClassVar[tuple[checkpoint.Moment, ...]] = ()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Quintic = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = STEPS,
        ns_schedule: Sequence[Quintic] | None = None,
        adjust_lr_fn: str | None = None,
        *,
        fused: bool | None = None,
        codebook_refresh_every: int = 0,
        capturable: bool = False,
        verbose: bool = False,
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "beta2": 0.0,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "sharded_mode": "exact",
        }
        if ns_schedule is not None:
            options["ns_schedule"] = ns_schedule
        self._set_up(
            fused=fused,
            factored_v_2d=False,
            codebook_refresh_every=codebook_refresh_every,
            capturable=capturable,
            force_1d_period_one=False,
            period_one_substrings=(),
            verbose=verbose,
        )
        defaults = with_aliases(options)
        self._check_group(defaults)
        super(Gefen, self).__init__(as_groups(params), defaults)

    # --- groups ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices: `params` as in the constructor, and its own options."""
        if isinstance(param_group, dict):
            param_group = with_aliases(param_group)
            if not isinstance(param_group["params"], (Tensor, set, frozenset)):
                param_group["params"] = list(param_group["params"])
            for position, item in enumerate(param_group["params"]):
                name, tensor = item if isinstance(item, tuple) else (f"parameter {position}", item)
                if isinstance(tensor, Tensor):
                    check_matrix(tensor, name)
        super().add_param_group(param_group)

    def _check_group(self, options: dict[str, Any]) -> None:
        check_muon_options(options)
        check_options(options)

    # --- the step ---

    def _collect(self) -> list[Graded]:
        """As in `Gefen`, but with shards of no element: their ranks take part in gathering the matrix."""
        graded = []
        for group in self.param_groups:
            for key in group["params"]:
                if key.grad is not None and key.numel():
                    graded.append(self._graded(key, group, self.state.get(key, {})))
        return graded

    def _graded(self, key: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Graded:
        check_matrix(key, state.get("name", "a parameter"), RuntimeError)
        return super()._graded(key, group, state)

    def _works(self, graded: Sequence[Graded]) -> list[Work]:
        return [
            MatrixWork(**{field.name: getattr(work, field.name) for field in fields(Work)}, key=item.key)
            for work, item in zip(super()._works(graded), graded, strict=True)
        ]

    def _read_scalars(self, group: dict[str, Any], step: int | Tensor, age: int | Tensor) -> Scalars:
        return super()._read_scalars({**group, "beta1": group["momentum"]}, step, age)

    def _counters(self, factored: bool) -> tuple[str, ...]:
        return ("step",)

    def _state_shapes(self, shape: torch.Size, period: int, factored: bool) -> checkpoint.Shapes:
        return checkpoint.momentum_shapes(shape, period)

    def _cut(self, works: Sequence[Work]) -> list[Piece]:
        return cut(works, None)

    def _divisible(self, works: Sequence[Work]) -> bool:
        return False

    def _updater_for(self, device: torch.device) -> Updater:
        if device not in self._updaters:
            fused = kernels.fused_momentum() if self._takes_kernels(device) else None
            self._updaters[device] = partial(muon_update, fused=fused)
        return self._updaters[device]

    def _next_levels(self, graded: Sequence[Graded], periods: dict[Tensor, int]) -> Levels | None:
        """As in `Gefen`; a rank whose shards have no element takes a blank codebook."""
        filled = [item for item in graded if item.gradient.numel()]
        if filled:
            return super()._next_levels(filled, periods)
        return None if self._levels.tensor is not None else _blank_levels(graded[0].parameter.device)

    # --- checkpoints, and where the state lives ---

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of gefen-x 0.5.0, or raise a ValueError and change nothing.

        A checkpoint made with an option that this optimizer lacks is refused, and so is one with a schedule of
        coefficients, unless this optimizer was given the same `ns_schedule`.
        """
        checkpoint.check_containers(state_dict, type(self).__name__)
        self._check_loaded_options(state_dict)
        super().load_state_dict(state_dict)

    def _check_loaded_options(self, state_dict: Mapping[str, Any]) -> None:
        known = [self.defaults["ns_coefficients"], *(group["ns_coefficients"] for group in self.param_groups)]
        for index, group in enumerate(state_dict.get("param_groups", ())):
            where = f"group {index} of the checkpoint"
            refuse_lacking(group, where)
            coefficients = group.get("ns_coefficients")
            if is_schedule(coefficients) and not any(same_schedule(coefficients, own) for own in known):
                raise ValueError(
                    f"{where} was made with ns_schedule={coefficients!r}, which this optimizer was not given: pass the "
                    "same list as ns_schedule to load it"
                )


def _blank_levels(device: torch.device) -> Levels:
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[BINS // 2] = 1
    return Levels(solve_codebook(counts).to(device))

"""One step of the plain path: pure functions from gradients and state to new state and parameters.

The order of the operations is the algorithm's definition, to the bit; algebraically equal forms are not equal.
Everything here works on a matrix of blocks, (blocks, period), with one magnitude a row, (blocks, 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gefen_offload.optim.batching import Batch, batches
from gefen_offload.optim.codebook import nearest_level
from gefen_offload.optim.second_moment import (
    block_mean_square,
    block_stepsize,
    factored_square,
    factored_stepsize,
    update_blocks,
    update_factors,
)
from gefen_offload.optim.work import Scalars, StagedPiece

# --- maths ----------------------------------------------------------------------------------------------------------


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What arithmetic on `dtype` is done in: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def dequantise(indices: Tensor, magnitude: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """The levels, rounded to the gradient's `dtype`, times the blocks' magnitudes, in the wide dtype."""
    wide = wide_dtype(dtype)
    picked = levels.to(dtype).to(wide).index_select(0, indices.reshape(-1).int()).view(indices.shape)
    return picked.mul_(magnitude.to(wide))


def requantise(momentum: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The indices, uint8, and the blocks' magnitudes, float32, of a momentum in the wide dtype."""
    magnitude = momentum.abs().amax(1, keepdim=True).float()
    quotient = (momentum / magnitude.to(momentum.dtype)).masked_fill_(magnitude == 0, 0)
    return nearest_level(quotient, levels), magnitude


def apply(parameter: Tensor, update: Tensor, scalars: Scalars) -> None:
    """p = p (1 - lr wd), rounded; then p - lr update, rounded once. In place; overwrites `update`."""
    parameter.mul_(scalars.decay)
    wide = torch.promote_types(parameter.dtype, update.dtype)
    parameter.copy_(parameter.to(wide).sub(update.mul_(scalars.lr)))


# --- the pieces -----------------------------------------------------------------------------------------------------


def plain_update(staged: Sequence[StagedPiece], levels: Tensor) -> None:
    """Step every piece. Small ones are batched: what a batch computes does not depend on who else is in it."""
    for piece in staged:
        if piece.piece.first == 0 and piece.piece.work.factored:
            work = piece.piece.work
            update_factors(piece.tensors["v_row"], piece.tensors["v_col"], work.gradient, work.scalars.beta2)
    for batch in batches(staged):
        step_batch(batch, levels)


def step_batch(batch: Batch, levels: Tensor) -> None:
    """Momentum, second moment and parameter of one batch."""
    gradient, indices, magnitude = batch.gradient(), batch.tensor("m_codebook"), batch.tensor("m_magnitude")
    momentum = dequantise(indices, magnitude, levels, gradient.dtype)
    momentum = momentum.lerp_(gradient.to(momentum.dtype), 1 - batch.scalars.beta1)
    indices, magnitude = requantise(momentum, levels)
    batch.store("m_codebook", indices)
    batch.store("m_magnitude", magnitude)
    momentum = dequantise(indices, magnitude, levels, gradient.dtype)
    update = momentum.mul_(_stepsize(batch))
    parameter = batch.parameter()
    apply(parameter, update, batch.scalars)
    batch.store_parameter(parameter)


def _stepsize(batch: Batch) -> Tensor:
    scalars = batch.scalars
    if batch.factored:
        square = batch.join([_square_of(piece) for piece in batch.pieces])
        return factored_stepsize(square, scalars.bias1, scalars.bias2, scalars.eps)
    vmean = batch.tensor("vmean")
    # [Note: reductions] A mean's order may depend on how many rows there are, so each piece's is taken by itself.
    mean_square = batch.join([block_mean_square(gradient) for gradient in batch.gradients()])
    update_blocks(vmean, mean_square, scalars.beta2)
    batch.store("vmean", vmean)
    return block_stepsize(vmean, scalars.bias1, scalars.bias2, scalars.eps)


def _square_of(staged: StagedPiece) -> Tensor:
    piece, period = staged.piece, staged.piece.work.period
    square = factored_square(
        staged.tensors["v_row"], staged.tensors["v_col"], piece.first * period, piece.last * period
    )
    return square.view(-1, period)

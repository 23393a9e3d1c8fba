"""One step of the plain path: staged pieces in, new state and parameters out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gefen_offload.optim.batching import Batch, batches
from gefen_offload.optim.long_blocks import step_long_blocks
from gefen_offload.optim.momentum import apply, averaged, dequantise, magnitude_of, quantise
from gefen_offload.optim.second_moment import (
    block_mean_square,
    block_stepsize,
    factored_square,
    factored_stepsize,
    update_blocks,
    update_factors,
)
from gefen_offload.optim.work import PIECE_ELEMENTS, StagedPiece


def plain_update(staged: Sequence[StagedPiece], levels: Tensor) -> None:
    """Step every piece with the codebook `levels`, all on one device, in at most 64 MiB.

    Small pieces are batched. What a batch computes for a piece does not depend on what else is in it.
    """
    for piece in staged:
        if piece.piece.first == 0 and piece.piece.work.factored:
            work = piece.piece.work
            update_factors(piece.tensors["v_row"], piece.tensors["v_col"], work.gradient, work.scalars.beta2)
    for batch in batches(staged):
        if batch.period > PIECE_ELEMENTS:
            for piece in batch.pieces:
                step_long_blocks(piece, levels)
        else:
            step_batch(batch, levels)


def step_batch(batch: Batch, levels: Tensor) -> None:
    """Momentum, second moment and parameter of one batch."""
    scalars, gradient = batch.scalars, batch.gradient()
    indices, magnitude = batch.tensor("m_codebook"), batch.tensor("m_magnitude")
    momentum = averaged(gradient, indices, magnitude, levels, scalars.beta1)
    magnitude = magnitude_of(momentum)
    indices = quantise(momentum, magnitude, levels)
    batch.store("m_codebook", indices)
    batch.store("m_magnitude", magnitude)
    momentum = dequantise(indices, magnitude, levels, gradient.dtype)
    update = momentum.mul_(_stepsize(batch))
    parameter = batch.parameter()
    apply(parameter, update, scalars)
    batch.store_parameter(parameter)


def _stepsize(batch: Batch) -> Tensor:
    """One value a block, or an element where the second moment is factored."""
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

"""Blocks longer than a piece: stepped in parts, so that the memory stays bounded.

The arithmetic is that of `update.py`; only sums over a block are taken in parts. The momentum is computed twice, once
for the block's magnitude and once for its indices, rather than kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gefen_offload.optim import flat
from gefen_offload.optim.momentum import apply, averaged, dequantise, magnitude_of, quantise
from gefen_offload.optim.second_moment import block_stepsize, factored_square, factored_stepsize, update_blocks
from gefen_offload.optim.work import PIECE_ELEMENTS, StagedPiece


def step_long_blocks(staged: StagedPiece, levels: Tensor) -> None:
    """Step the blocks of one piece, one after the other."""
    for row in range(staged.piece.last - staged.piece.first):
        _step(_Block(staged, row), levels)


@dataclass(frozen=True)
class _Block:
    """Row `row` of a staged piece."""

    staged: StagedPiece
    row: int

    def tensor(self, name: str) -> Tensor:
        """The row of a state tensor that is cut by blocks, (1, ...)."""
        return self.staged.tensors[name][self.row : self.row + 1]

    def parts(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """The elements [first, last) of each part in the parameter, its gradient and its indices, (1, last - first)."""
        work = self.staged.piece.work
        start = (self.staged.piece.first + self.row) * work.period
        indices = self.tensor("m_codebook")
        for offset in range(0, work.period, PIECE_ELEMENTS):
            end = min(offset + PIECE_ELEMENTS, work.period)
            first, last = start + offset, start + end
            yield first, last, work.gradient[first:last].view(1, -1), indices[:, offset:end]


def _step(block: _Block, levels: Tensor) -> None:
    work, scalars = block.staged.piece.work, block.staged.piece.work.scalars
    magnitude = block.tensor("m_magnitude")
    old = magnitude.clone()
    largest = [
        magnitude_of(averaged(gradient, indices, old, levels, scalars.beta1))
        for _, _, gradient, indices in block.parts()
    ]
    magnitude.copy_(torch.stack(largest).amax(0))
    stepsize = None if work.factored else _block_stepsize(block)
    for first, last, gradient, indices in block.parts():
        momentum = averaged(gradient, indices, old, levels, scalars.beta1)
        indices.copy_(quantise(momentum, magnitude, levels))
        momentum = dequantise(indices, magnitude, levels, gradient.dtype)
        update = momentum.mul_(_factored_stepsize(block, first, last) if stepsize is None else stepsize)
        parameter = flat.read(work.parameter, first, last).view(1, -1)
        apply(parameter, update, scalars)
        flat.write(work.parameter, first, parameter.view(-1))


def _block_stepsize(block: _Block) -> Tensor:
    scalars = block.staged.piece.work.scalars
    vmean = block.tensor("vmean")
    squares = [_sum_of_squares(gradient) for _, _, gradient, _ in block.parts()]
    mean = torch.stack(squares).sum(0).div_(block.staged.piece.work.period)
    if block.staged.piece.work.gradient.dtype is torch.bfloat16:
        mean = mean.bfloat16()
    update_blocks(vmean, mean, scalars.beta2)
    return block_stepsize(vmean, scalars.bias1, scalars.bias2, scalars.eps)


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """g^2, rounded to bfloat16 for bfloat16, summed in float32, or in float64 for float64: (1, 1)."""
    wide = gradient.float() if gradient.dtype is torch.float16 else gradient
    square = wide.square()
    return square.sum(1, keepdim=True, dtype=torch.float64 if gradient.dtype is torch.float64 else torch.float32)


def _factored_stepsize(block: _Block, first: int, last: int) -> Tensor:
    scalars, tensors = block.staged.piece.work.scalars, block.staged.tensors
    square = factored_square(tensors["v_row"], tensors["v_col"], first, last)
    return factored_stepsize(square, scalars.bias1, scalars.bias2, scalars.eps).view(1, -1)

"""The quantised momentum, and the step it makes: pure functions, to the bit.

Everything works on a matrix of blocks, (blocks, period), with one magnitude a row, (blocks, 1). Arithmetic is done in
the wide dtype: float64 for float64 gradients, float32 for all others. The order of the operations is the definition:
algebraically equal forms do not give equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gefen_offload.optim.codebook import nearest_level
from gefen_offload.optim.work import Scalars


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What arithmetic on `dtype` is done in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def dequantise(indices: Tensor, magnitude: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """The levels, rounded to the gradient's `dtype`, times the blocks' magnitudes, in the wide dtype."""
    wide = wide_dtype(dtype)
    picked = levels.to(dtype).to(wide).index_select(0, indices.reshape(-1).int()).view(indices.shape)
    return picked.mul_(magnitude.to(wide))


def averaged(gradient: Tensor, indices: Tensor, magnitude: Tensor, levels: Tensor, beta1: float) -> Tensor:
    """lerp(m, g, 1 - beta1), in the wide dtype, of the momentum that is stored."""
    momentum = dequantise(indices, magnitude, levels, gradient.dtype)
    return momentum.lerp_(gradient.to(momentum.dtype), 1 - beta1)


def magnitude_of(momentum: Tensor) -> Tensor:
    """The largest magnitude of each block, float32 (blocks, 1)."""
    return momentum.abs().amax(1, keepdim=True).float()


def quantise(momentum: Tensor, magnitude: Tensor, levels: Tensor) -> Tensor:
    """The indices, uint8, of the levels nearest to momentum / magnitude; that is 0 where the magnitude is."""
    quotient = (momentum / magnitude.to(momentum.dtype)).masked_fill_(magnitude == 0, 0)
    return nearest_level(quotient, levels)


def apply(parameter: Tensor, update: Tensor, scalars: Scalars) -> None:
    """p = p (1 - lr wd), rounded; then p - lr update, rounded once. In place; overwrites `update`."""
    parameter.mul_(scalars.decay)
    wide = torch.promote_types(parameter.dtype, update.dtype)
    parameter.copy_(parameter.to(wide).sub(update.mul_(scalars.lr)))

"""The second moment: one value a block, or a row and a column vector."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gefen_offload.optim.work import PIECE_ELEMENTS

TINY = torch.finfo(torch.float32).tiny


def block_mean_square(gradient: Tensor) -> Tensor:
    """Mean of g^2 over each row of `gradient` (blocks, period): (blocks, 1).

    float32 for float32 and float16 gradients, float64 for float64; for bfloat16 both g^2 and the mean are rounded to
    bfloat16.
    """
    wide = gradient.float() if gradient.dtype is torch.float16 else gradient
    return wide.square().mean(1, keepdim=True)


def update_blocks(vmean: Tensor, mean_square: Tensor, beta2: float) -> None:
    """v = beta2 v + (1 - beta2) mean(g^2), in place; float32."""
    vmean.mul_(beta2).add_(mean_square, alpha=1 - beta2)


def update_factors(v_row: Tensor, v_col: Tensor, gradient: Tensor, beta2: float) -> None:
    """The row and column averages of g^2, in place, from the flat gradient of a (rows, cols) parameter; float32.

    A gradient of at most PIECE_ELEMENTS elements is taken in one go; a larger one in parts, so that the memory stays
    bounded: each row's mean is then a mean over parts of the row, each column's a sum over parts of the column.
    """
    matrix = gradient.view(v_row.numel(), v_col.numel())
    if gradient.numel() <= PIECE_ELEMENTS:
        square = matrix.float().square()
        row, col = square.mean(1), square.mean(0)
    else:
        row, col = _means_in_parts(matrix)
    v_row.mul_(beta2).add_(row, alpha=1 - beta2)
    v_col.mul_(beta2).add_(col, alpha=1 - beta2)


def _means_in_parts(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = matrix.shape
    row = torch.zeros(rows, dtype=torch.float32, device=matrix.device)
    col = torch.zeros(cols, dtype=torch.float32, device=matrix.device)
    for c0, c1 in _ranges(cols, PIECE_ELEMENTS):
        for r0, r1 in _ranges(rows, max(1, PIECE_ELEMENTS // (c1 - c0))):
            square = matrix[r0:r1, c0:c1].float().square()
            row[r0:r1] += square.sum(1)
            col[c0:c1] += square.sum(0)
    return row.div_(cols), col.div_(rows)


def _ranges(length: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(0, length, step):
        yield first, min(first + step, length)


def block_stepsize(vmean: Tensor, bias1: float | Tensor, bias2: float | Tensor, eps: float) -> Tensor:
    """(1/bc1) / (sqrt(v)/sqrt(bc2) + eps), one value a block."""
    return vmean.sqrt().div_(bias2**0.5).add_(eps).reciprocal_().mul_(1 / bias1)


def factored_square(v_row: Tensor, v_col: Tensor, first: int, last: int) -> Tensor:
    """Elements [first, last), row-major, of V = outer(r, c) / max(mean(r), float32 tiny): float32, 1-D."""
    cols = v_col.numel()
    top, bottom = first // cols, -(-last // cols)
    square = torch.outer(v_row[top:bottom], v_col).view(-1)[first - top * cols : last - top * cols]
    return square.div_(v_row.mean().clamp_min_(TINY))


def factored_stepsize(square: Tensor, bias1: float | Tensor, bias2: float | Tensor, eps: float) -> Tensor:
    """(1/bc1) / (sqrt(V/bc2) + eps), one value an element; overwrites `square`."""
    return square.div_(bias2).sqrt_().add_(eps).reciprocal_().mul_(1 / bias1)

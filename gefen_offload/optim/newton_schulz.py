"""Newton-Schulz: a matrix with the same singular vectors whose singular values are all near one, in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Quintic = tuple[float, float, float]

QUINTIC: Quintic = (3.4445, -4.7750, 2.0315)
STEPS = 5
LR_ADJUSTMENTS = (None, "original", "match_rms_adamw")


def orthogonalise(matrix: Tensor, steps: Sequence[Quintic], eps: float) -> Tensor:
    """Apply x -> a x + b x^3 + c x^5, once for each (a, b, c), to the singular values of a matrix scaled by its norm.

    The norm is the Frobenius norm, at least `eps`. Everything is in bfloat16, the wide side across, and the result,
    (rows, cols), may be a transposed view. A matrix that is not finite gives NaNs.
    """
    x = _scaled(matrix, eps)
    for a, b, c in steps:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if _is_tall(matrix) else x


def orthogonalise_together(matrices: Sequence[Tensor], steps: Sequence[Quintic], eps: float) -> list[Tensor]:
    """The same of several matrices of one shape in batched products, whose sums may be taken in another order."""
    x = torch.stack([_scaled(matrix, eps) for matrix in matrices])
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return list((x.mT if _is_tall(matrices[0]) else x).unbind())


def _scaled(matrix: Tensor, eps: float) -> Tensor:
    x = matrix.to(torch.bfloat16)
    x = x.T if _is_tall(matrix) else x
    norm: Tensor = x.norm()
    return x / norm.clamp(min=eps)


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def schedule_of(coefficients: Quintic | Sequence[Quintic], steps: int) -> Sequence[Quintic]:
    """The (a, b, c) of each step: one triple `steps` times, or the listed ones."""
    first = coefficients[0]
    if isinstance(first, Sequence):
        return coefficients  # type: ignore[return-value]
    return [coefficients] * steps  # type: ignore[list-item]


def lr_ratio(adjustment: str | None, rows: int, cols: int) -> float:
    """What the learning rate of a (rows, cols) matrix is multiplied by.

    sqrt(max(1, rows / cols)), or 0.2 sqrt(max(rows, cols)) with "match_rms_adamw", which makes the root mean square of
    an update that of AdamW's.
    """
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


def check_schedule(name: str, value: object) -> None:
    """Raise a ValueError naming the option where `value` is not a list of (a, b, c) with at least one."""
    if isinstance(value, str):
        raise ValueError(f"{name}={value!r}: named schedules are not known here; give the list of (a, b, c) itself")
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"{name} must be a list of (a, b, c), not {value!r}")
    for step in value:
        check_quintic(name, step)


def check_quintic(name: str, value: object) -> None:
    """Raise a ValueError naming the option where `value` is not three finite numbers."""
    numbers = isinstance(value, Sequence) and len(value) == 3 and all(map(_is_finite, value))
    if not numbers:
        raise ValueError(f"{name} must hold three finite numbers (a, b, c), not {value!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

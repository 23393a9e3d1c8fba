"""Which matrices Newton-Schulz takes together: small ones of one shape, where that gives the bits of one by one.

One by one, small matrices leave a GPU waiting for launches. Whether a batched product adds in the order of a single one
is the library's choice, by shape and number; it does not depend on the values. So each shape and number is tried once,
on random matrices, and taken together only if not one bit differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gefen_offload.optim import newton_schulz
from gefen_offload.optim.newton_schulz import Quintic

ELEMENTS = 2**23  # of a batch: above, products are large enough by themselves, and their memory counts
BATCHED_ON = {"cuda"}  # a CPU has no launches to save

_tried: dict[tuple[torch.device, torch.Size, int, int], bool] = {}


def most_together(elements: int) -> int:
    """How many matrices of so many elements may be taken together, at most."""
    return max(1, ELEMENTS // max(1, elements))


def orthogonalised(matrices: Sequence[Tensor], steps: Sequence[Quintic], eps: float) -> list[Tensor]:
    """`newton_schulz.orthogonalise` of each of these matrices of one shape, in their order, to the bit."""
    if len(matrices) > 1 and _same_together(matrices, steps, eps):
        return newton_schulz.orthogonalise_together(matrices, steps, eps)
    return [newton_schulz.orthogonalise(matrix, steps, eps) for matrix in matrices]


def _same_together(batch: Sequence[Tensor], steps: Sequence[Quintic], eps: float) -> bool:
    """Whether as many matrices of this shape have the bits of one by one."""
    first = batch[0]
    if first.device.type not in BATCHED_ON:
        return False
    key = (first.device, first.shape, len(batch), len(steps))
    if key not in _tried:
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # the answer would have to be read on the host
        _tried[key] = _try(key, steps, eps)
    return _tried[key]


def _try(key: tuple[torch.device, torch.Size, int, int], steps: Sequence[Quintic], eps: float) -> bool:
    device, shape, count, _ = key
    draw = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(shape, generator=draw, device=device).to(torch.bfloat16) for _ in range(count)]
    together = newton_schulz.orthogonalise_together(drawn, steps, eps)
    return all(torch.equal(newton_schulz.orthogonalise(m, steps, eps), t) for m, t in zip(drawn, together, strict=True))

"""What the published optimizer decides on its first step."""

from __future__ import annotations

from collections.abc import Sequence

import gefen
import torch
from torch import Tensor

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def published_first_step(gradients: Sequence[Tensor]) -> tuple[list[int], Tensor]:
    """The period of each gradient, and the codebook learnt from all of them."""
    parameters = [torch.zeros_like(g).requires_grad_() for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer = gefen.Gefen(parameters, lr=1e-3, fused=False)
    optimizer.step()
    periods = [optimizer.state[p]["automatic_period"] for p in parameters]
    return periods, optimizer.state_dict()["gefen_codebook"]


def drawn_gradient(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A gradient of one of several characters, chosen by the seed: even, heavy-tailed, sparse, log-normal or sorted."""
    draw = torch.Generator().manual_seed(seed)
    gradient = torch.randn(shape, generator=draw, dtype=torch.float64) * 10.0 ** (seed % 7 - 5)
    match seed % 5:
        case 1:
            gradient = gradient**3
        case 2:
            gradient[torch.rand(shape, generator=draw) < 0.9] = 0
        case 3:
            gradient = gradient * (torch.rand(shape, generator=draw, dtype=torch.float64) * 10).exp()
        case 4:
            gradient = gradient.flatten().sort().values.view(shape)
    return gradient.to(dtype)

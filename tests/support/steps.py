"""Parameters, gradients and optimizers for tests that step without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES: tuple[tuple[int, ...], ...] = (
    (64, 32),
    (48,),
    (),
    (5,),
    (7, 13),
    (4, 3, 8),
    (33,),
    (128, 96),
    (1, 16),
    (16, 1),
    (0, 4),
)


def dtype_id(dtype: torch.dtype) -> str:
    """The dtype's name, for test ids."""
    return str(dtype).removeprefix("torch.")


def parameters(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES, device: Any = "cpu", seed: int = 0
) -> list[nn.Parameter]:
    """Parameters drawn on the CPU from `seed`: equal bits on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def named(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors as `named_parameters()` would give them: p0, p1 and on."""
    return [(f"p{i}", tensor) for i, tensor in enumerate(tensors)]


def set_gradients(tensors: Sequence[Tensor], step: int, seed: int = 0, without: Sequence[int] = ()) -> None:
    """Give every parameter the gradient of this step, drawn on the CPU; None for positions in `without`.

    Scales differ from step to step by a factor of ten, so that magnitudes grow and shrink.
    """
    generator = torch.Generator().manual_seed(1000 * seed + step)
    scale = 0.1 if step % 7 == 0 else 0.01
    for position, tensor in enumerate(tensors):
        gradient = (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.device, tensor.dtype)
        tensor.grad = None if position in without else gradient


def differing(a: Any, b: Any, path: str = "") -> str | None:
    """Where two nested values first differ, bit for bit with dtype and shape; None where they do not."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return None if _same_bits(a, b) else f"{path}: {a!r} is not {b!r}"
    if isinstance(a, dict) and isinstance(b, dict):
        if set(a) != set(b):
            return f"{path}: keys {sorted(map(str, a))} are not {sorted(map(str, b))}"
        found = (differing(a[key], b[key], f"{path}.{key}") for key in a)
        return next((difference for difference in found if difference), None)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return f"{path}: {len(a)} items are not {len(b)}"
        found = (differing(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((difference for difference in found if difference), None)
    return None if type(a) is type(b) and a == b else f"{path}: {a!r} is not {b!r}"


def _same_bits(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def snapshot(value: Any) -> Any:
    """The same nested value with its tensors copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    return [snapshot(item) for item in value] if isinstance(value, (list, tuple)) else value

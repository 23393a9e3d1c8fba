"""Real text that is on every machine: the source of the Python standard library, as bytes."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
_MODULES = (
    "argparse",
    "ast",
    "dataclasses",
    "datetime",
    "decimal",
    "doctest",
    "inspect",
    "pathlib",
    "random",
    "typing",
)


@cache
def corpus() -> Tensor:
    """The modules' source, one byte a token: uint8. It differs between Python versions, not runs."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [library / f"{name}.py" for name in _MODULES]
    text = b"\n".join(path.read_bytes() for path in sources if path.exists())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(seed: int, size: int, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """`size` windows of `length` tokens and their next tokens, drawn by `seed` alone: int64, (size, length) each."""
    text = corpus()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
    windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long().to(device)
    return windows[:, :-1], windows[:, 1:]

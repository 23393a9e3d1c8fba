"""Matrices whose momentum the fused kernels and the plain path of GefenMuon move on, and how far apart the results are.

`python -m support.interpreted support.momenta` compares the small cases on the CPU, one JSON object a line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from gefen_offload import GefenMuon
from gefen_offload.optim.fused.momentum import FusedMomentum
from gefen_offload.optim.muon import momentum_step
from gefen_offload.ranks import identical
from support.fused import DTYPES, levels_on


@dataclass(frozen=True)
class Case:
    """`blocks` blocks of `period` elements."""

    blocks: int
    period: int
    momentum: float = 0.95
    nesterov: bool = True

    @property
    def name(self) -> str:
        """For a test id."""
        plain = "" if self.nesterov else "-plain"
        return f"{self.blocks}x{self.period}-{self.momentum}{plain}"


SMALL = (  # of whole vectors: for the elements after the last one torch sums otherwise on the CPU
    Case(6, 1024),
    Case(5, 384, nesterov=False),
    Case(300, 8),
    Case(1536, 1, momentum=0.3),
    Case(32, 1031),
    Case(1, 4096),
    Case(7, 128, momentum=0.0),
    Case(8, 256, momentum=0.2),
)
LARGE = (Case(4096, 2048), Case(64, 11008), Case(2**16, 8), Case(3, 9001), Case(2, 2**20))


def drawn(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """A gradient and a momentum; the first block of both is zero, and the last one's momentum is."""
    draw = torch.Generator().manual_seed(case.blocks)
    shape = (case.blocks, case.period)
    gradient = torch.randn(shape, generator=draw).pow(3).mul(1e-3)
    magnitude = torch.rand(case.blocks, 1, generator=draw) * 1e-3
    if case.blocks > 1:
        gradient[0], magnitude[0], magnitude[-1] = 0, 0, 0
    indices = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    return {"gradient": gradient.to(device, dtype), "indices": indices.to(device), "magnitude": magnitude.to(device)}


def compare(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Whether indices, magnitudes and updates have the plain path's bits."""
    levels, fused = levels_on(device), FusedMomentum()
    ours, theirs = drawn(case, dtype, device), drawn(case, dtype, device)
    options = (levels, case.momentum, case.nesterov)
    updates = []
    for _ in range(2):
        flat = fused(ours["gradient"].view(-1), ours["indices"], ours["magnitude"], *options)
        plain = momentum_step(theirs["gradient"], theirs["indices"], theirs["magnitude"], *options)
        updates.append(torch.equal(flat.view(plain.shape), plain.to(torch.bfloat16)))
    return {
        "name": f"{str(dtype).removeprefix('torch.')}-{case.name}",
        "indices": int((ours["indices"] != theirs["indices"]).sum()),
        "magnitudes": torch.equal(ours["magnitude"], theirs["magnitude"]),
        "updates": all(updates),
    }


def train(dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Whether GefenMuon steps matrices of two shapes, one of them all zeros, with the same bits either way."""
    found = []
    for fused in (None, True):
        draw = torch.Generator().manual_seed(3)
        matrices = [torch.nn.Parameter(torch.randn(n, 64, generator=draw).to(device, dtype)) for n in (32, 96, 32)]
        optimizer = GefenMuon(matrices, lr=1e-2, fused=fused)
        for _ in range(3):
            for number, matrix in enumerate(matrices):
                matrix.grad = torch.randn(matrix.shape, generator=draw).mul(number).to(device, dtype)
            optimizer.step()
        found.append((matrices, optimizer.state_dict()))
    return {"name": f"{str(dtype).removeprefix('torch.')}-training", "same": bool(identical(*found))}


if __name__ == "__main__":
    for kind in DTYPES:
        print(json.dumps(train(kind, torch.device("cpu"))), flush=True)
    for each in SMALL:
        for kind in DTYPES:
            print(json.dumps(compare(each, kind, torch.device("cpu"))), flush=True)

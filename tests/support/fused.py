"""Pieces to step with the fused kernels and with the plain path, and how far apart the results are.

`python -m support.interpreted support.fused` compares every case on the CPU and prints one JSON object a line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from gefen_offload.optim.fused.update import FusedUpdate
from gefen_offload.optim.update import plain_update
from gefen_offload.optim.work import Piece, Scalars, StagedPiece, Work

WHOLE = ("v_row", "v_col")


@dataclass(frozen=True)
class Case:
    """A parameter, its period, and the kind of second moment."""

    shape: tuple[int, ...]
    period: int
    factored: bool = False
    decay: float = 0.1
    beta1: float = 0.9
    untouched: bool = False  # gradient and state are zero, as for an embedding that no step has used yet

    @property
    def name(self) -> str:
        """For a test id."""
        kind = "factored" if self.factored else "block"
        shape = "x".join(map(str, self.shape))
        return (
            f"{shape}-{self.period}-{kind}"
            + ("" if self.decay else "-no_decay")
            + f"-{self.beta1}" * (self.beta1 != 0.9)
            + "-untouched" * self.untouched
        )


SMALL = (
    Case((4, 32), 1),
    Case((64,), 8),
    Case((96,), 12),
    Case((40, 48), 48, decay=0.0),
    Case((40, 48), 48, factored=True),
    Case((40, 48), 96, factored=True),
    Case((48, 20), 15, factored=True, beta1=0.3),
    Case((64, 1), 8, factored=True),
    Case((16, 16), 1, factored=True),
    Case((2, 9000), 9000),
    Case((4, 4608), 9216, factored=True),
    Case((1, 9001), 9001, factored=True),
    Case((64, 512), 2**14, factored=True),  # blocks of whole tiles of the pass for row and column sums
    Case((96,), 12, untouched=True),
    Case((40, 48), 48, factored=True, untouched=True),
    Case((48, 20), 15, factored=True, untouched=True),
    Case((4, 4608), 9216, factored=True, untouched=True),
)

LARGE = (
    Case((1 << 18,), 1),
    Case((1 << 18,), 8),
    Case((640, 2048), 2048),
    Case((640, 2048), 2048, factored=True),
    Case((64, 8192), 8192, factored=True, decay=0.0),
    Case((480, 20), 15, factored=True),
    Case((20, 9000), 9000),
    Case((30, 9001), 9001, factored=True),
    Case((131, 4096), 131 * 1024, factored=True),
    Case((1024, 2048), 2**19, factored=True),
    Case((96, 2048), 3 * 2**14),
    Case((6, 50304), 2 * 50304, factored=True),
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def levels_on(device: torch.device) -> Tensor:
    """A codebook, with levels that repeat at its end."""
    draw = torch.Generator().manual_seed(1)
    levels = torch.randn(256, generator=draw).mul(0.3).clamp(-1, 1).sort().values
    levels[0], levels[-4:-1], levels[-1] = -1, levels[-5], 1
    return levels.to(device)


def pieces_of(case: Case, dtype: torch.dtype, device: torch.device, blocks: int | None = None) -> list[StagedPiece]:
    """The case's parameter with a gradient and state, in pieces of `blocks` blocks; the same on every call."""
    draw = torch.Generator().manual_seed(2)
    n, step = torch.Size(case.shape).numel(), 3
    count = n // case.period
    uniform = {
        "m_magnitude": torch.rand(count, 1, generator=draw) * 1e-3,
        "vmean": torch.rand(count, 1, generator=draw) * 1e-6,
        "v_row": torch.rand(case.shape[0], generator=draw) * 1e-6,
        "v_col": torch.rand(case.shape[-1], generator=draw) * 1e-6,
    }
    uniform.pop("vmean") if case.factored else [uniform.pop(name) for name in WHOLE]
    tensors = {name: tensor.to(device) for name, tensor in uniform.items()}
    tensors["m_codebook"] = torch.randint(0, 256, (count, case.period), generator=draw, dtype=torch.uint8).to(device)
    parameter = torch.randn(case.shape, generator=draw).to(device, dtype)
    gradient = (torch.randn(n, generator=draw) * 1e-3).to(device, dtype)
    if case.untouched:
        for tensor in (gradient, *(tensors[name] for name in uniform)):
            tensor.zero_()
    scalars = Scalars(1e-2, case.beta1, 0.999, 1e-8, 1 - 1e-2 * case.decay, 1 - case.beta1**step, 1 - 0.999**step)
    work = Work(parameter, gradient, {}, {}, case.name, case.period, count, case.factored, scalars)
    step_by = blocks or count
    return [
        StagedPiece(
            Piece(work, first, min(first + step_by, count)),
            {name: t if name in WHOLE else t[first : first + step_by] for name, t in tensors.items()},
        )
        for first in range(0, count, step_by)
    ]


def values_of(pieces: list[StagedPiece]) -> dict[str, Tensor]:
    """The parameter and the state of one parameter's pieces, on the CPU."""
    joined = {
        name: pieces[0].tensors[name] if name in WHOLE else torch.cat([piece.tensors[name] for piece in pieces])
        for name in pieces[0].tensors
    }
    return {name: t.cpu() for name, t in ({"parameter": pieces[0].piece.work.parameter} | joined).items()}


def compare(case: Case, dtype: torch.dtype, device: torch.device, fused: FusedUpdate) -> dict[str, float | str | bool]:
    """Step a case on both paths, and on the fused one in pieces as well."""
    levels = levels_on(device)
    whole, plain = pieces_of(case, dtype, device), pieces_of(case, dtype, device)
    old = values_of(plain)
    cut = pieces_of(case, dtype, device, blocks=max(1, plain[0].piece.work.blocks // 3))
    fused(whole, levels)
    plain_update(plain, levels)
    for piece in cut:
        fused([piece], levels)
    ours, theirs, in_pieces = values_of(whole), values_of(plain), values_of(cut)
    return {
        "name": f"{str(dtype).removeprefix('torch.')}-{case.name}",
        "indices": int((ours["m_codebook"] != theirs["m_codebook"]).sum()),
        "magnitudes": float((ours["m_magnitude"] - theirs["m_magnitude"]).abs().max()),
        "moments": max(_relative(ours[name], theirs[name]) for name in ours if name.startswith("v")),
        "update": _update_error(old["parameter"], ours["parameter"], theirs["parameter"]),
        "same_when_cut": all(torch.equal(ours[name], in_pieces[name]) for name in ours),
    }


def _relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).abs() / b.abs().clamp_min(1e-30)).max())


def _update_error(old: Tensor, a: Tensor, b: Tensor) -> float:
    """The largest difference of the parameters, in last places of their dtype at the size of the old one.

    Two float32 last places of the update are at most two of the parameter where the update is the smaller.
    """
    size = torch.maximum(old.double().abs(), b.double().abs()).clamp_min(1e-2)
    return float(((a.double() - b.double()).abs() / (size * torch.finfo(a.dtype).eps)).max())


if __name__ == "__main__":
    cpu = torch.device("cpu")
    update = FusedUpdate(cpu)
    for each in SMALL:
        for kind in DTYPES:
            print(json.dumps(compare(each, kind, cpu, update)), flush=True)

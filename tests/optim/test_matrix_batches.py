"""Matrices of one shape are orthogonalised together only where that has the bits of one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gefen_offload import GefenMuon
from gefen_offload.optim import matrix_batches, newton_schulz
from gefen_offload.optim.newton_schulz import QUINTIC, orthogonalise, orthogonalise_together
from gefen_offload.ranks import identical

STEPS = [QUINTIC] * 5
SHAPES = ((64, 64), (32, 16), (24, 64), (100, 30), (300, 200))
EACH = 5


@pytest.fixture
def batched_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is asked too, and nothing has been tried yet."""
    monkeypatch.setattr(matrix_batches, "BATCHED_ON", {"cpu"})
    monkeypatch.setattr(matrix_batches, "_tried", {})


def drawn(shape: tuple[int, int], count: int = EACH) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw) for _ in range(count)]


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
def test_together_is_the_same_iteration(shape: tuple[int, int]) -> None:
    """A batched product gives what single ones do, up to the order of bfloat16 sums."""
    matrices = drawn(shape)
    for matrix, together in zip(matrices, orthogonalise_together(matrices, STEPS, 1e-7), strict=True):
        assert together.shape == shape
        torch.testing.assert_close(together, orthogonalise(matrix, STEPS, 1e-7), rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("batched_here")
@pytest.mark.parametrize("off", [0.0, 2.0**-7], ids=["same-bits", "other-bits"])
def test_other_bits_are_not_taken(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    """A batch is used if it has the bits of one by one, which is found out once, and not if it has not."""
    used = []

    def together(matrices: Any, steps: Any, eps: float) -> list[Tensor]:
        used.append(len(matrices))
        return [orthogonalise(matrix, steps, eps) * (1 + off) for matrix in matrices]

    monkeypatch.setattr(newton_schulz, "orthogonalise_together", together)
    matrices = drawn((12, 8))
    for _ in range(2):
        found = matrix_batches.orthogonalised(matrices, STEPS, 1e-7)
        identical([orthogonalise(matrix, STEPS, 1e-7) for matrix in matrices], found).check()
    assert used == ([EACH] if off else [EACH] * 3)  # the trial, and each use


def stepped(device: torch.device, elements: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Parameters after three steps, with batches of at most so many elements."""
    with monkeypatch.context() as patch:
        patch.setattr(matrix_batches, "ELEMENTS", elements)
        draw = torch.Generator().manual_seed(2)
        parameters = [nn.Parameter(torch.randn(s, generator=draw).to(device)) for _ in range(EACH) for s in SHAPES]
        groups = [{"params": parameters[:7], "ns_steps": 3}, {"params": parameters[7:]}]
        optimizer = GefenMuon(groups, lr=1e-2)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(device)
            optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters]


@pytest.mark.usefixtures("batched_here")
def test_steps_are_those_without_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many matrices a batch may have, the parameters are the same to the bit; groups are not mixed."""
    alone, together = (stepped(torch.device("cpu"), elements, monkeypatch) for elements in (1, 2**16))
    identical(alone, together).check()
    tried = {(shape, count, steps) for _, shape, count, steps in matrix_batches._tried}
    assert ((64, 64), 3, 5) in tried  # of the five, the other two are in the group with three steps
    assert not any(shape == (300, 200) for shape, _, _ in tried)  # too large for two


def step_on_a_gpu(context: Any) -> dict[tuple[int, ...], bool]:
    """Worker: which shapes were taken together; the parameters are compared here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_batches, "_tried", {})
        alone, together = (stepped(context.device, elements, patch) for elements in (1, matrix_batches.ELEMENTS))
        identical(alone, together).check()
        return {tuple(shape): same for (_, shape, _, steps), same in matrix_batches._tried.items() if steps == 5}


@pytest.mark.gpu1
def test_steps_are_those_without_batches_on_a_gpu(ranks: Any) -> None:
    """The same on CUDA, where small matrices are taken together."""
    taken = ranks.run(step_on_a_gpu).values[0]
    assert set(taken) == set(SHAPES)
    assert taken[64, 64]

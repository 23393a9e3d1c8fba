"""The plain path on a GPU: reproducible, bounded in memory, close to the published optimizer, and mixed devices."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from gefen_offload import Gefen
from support.steps import DTYPES, differing, dtype_id, named, parameters, set_gradients

SHAPES = ((64, 32), (48,), (), (7, 13), (4, 3, 8), (257, 129), (0, 4), (1000, 1100))


def trained(device, dtype, steps=4, optimizer_class=Gefen, **options):
    """Parameters after some steps of the plain path, and their optimizer."""
    tensors = parameters(dtype, SHAPES, device)
    optimizer = optimizer_class(named(tensors), lr=0.1, weight_decay=0.1, fused=False, **options)
    for step in range(steps):
        set_gradients(tensors, step)
        optimizer.step()
    return tensors, optimizer


def twice(context, dtype, factored):
    """In a rank: where two equal runs differ."""
    first, second = (trained(context.device, dtype, factored_v_2d=factored) for _ in range(2))
    return [differing(first[0], second[0]), differing(first[1].state_dict(), second[1].state_dict())]


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_two_runs_are_equal(ranks, dtype, factored):
    """The same inputs on the same GPU give the same bits, periods and codebook included."""
    assert ranks.run(twice, dtype, factored).values == [[None, None]]


def beside_the_cpu(context, dtype, factored):
    """In a rank: the largest difference from the CPU's parameters, in units of the rate, and the periods."""
    (gpu, there), (cpu, here) = (trained(d, dtype, steps=1, factored_v_2d=factored) for d in (context.device, "cpu"))
    periods = [[o.state[p].get("automatic_period") for p in t if p in o.state] for t, o in ((gpu, there), (cpu, here))]
    pairs = [(a.detach().cpu().double(), b.detach().double()) for a, b in zip(gpu, cpu, strict=True) if a.numel()]
    worst = max(float((a - b).abs().max()) for a, b in pairs)
    return periods, worst / 0.1


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_beside_the_cpu(ranks, dtype, factored):
    """One step on a GPU finds the CPU's periods, and moves parameters as far, but for rounding."""
    ((gpu, cpu), worst) = ranks.run(beside_the_cpu, dtype, factored).values[0]
    assert gpu == cpu
    assert worst < (0.4 if dtype is torch.bfloat16 else 0.1)  # of the rate: an index off by one level


def peak_memory(context, dtype, factored):
    """In a rank: MiB allocated during a step above what was held before it, after the first."""
    tensors = parameters(dtype, [(4096, 2048), (2048,), (64,), (3, 2**22)], context.device)
    optimizer = Gefen(tensors, fused=False, factored_v_2d=factored)
    peaks = []
    for step in range(3):
        set_gradients(tensors, step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - held) / 2**20)
    return peaks


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_transient_memory(ranks, dtype, factored):
    """A step takes at most 64 MiB above what it holds, and the first one that much above the new state."""
    first, *later = ranks.run(peak_memory, dtype, factored).values[0]
    assert max(later) <= 64
    assert first <= 64 + 22


def scaled(context):
    """In a rank: mixed-precision training with GradScaler through an overflow; losses, steps and scales."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(context.device)
    optimizer = Gefen(model.named_parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=1000)
    x = torch.randn(64, 16, device=context.device)
    scales, losses = [], []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(x) - x[:, :4]).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    skipped = sum(b < a for a, b in pairwise([2.0**40, *scales]))
    return skipped, optimizer.state_dict()["gefen_global_step"], losses


@pytest.mark.gpu1
def test_mixed_precision_with_a_scaler(ranks):
    """Steps that overflow do not count, and the loss falls."""
    skipped, steps, losses = ranks.run(scaled).values[0]
    assert skipped > 0
    assert steps == 60 - skipped
    assert losses[-1] < losses[0] / 3


def mixed_devices(context):
    """In a rank: parameters on the CPU and on the GPU in one optimizer, refreshed, saved and loaded."""
    tensors = parameters(shapes=[(16, 8), (24,)], device=context.device) + parameters(shapes=[(16, 8), (24,)])
    optimizer = Gefen(tensors, codebook_refresh_every=2)
    for step in range(5):
        set_gradients(tensors, step)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    set_gradients(tensors, 5)
    optimizer.step()
    return [optimizer.state[t]["m_codebook"].device.type for t in tensors]


@pytest.mark.gpu1
def test_parameters_on_several_devices(ranks):
    """Each parameter's state lies beside it, and one codebook serves all."""
    assert ranks.run(mixed_devices).values[0] == ["cuda", "cuda", "cpu", "cpu"]

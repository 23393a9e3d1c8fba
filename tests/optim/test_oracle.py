"""Against gefen-x 0.5.0, the published optimizer, on the CPU: equal to the bit where a parameter is one piece."""

from __future__ import annotations

import gefen
import pytest
import torch

from gefen_offload import Gefen
from support.steps import DTYPES, SHAPES, differing, dtype_id, named, parameters, set_gradients

FEW = ((16, 12), (24,), (), (5,), (3, 5), (2, 3, 4))  # the published solver takes seconds for many elements


def run(dtype, *, steps, skip=lambda step: (), shapes=FEW, grouped=False, **options):
    """Step both optimizers on the same gradients; return where they first differ."""
    theirs, ours = parameters(dtype, shapes), parameters(dtype, shapes)
    oracle = gefen.Gefen(groups(theirs) if grouped else named(theirs), fused=False, **options)
    optimizer = Gefen(groups(ours) if grouped else named(ours), fused=False, **options)
    for step in range(steps):
        for tensors in (theirs, ours):
            set_gradients(tensors, step, without=skip(step))
        oracle.step()
        optimizer.step()
        difference = differing(
            [oracle.state_dict(), [p.data for p in theirs]], [optimizer.state_dict(), [p.data for p in ours]]
        )
        if difference:
            return f"step {step}: {difference}"
    return None


def groups(tensors):
    return [
        {"params": named(tensors)[:3], "lr": 0.1, "weight_decay": 0.1},
        {"params": tensors[3:], "beta1": 0.8, "beta2": 0.95, "eps": 1e-4},
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_fifty_steps(dtype, factored):
    """Parameters, indices, magnitudes, second moments, counters and codebook equal the oracle's for fifty steps."""
    shapes = tuple(shape for shape in SHAPES if shape != (128, 96))
    assert run(dtype, steps=50, shapes=shapes, lr=1e-2, weight_decay=0.01, factored_v_2d=factored) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_refresh(dtype, factored):
    """A codebook learnt anew every four steps, with the indices re-quantised, equals the oracle's."""
    assert run(dtype, steps=14, lr=1e-2, codebook_refresh_every=4, factored_v_2d=factored) is None


def test_groups_with_their_own_options():
    """Two groups, one unnamed, with their own rates, decays and betas step as the oracle's do."""
    assert run(torch.float32, steps=10, grouped=True) is None


@pytest.mark.parametrize("refresh", [0, 3], ids=["once", "refreshed"])
def test_gradients_that_are_absent_on_some_steps(refresh):
    """Parameters skip steps, start late or meet no gradient at all, and everything equals the oracle's."""

    def skip(step):
        if step == 3:
            return range(len(FEW))
        return [1, 4] if step % 2 else [2, *([0] if step < 4 else [])]

    assert run(torch.float32, steps=12, skip=skip, codebook_refresh_every=refresh) is None


@pytest.mark.parametrize(
    "options",
    [{"force_1d_period_one": True}, {"period_one_substrings": ("P1", "p5")}],
    ids=["one-dimensional", "by-name"],
)
def test_periods_forced_to_one(options):
    """Parameters forced to blocks of one element, by dimension or by name, equal the oracle's."""
    assert run(torch.float32, steps=5, **options) is None


def test_tensor_lr():
    """A 1-element tensor lr steps as the oracle's does."""
    assert run(torch.float32, steps=5, lr=torch.tensor(0.03), weight_decay=0.1) is None


def test_non_contiguous_parameters():
    """Transposed and strided parameters are taken in row-major order, as the oracle takes them."""

    def build(optimizer_class):
        data = parameters(shapes=[(12, 16), (4, 3, 2, 5), (9, 4)])
        tensors = [
            torch.nn.Parameter(data[0].detach().t()),
            torch.nn.Parameter(data[1].detach().clone(memory_format=torch.channels_last)),
            torch.nn.Parameter(data[2].detach()[::2, 1:]),
        ]
        return tensors, optimizer_class(tensors, lr=0.1, fused=False)

    (theirs, oracle), (ours, optimizer) = build(gefen.Gefen), build(Gefen)
    assert not any(tensor.is_contiguous() for tensor in ours)
    for step in range(5):
        set_gradients(theirs, step)
        set_gradients(ours, step)
        oracle.step()
        optimizer.step()
    assert differing([oracle.state_dict(), theirs], [optimizer.state_dict(), ours]) is None


def test_several_pieces():
    """Where columns are summed in parts, indices equal and parameters stay within 1e-6 lr a step and 4 ulp."""
    lr, steps = 1e-2, 3
    theirs, ours = parameters(shapes=[(1040, 1024)]), parameters(shapes=[(1040, 1024)])
    oracle, optimizer = gefen.Gefen(theirs, lr=lr, fused=False), Gefen(ours, lr=lr, fused=False)
    for step in range(steps):
        set_gradients(theirs, step)
        set_gradients(ours, step)
        oracle.step()
        optimizer.step()
    a, b = theirs[0].data, ours[0].data
    assert torch.equal(oracle.state[theirs[0]]["m_codebook"], optimizer.state[ours[0]]["m_codebook"])
    ulp = torch.nextafter(a.abs(), torch.full_like(a, torch.inf)) - a.abs()
    assert bool(((a - b).abs() <= 1e-6 * lr * steps + 4 * ulp).all())

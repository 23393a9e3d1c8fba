"""Small parameters are stepped together: the bits are those of stepping them one by one."""

from __future__ import annotations

import pytest
import torch

from gefen_offload import Gefen
from gefen_offload.optim import update
from gefen_offload.optim.batching import Batch, batches
from support.allocations import PeakBytes
from support.steps import DTYPES, differing, dtype_id, named, parameters, set_gradients

MANY = ((16, 8),) * 3 + ((24,),) * 3 + ((8, 16), (48,), (), (3,), (3,), (2, 3, 4), (64, 33))


def run(dtype, device="cpu", **options):
    """Five steps of many small parameters; everything that they leave behind."""
    tensors = parameters(dtype, MANY, device)
    groups = [{"params": tensors[::2], "lr": 0.1}, {"params": tensors[1::2], "lr": 0.01, "weight_decay": 0.1}]
    optimizer = Gefen(groups, fused=False, **options)
    for step in range(5):
        set_gradients(tensors, step, without=[step])
        optimizer.step()
    return [t.detach().cpu() for t in tensors], optimizer.state_dict()


def one_by_one(staged, elements=0):
    """Batches of one piece."""
    return (Batch((piece,)) for piece in staged)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_batched_equals_one_by_one(monkeypatch, dtype, factored):
    """With batches of one piece each, every parameter and state tensor has the same bits."""
    together = run(dtype, factored_v_2d=factored)
    monkeypatch.setattr(update, "batches", one_by_one)
    assert differing(together, run(dtype, factored_v_2d=factored)) is None


def compare_on_gpu(context, dtype, factored):
    """In a rank: the batched and the one-by-one run, and where they differ."""
    together = run(dtype, context.device, factored_v_2d=factored)
    original = update.batches
    update.batches = one_by_one
    try:
        return differing(together, run(dtype, context.device, factored_v_2d=factored))
    finally:
        update.batches = original


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_batched_equals_one_by_one_on_a_gpu(ranks, dtype, factored):
    """The same on a GPU, where a reduction's order may depend on the shape it is launched with."""
    assert ranks.run(compare_on_gpu, dtype, factored).values == [None]


def test_what_is_batched():
    """Pieces of one group, age, period and dtype share a batch; a batch ends before it exceeds its size."""
    tensors = parameters(shapes=[(16, 8)] * 5)
    optimizer = Gefen(tensors)
    set_gradients(tensors, 0)
    optimizer.step()
    seen = []
    optimizer._update = lambda staged: seen.extend(
        [len(batch.pieces) for batch in batches(staged, elements)] for elements in (10**6, 2 * 128, 1)
    )
    optimizer.step()
    assert seen == [[5], [2, 2, 1], [1] * 5]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_transient_memory_is_bounded(dtype, factored):
    """A step of large and many small parameters, the first included, allocates at most 64 MiB above its new state."""
    tensors = parameters(dtype, [(3, 2**20), (2**20, 3)] + [(64,)] * 100)
    optimizer = Gefen(tensors, factored_v_2d=factored)
    state = sum(t.numel() for t in tensors) * (1 + 8 / 64) / 2**20
    for step in range(2):
        set_gradients(tensors, step)
        with PeakBytes() as peak:
            optimizer.step()
        assert peak.peak / 2**20 <= 64 + (state if step == 0 else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_blocks_longer_than_a_piece(monkeypatch, dtype, factored):
    """A block stepped in parts has the bits of one stepped whole, but for sums in another order, within 4 ulp."""
    monkeypatch.setattr("gefen_offload.optim.learning.choose_period", lambda *_: 255)
    whole = run_long(dtype, factored)
    for module in ("work", "update", "long_blocks"):
        monkeypatch.setattr(f"gefen_offload.optim.{module}.PIECE_ELEMENTS", 100)
    monkeypatch.setattr("gefen_offload.optim.gefen.PIECE_ELEMENTS", 100)
    parts = run_long(dtype, factored)
    for a, b in zip(whole[0], parts[0], strict=True):
        assert torch.allclose(a, b, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)
    for name in ("m_codebook", "m_magnitude"):
        assert differing(whole[1][name], parts[1][name]) is None
    for name in ("v_row", "v_col") if factored else ("vmean",):
        assert torch.allclose(whole[1][name], parts[1][name], rtol=1e-5, atol=0)


def run_long(dtype, factored):
    """Four steps of a matrix of two blocks."""
    tensors = parameters(dtype, [(30, 17)])
    optimizer = Gefen(named(tensors), lr=0.1, factored_v_2d=factored)
    for step in range(4):
        set_gradients(tensors, step)
        optimizer.step()
    assert optimizer.state[tensors[0]]["m_codebook"].shape == (2, 255)
    return [t.detach() for t in tensors], dict(optimizer.state[tensors[0]])

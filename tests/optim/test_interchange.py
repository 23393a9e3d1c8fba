"""Checkpoints that gefen-x 0.5.0 writes load here, ours load there, and the next ten steps agree to the bit."""

from __future__ import annotations

import io

import gefen
import pytest
import torch

from gefen_offload import Gefen
from support.steps import DTYPES, differing, dtype_id, named, parameters, set_gradients, snapshot

SHAPES = ((16, 12), (24,), (), (2, 3, 4), (0, 2), (5,))
NEVER_GRADED = 5


def build(optimizer_class, dtype=torch.float32, **options):
    """Parameters and their optimizer, in two groups."""
    tensors = parameters(dtype, SHAPES)
    groups = [{"params": named(tensors)[:2], "lr": 0.1}, {"params": tensors[2:], "weight_decay": 0.1}]
    return tensors, optimizer_class(groups, lr=0.01, fused=False, **options)


def train(tensors, optimizer, steps):
    """Step on the gradients of these step numbers."""
    for step in steps:
        set_gradients(tensors, step, without=[NEVER_GRADED])
        optimizer.step()


def written(state_dict):
    """The checkpoint after a file has held it."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(("writer", "reader"), [(gefen.Gefen, Gefen), (Gefen, gefen.Gefen)], ids=["here", "there"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    "options", [{}, {"factored_v_2d": False}, {"codebook_refresh_every": 4}], ids=["factored", "block", "refresh"]
)
def test_ten_more_steps_agree(writer, reader, dtype, options):
    """After six steps of one, its checkpoint goes through a file to the other, and ten more steps of both agree."""
    tensors, optimizer = build(writer, dtype, **options)
    train(tensors, optimizer, range(6))
    others, other = build(reader, dtype, **options)
    for tensor, source in zip(others, tensors, strict=True):
        tensor.data.copy_(source.data)
    other.load_state_dict(written(optimizer.state_dict()))
    train(tensors, optimizer, range(6, 16))
    train(others, other, range(6, 16))
    assert differing([t.data for t in tensors], [t.data for t in others]) is None
    ours, theirs = (o.state_dict() for o in (optimizer, other))
    assert differing(ours["state"], theirs["state"]) is None
    assert differing(ours["gefen_codebook"], theirs["gefen_codebook"]) is None
    assert ours["gefen_global_step"] == theirs["gefen_global_step"] == 16


@pytest.mark.parametrize("factored", [True, False], ids=["factored-to-block", "block-to-factored"])
def test_a_change_of_mode_agrees(factored):
    """Both optimizers, resumed from one checkpoint in the other mode, and then back in its own, agree to the bit."""
    tensors, optimizer = build(gefen.Gefen, factored_v_2d=factored)
    train(tensors, optimizer, range(4))
    saved, values = written(optimizer.state_dict()), [t.detach().clone() for t in tensors]
    for round_, mode in enumerate([not factored, factored]):
        pairs = [build(optimizer_class, factored_v_2d=mode) for optimizer_class in (gefen.Gefen, Gefen)]
        for others, other in pairs:
            for tensor, value in zip(others, values, strict=True):
                tensor.data.copy_(value)
            other.load_state_dict(snapshot(saved))  # gefen-x goes on in the checkpoint's own tensors
            train(others, other, range(4 + 3 * round_, 7 + 3 * round_))
        (theirs, oracle), (ours, mine) = pairs
        assert differing(theirs, ours) is None
        assert differing(oracle.state_dict(), mine.state_dict()) is None
        saved, values = written(mine.state_dict()), [t.detach().clone() for t in ours]


@pytest.mark.parametrize(("writer", "reader"), [(gefen.Gefen, Gefen), (Gefen, gefen.Gefen)], ids=["here", "there"])
def test_device_counters_interchange(writer, reader):
    """A checkpoint with device counters loads into an optimizer without, and the counts go on."""
    tensors, optimizer = build(writer, capturable=True)
    train(tensors, optimizer, range(3))
    others, other = build(reader)
    other.load_state_dict(written(optimizer.state_dict()))
    train(others, other, range(3, 5))
    assert float(other.state[others[0]]["step"]) == float(other.state[others[0]]["factored_step"]) == 5


def test_the_same_entries():
    """Key for key, with its dtype, shape and Python type, our checkpoint has what gefen-x's has."""
    ours, theirs = (build(optimizer_class) for optimizer_class in (Gefen, gefen.Gefen))
    for pair in (ours, theirs):
        train(*pair, range(2))
    assert differing(ours[1].state_dict(), theirs[1].state_dict()) is None

"""torch.distributed.checkpoint's optimizer state dicts under DDP."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from gefen_offload import Gefen
from support.gpt import GPTShape, build
from support.steps import differing, snapshot

SHAPE = GPTShape(width=16, layers=1, length=8, tied=True)


def train(model, optimizer, steps, context):
    """Steps on batches that differ from rank to rank."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        tokens = torch.randint(256, (2, SHAPE.length + 1), generator=generator).to(context.device)
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()


def resumed(context, options):
    """In a rank: three steps, the state taken and set by torch.distributed.checkpoint, and three more of each."""
    model, other = (DistributedDataParallel(build(SHAPE, seed, context.device)) for seed in (0, 1))
    optimizer, second = (Gefen(m.named_parameters(), lr=0.01, weight_decay=0.1) for m in (model, other))
    train(model, optimizer, range(3), context)
    other.load_state_dict(model.state_dict())
    chosen = StateDictOptions(**options)
    saved = snapshot(get_optimizer_state_dict(model, optimizer, options=chosen))
    set_optimizer_state_dict(other, second, saved, options=chosen)
    train(model, optimizer, range(3, 6), context)
    train(other, second, range(3, 6), context)
    return [
        differing(model.state_dict(), other.state_dict()),
        differing(optimizer.state_dict(), second.state_dict()),
        context.digest(model.state_dict()),
    ]


@pytest.mark.gloo2
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}], ids=["plain", "full"])
def test_ddp(ranks, options):
    """A tied model under DDP, resumed from what get_optimizer_state_dict gave, goes on to the bit on both ranks."""
    first, second = ranks.run(resumed, options).values
    assert first == second
    assert first[:2] == [None, None]


@pytest.mark.gpu2
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}], ids=["plain", "full"])
def test_ddp_on_gpus(ranks, options):
    """The same on two GPUs."""
    first, second = ranks.run(resumed, options).values
    assert first == second
    assert first[:2] == [None, None]

"""DeepSpeed ZeRO around our optimizers, on the ranks of a running group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gefen_offload import Gefen, GefenMuon, OffloadUnsupportedError
from support.corpus import batch
from support.gpt import GPTShape, build

SHAPE = GPTShape(width=64, layers=2)
STEPS = 60
TAIL = 15  # a final loss is the mean of this many


def engine(context: Any, stage: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    """A DeepSpeed engine on this group; DeepSpeed is imported here because it patches torch where it is imported."""
    os.environ.update(RANK=str(context.rank), LOCAL_RANK=str(context.rank), WORLD_SIZE=str(context.world))
    if context.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:  # DeepSpeed takes the entries for numbers; CUDA has read the variable already
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(context.world)))
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    # On a new machine the first group would compile DeepSpeed's shared-memory collectives, for minutes, and whoever is
    # killed meanwhile leaves a lock that every later group waits for. The group has Gloo's collectives already.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def wrapped(context: Any, stage: int) -> tuple[Any, Gefen]:
    """The engine and the Gefen inside it."""
    model = build(SHAPE, seed=3, device=context.device)
    optimizer = Gefen(model.parameters(), lr=1e-3)
    return engine(context, stage, optimizer, model), optimizer


def inputs(context: Any, step: int) -> tuple[Tensor, Tensor]:
    return batch(100 * step + context.rank, 4, SHAPE.length, context.device)


def advance(context: Any, running: Any, first: int, last: int) -> list[float]:
    """Train steps [first, last) and return this rank's losses."""
    losses = []
    for step in range(first, last):
        context.mark(f"step {step}")
        loss = running(*inputs(context, step))
        running.backward(loss)
        running.step()
        losses.append(loss.item())
    return losses


def without_wrapper(context: Any) -> list[float]:
    """The same training under DDP alone, with the same optimizer."""
    model = nn.parallel.DistributedDataParallel(build(SHAPE, seed=3, device=context.device))
    optimizer = Gefen(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = model(*inputs(context, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@dataclass(frozen=True)
class Seen:
    """What one rank saw under ZeRO: losses of the whole run and of its second half again, and two refusals."""

    whole: list[float]
    again: list[float]
    code: str
    message: str
    active: bool
    muon: str


def train_with_each(context: Any, stages: tuple[int, ...], folder: str) -> tuple[list[float], list[Seen]]:
    """Worker: the losses without ZeRO, and what is seen under each stage."""
    return without_wrapper(context), [train_and_resume(context, stage, folder) for stage in stages]


def train_and_resume(context: Any, stage: int, folder: str) -> Seen:
    """A whole run that saves halfway, the second half again from that file in a new engine, then offload."""
    half = STEPS // 2
    running, _ = wrapped(context, stage)
    losses = advance(context, running, 0, half)
    running.save_checkpoint(folder, tag=f"zero{stage}")
    losses += advance(context, running, half, STEPS)
    again, optimizer = wrapped(context, stage)
    again.load_checkpoint(folder, tag=f"zero{stage}")
    repeated = advance(context, again, half, STEPS)
    code, message = refusal(optimizer)
    return Seen(losses, repeated, code, message, optimizer.state_offload_active, muon_refusal(context, stage))


def refusal(optimizer: Gefen) -> tuple[str, str]:
    """What activation says inside an engine."""
    try:
        optimizer.offload_state_()
    except OffloadUnsupportedError as error:
        return error.reason.value, str(error)
    return "accepted", ""


def muon_refusal(context: Any, stage: int) -> str:
    """What GefenMuon says when ZeRO hands it one-dimensional partitions."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).to(context.device)
    try:
        running = engine(context, stage, GefenMuon(model.named_parameters(), lr=1e-3), model)
        running.backward(running(torch.randn(4, 32, device=context.device)).square().mean())
        running.step()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "accepted"

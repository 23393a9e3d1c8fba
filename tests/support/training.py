"""One data-parallel training run, described by a `Case`, and everything it leaves behind, step by step."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gefen_offload import Gefen, OffloadPolicy
from support.corpus import batch
from support.gpt import GPT, GPTShape, build
from support.simulated import SimulatedAccelerator, simulated
from support.solved import solving_once

Snapshot = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What differs between the runs of the battery; every other choice is `train`'s."""

    id: str
    shape: GPTShape = field(default_factory=GPTShape)
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaler_overflow_at: int | None = None  # step at which rank 1 alone gets an infinite loss (needs a GradScaler)
    optimizer: dict[str, Any] = field(default_factory=dict)
    policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    restore: tuple[int, ...] = ()  # an offloaded run takes its state back before these steps
    activate: tuple[int, ...] = ()  # and gives it away again before these
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: Callable[..., Any] | None = None  # a communication hook
    accumulate: int = 1
    clip: float | None = None
    schedule: bool = False
    groups: bool = False
    thaw_at: int | None = None  # the first layer is frozen until this step
    late: bool = False  # and is no part of the optimizer before it
    skip_tower_at: int | None = None  # the step that leaves the tower out, on every rank
    uneven: bool = False  # rank r has two inputs fewer than rank r - 1 (Join)
    steps: int = 6


class Run:
    """A case on one rank: model, optimizer and loop. Offload starts before the first step, or never.

    `mark` is told how far a step is: "backward 3" when its gradients are there, "saving" while a file is written.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        world: int,
        device: torch.device,
        offload: bool,
        mark: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.case, self.rank, self.world, self.device, self.offload = case, rank, world, device, offload
        self.mark = mark
        self.model = build(case.shape, seed=11, device=device, dtype=case.dtype)
        if case.thaw_at is not None:
            self.model.layers[0].requires_grad_(False)
        self.ddp = self._wrap()
        self.optimizer = Gefen(parameters(self.model, case), **{"lr": 2e-3, **case.optimizer})
        if offload:
            self.optimizer.offload_state_(policy=case.policy)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=case.scaler_overflow_at is not None)
        self.scheduler = (
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, case.steps) if case.schedule else None
        )

    def _wrap(self) -> DistributedDataParallel:
        ids = [self.device] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(self.model, device_ids=ids, **self.case.ddp)
        if self.case.hook is not None:
            wrapped.register_comm_hook(None, self.case.hook)
        return wrapped

    def forward(self, step: int, micro: int) -> Tensor:
        """The scaled loss of one micro-batch; world W with A micro-batches reads what world 1 reads with A * W."""
        tokens, targets = batch(1000 * step + micro * self.world + self.rank, 4, self.case.shape.length, self.device)
        with torch.autocast(self.device.type, self.case.autocast, enabled=self.case.autocast is not None):
            loss: Tensor = self.ddp(tokens, targets, step != self.case.skip_tower_at)
        if step == self.case.scaler_overflow_at and self.rank == 1:
            loss = loss * float("inf")
        return loss / self.case.accumulate

    def backward(self, step: int) -> Tensor:
        """Every micro-batch of one step, all-reduced with the last; returns the sum of the losses."""
        total = torch.zeros((), device=self.device)
        for micro in range(self.case.accumulate):
            last = micro == self.case.accumulate - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                loss = self.forward(step, micro)
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def gradients(self, step: int) -> Tensor:
        """What comes before the optimizer: this step's gradients, clipped; returns this rank's loss, 0-d."""
        self._before(step)
        self.optimizer.zero_grad()
        loss = self.backward(step)
        if self.case.clip is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        self.mark(f"backward {step}")
        return loss

    def advance(self) -> None:
        """The optimizer's step; scale and schedule follow it."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()

    def update(self, step: int) -> Tensor:
        """One training step. Returns this rank's loss, 0-d on its device."""
        loss = self.gradients(step)
        self.advance()
        return loss

    def step(self, step: int) -> Snapshot:
        """One training step and the snapshot after it; its gradients are those that the optimizer saw."""
        loss = self.update(step)
        gradients = {name: on_cpu(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        return {"loss": on_cpu(loss), "gradients": gradients, **snapshot(self.model, self.optimizer)}

    def save(self, path: str, step: int) -> None:
        """Everything a later run needs, in one file, which is the old one or the new one at every moment."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        content = io.BytesIO()
        torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items() if part}}, content)
        data = content.getbuffer()
        with open(path + ".new", "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            self.mark(f"half written {step}")
            file.write(data[len(data) // 2 :])
            file.flush()
            os.fsync(file.fileno())
        self.mark(f"written {step}")
        os.replace(path + ".new", path)

    def load(self, path: str) -> int:
        """Continue from `save`'s file; returns the step to go on with."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.mark("loading")
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        return int(saved["step"])

    def _before(self, step: int) -> None:
        if step == self.case.thaw_at:
            self._thaw()
        if self.offload and step in self.case.restore:
            self.optimizer.restore_state_()
        if self.offload and step in self.case.activate:
            self.optimizer.offload_state_(policy=self.case.policy)

    def _thaw(self) -> None:
        """DDP fixes its parameters when it wraps: a thaw means to wrap again."""
        layer = self.model.layers[0].requires_grad_(True)
        self.ddp = self._wrap()
        if self.case.late:
            self.optimizer.add_param_group({"params": list(layer.named_parameters(prefix="layers.0")), "lr": 1e-3})

    def steps(self) -> Iterator[Snapshot]:
        if not self.case.uneven:
            yield from (self.step(step) for step in range(self.case.steps))
            return
        mine = self.case.steps - 2 * self.rank
        with self.ddp.join():
            for step in range(mine):
                yield self.step(step)


def parameters(model: GPT, case: Case) -> Any:
    """The model's named parameters; with `groups`, decay on matrices only and a smaller lr for the embedding."""
    named = [(n, p) for n, p in model.named_parameters() if not (case.late and n.startswith("layers.0."))]
    if not case.groups:
        return named
    embedding = [(n, p) for n, p in named if "embedding" in n]
    matrices = [(n, p) for n, p in named if p.ndim >= 2 and "embedding" not in n]
    vectors = [(n, p) for n, p in named if p.ndim < 2]
    return [
        {"params": embedding, "lr": 5e-4},
        {"params": matrices, "weight_decay": 0.1, "betas": (0.9, 0.95)},
        {"params": vectors},
    ]


def snapshot(model: torch.nn.Module, optimizer: Gefen) -> Snapshot:
    """Parameters, optimizer state, codebook and counters on the CPU, and where the state's tensors live."""
    checkpoint = optimizer.state_dict()
    live = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return {
        "parameters": {name: on_cpu(p.detach()) for name, p in model.named_parameters()},
        "state": {i: {key: on_cpu(value) for key, value in entry.items()} for i, entry in checkpoint["state"].items()},
        "codebook": on_cpu(checkpoint["gefen_codebook"]),
        "global_step": checkpoint["gefen_global_step"],
        "residency": sorted({tensor.device.type for tensor in live}),
    }


def on_cpu(value: Any) -> Any:
    """A copy on the CPU of a tensor; any other value as it is."""
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


def train_both_simulated(context: Any, case: Case) -> tuple[list[Snapshot], list[Snapshot]]:
    """Worker: as `train_both` on CPU ranks, where the offloaded run streams through the simulated accelerator."""
    with solving_once():
        resident = train(context, case, False)
        with simulated(SimulatedAccelerator()):
            return resident, train(context, case, True)


@dataclass(frozen=True)
class Stretch:
    """Part of a long run: from `first` to the case's last step, saving once and perhaps continuing from a file."""

    case: Case
    offload: bool
    resume: str | None = None
    save: str | None = None
    save_at: int = -1


def curve(context: Any, stretch: Stretch) -> tuple[list[float], Snapshot]:
    """Worker: the losses of a stretch, one a step (the mean over ranks, exact in float64), and its last snapshot."""
    run = Run(stretch.case, context.rank, context.world, context.device, stretch.offload)
    first = run.load(stretch.resume) if stretch.resume else 0
    losses = []
    for step in range(first, stretch.case.steps):
        context.mark(f"step {step}")
        losses.append(run.update(step).item())
        if step + 1 == stretch.save_at and context.rank == 0 and stretch.save:
            run.save(stretch.save, step + 1)
    return mean_over_ranks(losses, context.device), snapshot(run.model, run.optimizer)


def mean_over_ranks(losses: list[float], device: torch.device) -> list[float]:
    """Collective: every step's loss, averaged over the ranks of the default group."""
    total = torch.tensor(losses, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def train(context: Any, case: Case, offload: bool) -> list[Snapshot]:
    """Worker: run `case` on this rank and return the snapshot after each of its steps."""
    run = Run(case, context.rank, context.world, context.device, offload, context.mark)
    return list(run.steps())


def train_both(context: Any, case: Case) -> tuple[list[Snapshot], list[Snapshot]]:
    """Worker: the resident run, then the offloaded run, on the same ranks."""
    with solving_once():
        return train(context, case, False), train(context, case, True)

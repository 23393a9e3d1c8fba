"""GefenMuon on FSDP2 shards, and the same steps worked out on one rank from whole gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gefen_offload import GefenMuon
from gefen_offload.optim.codebook import block_histogram, solve_codebook
from gefen_offload.optim.learning import Learning, Newcomer
from gefen_offload.optim.muon import momentum_step
from gefen_offload.optim.newton_schulz import QUINTIC, lr_ratio, orthogonalise, schedule_of

LR, DECAY, MOMENTUM = 1e-2, 0.1, 0.95


def network(device: Any, dtype: torch.dtype) -> nn.Sequential:
    """Four matrices, of which one divides unevenly among ranks, and one, of a single row, leaves ranks without any."""
    torch.manual_seed(0)
    widths = (16, 24, 13, 8, 1)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
    return nn.Sequential(*layers).to(device, dtype)


def loss_of(model: nn.Module, step: int, device: Any, dtype: torch.dtype) -> Tensor:
    """The loss of one step, the same on every rank."""
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device, dtype)
    loss: Tensor = model(batch).float().square().mean()
    return loss


def advance(model: nn.Module, optimizer: Any, steps: range, device: Any, dtype: torch.dtype) -> list[list[Tensor]]:
    """Train; return the whole gradients of each step."""
    seen = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, device, dtype).backward()
        seen.append([p.grad.full_tensor().clone() for p in model.parameters()])
        optimizer.step()
    return seen


def sharded(context: Any, dtype: torch.dtype) -> tuple[nn.Module, GefenMuon]:
    model = network(context.device, dtype)
    fully_shard(model, mesh=init_device_mesh(context.device.type, (context.world,)))
    return model, GefenMuon(model.named_parameters(), lr=LR, weight_decay=DECAY, momentum=MOMENTUM)


def whole(model: nn.Module) -> list[Tensor]:
    return [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]


def train(context: Any, dtype: torch.dtype, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Worker: the whole matrices after some steps on shards, and what one rank works out from the whole gradients."""
    model, optimizer = sharded(context, dtype)
    gradients = advance(model, optimizer, range(steps), context.device, dtype)
    return whole(model), worked_out(context, dtype, gradients)


def resume(context: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Worker: six steps, and three steps, a rank-local checkpoint and three more."""
    model, optimizer = sharded(context, dtype)
    advance(model, optimizer, range(6), context.device, dtype)
    straight = whole(model)
    model, optimizer = sharded(context, dtype)
    advance(model, optimizer, range(3), context.device, dtype)
    continued = GefenMuon(model.named_parameters(), lr=LR, weight_decay=DECAY, momentum=MOMENTUM)
    continued.load_state_dict(optimizer.state_dict())
    advance(model, continued, range(3, 6), context.device, dtype)
    return straight, whole(model)


def refuse_offload(context: Any) -> tuple[str, bool]:
    """Worker: the reason that offload gives, and whether it is active afterwards."""
    from gefen_offload import OffloadUnsupportedError

    _, optimizer = sharded(context, torch.float32)
    try:
        optimizer.offload_state_()
    except OffloadUnsupportedError as error:
        return error.reason.value, optimizer.state_offload_active
    return "accepted", optimizer.state_offload_active


def worked_out(context: Any, dtype: torch.dtype, gradients: list[list[Tensor]]) -> list[Tensor]:
    """Every rank's momentum, from the rows that FSDP2 gives it, on this one rank; then whole matrices as ever."""
    parameters = [parameter.detach() for parameter in network(context.device, dtype).parameters()]
    ranks = [_Rank(rank, context.world) for rank in range(context.world)]
    for step in gradients:
        updates = [rank.updates(step) for rank in ranks]
        for parameter, parts in zip(parameters, zip(*updates, strict=True), strict=True):
            direction = orthogonalise(torch.cat(parts), schedule_of(QUINTIC, 5), 1e-7).contiguous()
            alpha = -LR * lr_ratio(None, *parameter.shape)
            # [Note: rows by themselves] torch rounds a bfloat16 sum differently at the end of a tensor than inside it.
            for rows, part in zip(parameter.chunk(context.world), direction.chunk(context.world), strict=True):
                rows.mul_(1 - LR * DECAY).add_(part, alpha=alpha)
    return [parameter.cpu() for parameter in parameters]


class _Rank:
    """What one rank remembers: periods, codebook, indices and magnitudes of its own rows."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._periods: list[int] = []

    def updates(self, gradients: list[Tensor]) -> list[Tensor]:
        """This rank's rows of each matrix to orthogonalise."""
        shards = [self._rows(gradient) for gradient in gradients]
        if not self._periods:
            self._start(shards)
        updates = []
        for shard, period, (indices, magnitude) in zip(shards, self._periods, self._momenta, strict=True):
            if shard.numel():
                update = momentum_step(shard.view(-1, period), indices, magnitude, self._levels, MOMENTUM, True)
                shard = update.view(shard.shape)
            updates.append(shard)
        return updates

    def _rows(self, gradient: Tensor) -> Tensor:
        chunks = gradient.chunk(self._world)
        return chunks[self._rank].contiguous() if self._rank < len(chunks) else gradient[:0]

    def _start(self, shards: list[Tensor]) -> None:
        self._periods = Learning().periods([Newcomer(shard.flatten(), shard.shape, False) for shard in shards])
        counts = [block_histogram(s.flatten(), p) for s, p in zip(shards, self._periods, strict=True)]
        self._levels = solve_codebook(sum(count.cpu() for count in counts)).to(shards[0].device)
        self._momenta = [
            (
                torch.zeros(shard.numel() // p, p, dtype=torch.uint8, device=shard.device),
                torch.zeros(shard.numel() // p, 1, device=shard.device),
            )
            for shard, p in zip(shards, self._periods, strict=True)
        ]

"""Training with GefenMuon and the hybrid inside ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gefen_offload import GefenMuon, GefenMuonHybrid
from gefen_offload.optim.shard import is_sharded


class Network(nn.Module):
    """An embedding, two matrices and their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.up, self.down, self.norm = nn.Linear(8, 24), nn.Linear(24, 8), nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.down(torch.relu(self.up(self.table(tokens)))))
        return hidden


def network(context: Any) -> Network:
    torch.manual_seed(0)
    return Network().to(context.device)


def advance(model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    """Train on batches that differ between ranks."""
    device = next(model.parameters()).device
    for step in steps:
        tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(100 * rank + step)).to(device)
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    """Whole parameters, on the CPU."""
    return [(p.full_tensor() if is_sharded(p) else p).detach().cpu() for p in model.parameters()]


def hybrid_on_ddp(context: Any, backend: str) -> list[Tensor]:
    """Worker: the parameters after training the hybrid under DDP."""
    model = network(context)
    wrapped = DistributedDataParallel(model)
    advance(wrapped, GefenMuonHybrid(model, 1e-2, backend), range(4), context.rank)
    return values(model)


def hybrid_on_fsdp2(context: Any, backend: str) -> list[Tensor]:
    """Worker: the parameters after training the hybrid on FSDP2 shards."""
    model = network(context)
    fully_shard(model, mesh=init_device_mesh(context.device.type, (context.world,)))
    advance(model, GefenMuonHybrid(model, 1e-2, backend), range(4), context.rank)
    return values(model)


def muon_on_zero_redundancy(context: Any) -> list[Tensor]:
    """Worker: the parameters after training matrices with torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False))
    model = model.to(context.device)
    model[0].requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    matrices = [p for p in model.parameters() if p.requires_grad]
    advance(wrapped, ZeroRedundancyOptimizer(matrices, optimizer_class=GefenMuon, lr=1e-2), range(4), context.rank)
    return values(model)


def twice(context: Any, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """Worker: the parameters after two equal trainings."""
    runs = []
    for _ in range(2):
        model = network(context)
        advance(model, GefenMuonHybrid(model, 1e-2, backend), range(6), 0)
        runs.append(values(model))
    return runs[0], runs[1]


def moved_back(context: Any, backend: str) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Worker: where the state is after a foreign move to the CPU and `move_state_()`, and what training goes on to."""
    straight = network(context)
    advance(straight, GefenMuonHybrid(straight, 1e-2, backend), range(6), 0)
    model = network(context)
    optimizer = GefenMuonHybrid(model, 1e-2, backend)
    advance(model, optimizer, range(3), 0)
    for entry in optimizer.state.values():
        entry.update({name: value.cpu() for name, value in entry.items() if torch.is_tensor(value) and value.dim()})
    optimizer.move_state_()
    where = {v.device.type for e in optimizer.state.values() for v in e.values() if torch.is_tensor(v) and v.dim()}
    advance(model, optimizer, range(3, 6), 0)
    return sorted(where), values(straight), values(model)

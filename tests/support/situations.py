"""Situations that offload refuses, made with the real engines, and one attempt to activate it there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gefen_offload import Gefen, GefenMuon, GefenMuonHybrid, OffloadUnsupportedError
from gefen_offload.offload.session import Poison
from support.corpus import batch
from support.gpt import GPTShape, build
from support.simulated import SimulatedAccelerator, simulated

Situation = Callable[[Any], tuple[nn.Module, Any]]
SHAPE = GPTShape(width=32, layers=1)


def network(context: Any) -> nn.Module:
    return build(SHAPE, seed=5, device=context.device)


def ddp(context: Any) -> tuple[nn.Module, Gefen]:
    """The supported situation: data parallel, replicas equal."""
    model = DistributedDataParallel(network(context))
    return model, Gefen(model.module.named_parameters())


def trained_ddp(context: Any) -> tuple[nn.Module, Gefen]:
    """The same after one step: there is state."""
    model, optimizer = ddp(context)
    model(*batch(context.rank, 2, SHAPE.length, context.device)).backward()
    optimizer.step()
    return model, optimizer


def fsdp2(context: Any) -> tuple[nn.Module, Gefen]:
    model = network(context)
    fully_shard(model, mesh=init_device_mesh(context.device.type, (context.world,)))
    return model, Gefen(model.named_parameters())


def fsdp2_cpu_offload(context: Any) -> tuple[nn.Module, Gefen]:
    model = network(context)
    mesh = init_device_mesh(context.device.type, (context.world,))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=context.device.type == "cuda"))
    return model, Gefen(model.named_parameters())


def fsdp1(context: Any) -> tuple[nn.Module, Gefen]:
    model = FullyShardedDataParallel(network(context), device_id=context.device)
    return model, Gefen(model.named_parameters())


def tensor_parallel(context: Any) -> tuple[nn.Module, Gefen]:
    model = network(context)
    mesh = init_device_mesh(context.device.type, (context.world,))
    parallelize_module(model, mesh, {"head": ColwiseParallel()})
    return model, Gefen(model.named_parameters())


def zero_redundancy(context: Any) -> tuple[nn.Module, Any]:
    """Each rank owns a part of the parameters: the optimizer it really steps is the inner one."""
    model = DistributedDataParallel(network(context))
    wrapper = ZeroRedundancyOptimizer(model.parameters(), Gefen, lr=1e-3)
    return model, wrapper.optim


def only_last_rank(situation: Situation) -> Situation:
    """The situation on the last rank alone; the others are plain replicas."""

    def build_it(context: Any) -> tuple[nn.Module, Any]:
        if context.rank == context.world - 1:
            return situation(context)
        return alone(context)

    return build_it


def sharded_alone(context: Any) -> tuple[nn.Module, Gefen]:
    """FSDP2, to which the other ranks do not come: sharding itself needs no collective, and no group of its own."""
    model = network(context)
    fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, context.device.type))
    return model, Gefen(model.named_parameters())


def alone(context: Any) -> tuple[nn.Module, Gefen]:
    """A replica that no wrapper joins to the others."""
    model = network(context)
    return model, Gefen(model.named_parameters())


def trained_alone(context: Any) -> tuple[nn.Module, Gefen]:
    """The same after one step: there is state."""
    model, optimizer = alone(context)
    model(*batch(0, 2, SHAPE.length, context.device)).backward()
    optimizer.step()
    return model, optimizer


def aliased(context: Any) -> tuple[nn.Module, Gefen]:
    """Two parameters that are views of one storage."""
    model = network(context)
    storage = torch.randn(64, 32, device=context.device)
    one, two = nn.Parameter(storage[:32]), nn.Parameter(storage[32:])
    one.grad, two.grad = torch.randn(32, 32, device=context.device), torch.randn(32, 32, device=context.device)
    optimizer = Gefen([("one", one), ("two", two)])
    optimizer.step()
    first, second = (optimizer.state[p] for p in (one, two))
    second["m_magnitude"] = first["m_magnitude"].view_as(first["m_magnitude"])
    return model, optimizer


def different_weights(context: Any) -> tuple[nn.Module, Gefen]:
    """A replica that drifted: one element of one parameter differs by an ulp."""
    model = network(context)
    if context.rank == context.world - 1:
        weight = next(model.parameters()).data.view(-1)
        weight[3] = torch.nextafter(weight[3], weight[3] + 1)
    return model, Gefen(model.named_parameters())


class Tagged(nn.Parameter):
    """A subclass of Parameter."""


def subclass(context: Any) -> tuple[nn.Module, Gefen]:
    """One parameter that is more than a tensor."""
    model = network(context)
    named = dict(model.named_parameters())
    name, last = named.popitem()
    return model, Gefen([*named.items(), (name, Tagged(last.detach().clone()))])


def flat(context: Any) -> tuple[nn.Module, Gefen]:
    """One parameter that says it is FSDP1's."""
    model, optimizer = alone(context)
    next(model.parameters())._is_flat_param = True
    return model, optimizer


def other_groups(context: Any) -> tuple[nn.Module, Gefen]:
    """Groups that something took parameters from, as ZeRO does."""
    model, optimizer = trained_alone(context)
    del optimizer.param_groups[0]["params"][-1:]
    return model, optimizer


def custom_state(context: Any) -> tuple[nn.Module, Gefen]:
    """A tensor that somebody keeps in the state."""
    model, optimizer = trained_alone(context)
    optimizer.state[next(model.parameters())]["ema"] = torch.zeros(3, device=context.device)
    return model, optimizer


def capturable(context: Any) -> tuple[nn.Module, Gefen]:
    """Counters on the device."""
    model = network(context)
    return model, Gefen(model.named_parameters(), capturable=True)


def on_the_host(context: Any) -> tuple[nn.Module, Gefen]:
    """A model that was not moved to the device."""
    model = build(SHAPE, seed=5, device="cpu")
    return model, Gefen(model.named_parameters())


def muon(context: Any) -> tuple[nn.Module, GefenMuon]:
    """Muon for the matrices."""
    model = network(context)
    return model, GefenMuon([(n, p) for n, p in model.named_parameters() if p.ndim == 2])


def hybrid(context: Any) -> tuple[nn.Module, GefenMuonHybrid]:
    """Muon for the hidden matrices, Gefen for everything else."""
    model = DistributedDataParallel(network(context))
    return model, GefenMuonHybrid(model.module, 1e-2)


def poisoned(context: Any) -> tuple[nn.Module, Gefen]:
    """State that an earlier copy back left unfit."""
    model, optimizer = trained_alone(context)
    optimizer._offload = Poison("an earlier copy back failed")
    return model, optimizer


def attempt_streamed(context: Any, situation: Situation) -> dict[str, Any]:
    """Worker: as `attempt`; on a CPU rank its parameters stand for an accelerator's."""
    with contextlib.nullcontext() if context.device.type == "cuda" else simulated(SimulatedAccelerator()):
        return attempt(context, situation)


def attempt(context: Any, situation: Situation) -> dict[str, Any]:
    """Worker: activate offload in `situation`; the refusal, after how many seconds, and whether anything changed."""
    _, optimizer = situation(context)
    before = frozen(optimizer)
    context.mark("offload")
    begun = time.monotonic()
    try:
        optimizer.offload_state_()
    except OffloadUnsupportedError as error:
        answer = {"code": error.reason.value, "message": str(error)}
    else:
        answer = {"code": None, "message": ""}
    answer["seconds"] = time.monotonic() - begun
    return {**answer, "active": optimizer.state_offload_active, "before": before, "after": frozen(optimizer)}


def frozen(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Bits and identities of everything the optimizer holds on this rank."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: optimizer.state[p] for i, p in enumerate(params) if p in optimizer.state}
    tensors = {f"{i}.{k}": v for i, entry in state.items() for k, v in entry.items() if isinstance(v, Tensor)}
    return {
        "parameters": [local(p).detach().cpu().clone() for p in params],
        "tensors": {key: local(value).cpu().clone() for key, value in tensors.items()},
        "identities": [id(p) for p in params] + [id(t) for t in tensors.values()] + [id(s) for s in state.values()],
    }


def local(tensor: Tensor) -> Tensor:
    """The shard that this rank holds of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

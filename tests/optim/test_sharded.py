"""Sharded training with offload off: FSDP2, and torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gefen_offload import Gefen
from support.corpus import batch
from support.gpt import GPTShape, build
from support.steps import differing, snapshot

SHAPE = GPTShape(width=32, layers=1, length=16)
STEPS = 12
RATE = 3e-3


def losses_of(model, optimizer, ranks, rank, steps, device="cpu"):
    """Train on each rank's part of the batches; return the mean loss of every step over all ranks."""
    losses = []
    for step in steps:
        tokens, targets = batch(step, 8, SHAPE.length, device)
        loss = model(tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


def alone(device):
    """The last loss of the same training in one process without a wrapper, block second moment."""
    model = build(SHAPE, 0, device)
    optimizer = Gefen(model.named_parameters(), lr=RATE, factored_v_2d=False)
    return losses_of(model, optimizer, 1, 0, range(STEPS), device)[-1]


def sharded_model(context, seed=0):
    model = build(SHAPE, seed, context.device)
    mesh = init_device_mesh(context.device.type, (context.world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_fsdp2(context):
    """Twelve steps under FSDP2; then six more, from memory and from this rank's checkpoint in a file."""
    model = sharded_model(context)
    optimizer = Gefen(model.named_parameters(), lr=RATE)
    losses = losses_of(model, optimizer, context.world, context.rank, range(STEPS), context.device)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not any("v_row" in state for state in optimizer.state.values())
    path = context.tmp_path / "rank.pt"
    torch.save([{k: v.to_local() for k, v in model.state_dict().items()}, optimizer.state_dict()], path)
    on = losses_of(model, optimizer, context.world, context.rank, range(STEPS, STEPS + 6), context.device)

    other = sharded_model(context, seed=1)
    resumed = Gefen(other.named_parameters(), lr=RATE)
    weights, saved = torch.load(path, weights_only=True)
    for name, parameter in other.named_parameters():
        parameter.detach().to_local().copy_(weights[name])
    resumed.load_state_dict(saved)
    again = losses_of(other, resumed, context.world, context.rank, range(STEPS, STEPS + 6), context.device)
    ours, theirs = ([p.to_local().detach() for p in m.parameters()] for m in (model, other))
    return {
        "losses": losses,
        "alone": alone(context.device),
        "resumed": [on == again, differing(ours, theirs), differing(optimizer.state_dict(), resumed.state_dict())],
    }


@pytest.mark.gloo2
def test_fsdp2_trains_and_resumes(ranks):
    """Under FSDP2 the final loss is within 1% of one process's, and a rank-local checkpoint resumes to the bit."""
    values = ranks.run(train_fsdp2).values
    assert values[0]["losses"] == values[1]["losses"]
    assert values[0]["losses"][-1] == pytest.approx(values[0]["alone"], rel=0.01)
    assert [value["resumed"] for value in values] == [[True, None, None]] * 2


@pytest.mark.gpu2
def test_fsdp2_trains_and_resumes_on_gpus(ranks):
    """The same on two GPUs."""
    values = ranks.run(train_fsdp2).values
    assert values[0]["losses"][-1] == pytest.approx(values[0]["alone"], rel=0.01)
    assert [value["resumed"] for value in values] == [[True, None, None]] * 2


def foreign_checkpoints(context):
    """What loading another rank's, another topology's and a whole model's checkpoint says, and that nothing changed."""
    model = sharded_model(context)
    optimizer = Gefen(model.named_parameters(), lr=RATE)
    losses_of(model, optimizer, context.world, context.rank, range(2))
    before = snapshot(optimizer.state_dict())
    saved = [None] * context.world
    dist.all_gather_object(saved, before)
    whole_model = build(SHAPE, 0, "cpu")
    whole = Gefen(whole_model.named_parameters(), lr=RATE, factored_v_2d=False)
    losses_of(whole_model, whole, 1, 0, range(2))
    says = []
    for reader, checkpoint in (
        (optimizer, saved[1 - context.rank]),
        (optimizer, whole.state_dict()),
        (whole, before),
    ):
        try:
            reader.load_state_dict(checkpoint)
            says.append("loaded")
        except ValueError as error:
            says.append(str(error))
    return says, differing(before, optimizer.state_dict())


@pytest.mark.gloo2
def test_another_topology_is_refused(ranks):
    """Another rank's shard, a whole model's state and a shard for a whole model are refused, and change nothing."""
    for says, difference in ranks.run(foreign_checkpoints).values:
        assert all("sharded state is rank-local" in message for message in says)
        assert difference is None


def uneven_shards(context):
    """A parameter of one row on two ranks: one holds it, the other holds nothing; both step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    mesh = init_device_mesh("cpu", (context.world,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    optimizer = Gefen(model.named_parameters())
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(snapshot(saved))
    return [len(state) for state in saved["state"].values()]


@pytest.mark.gloo2
def test_a_rank_without_elements(ranks):
    """A rank that holds no element of a parameter keeps its name only, steps, saves and loads."""
    first, second = ranks.run(uneven_shards).values
    assert min(first) > 1
    assert second == [1, 1]


def train_zero(context):
    """Training under DDP with ZeroRedundancyOptimizer, resumed from each rank's own optimizer's state."""

    def make(seed):
        model = DistributedDataParallel(build(SHAPE, seed, context.device))
        wrapped = ZeroRedundancyOptimizer(model.parameters(), Gefen, lr=RATE, factored_v_2d=False)
        return model, wrapped

    model, optimizer = make(0)
    losses = losses_of(model, optimizer, context.world, context.rank, range(STEPS), context.device)
    weights, saved = snapshot(model.state_dict()), snapshot(optimizer.optim.state_dict())
    on = losses_of(model, optimizer, context.world, context.rank, range(STEPS, STEPS + 4), context.device)
    other, resumed = make(1)
    other.load_state_dict(weights)
    resumed.optim.load_state_dict(saved)
    again = losses_of(other, resumed, context.world, context.rank, range(STEPS, STEPS + 4), context.device)
    digest = context.digest([p.detach() for p in model.parameters()])
    return {
        "losses": losses,
        "alone": alone(context.device),
        "digest": digest,
        "resumed": [on == again, differing(model.state_dict(), other.state_dict())],
    }


@pytest.mark.gloo2
def test_zero_redundancy_trains_and_resumes(ranks):
    """Replicas stay equal, the final loss is within 1% of one process's, each rank's own state resumes to the bit."""
    values = ranks.run(train_zero).values
    assert values[0]["digest"] == values[1]["digest"]
    assert values[0]["losses"][-1] == pytest.approx(values[0]["alone"], rel=0.01)
    assert [value["resumed"] for value in values] == [[True, None]] * 2


@pytest.mark.gpu2
def test_zero_redundancy_trains_and_resumes_on_gpus(ranks):
    """The same on two GPUs."""
    values = ranks.run(train_zero).values
    assert values[0]["digest"] == values[1]["digest"]
    assert values[0]["losses"][-1] == pytest.approx(values[0]["alone"], rel=0.01)
    assert [value["resumed"] for value in values] == [[True, None]] * 2


def consolidated(context):
    """Load a state dict that ZeroRedundancyOptimizer put together, which has no codebook, and step."""
    model = DistributedDataParallel(build(SHAPE, 0, context.device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Gefen, lr=RATE)
    losses_of(model, optimizer, context.world, context.rank, range(2))
    optimizer.consolidate_state_dict(to=0)
    box = [optimizer.state_dict() if context.rank == 0 else None]
    dist.broadcast_object_list(box)
    fresh = ZeroRedundancyOptimizer(model.parameters(), Gefen, lr=RATE)
    fresh.load_state_dict(box[0])
    before = snapshot(model.state_dict())
    try:
        losses_of(model, fresh, context.world, context.rank, range(2, 3))
    except RuntimeError as error:
        return str(error), differing(before, model.state_dict())
    return "stepped", None


@pytest.mark.gloo2
def test_a_consolidated_state_dict_is_noticed(ranks):
    """State put in place without load_state_dict has no codebook: the next step refuses it before anything changes."""
    for message, difference in ranks.run(consolidated).values:
        assert "zero.optim.state_dict()" in message
        assert difference is None


def placed_apart(context):
    """Step a row-sharded parameter whose gradient is sharded by columns; what is said, and whether it changed."""
    mesh = init_device_mesh("cpu", (context.world,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)])
    try:
        Gefen([("w", parameter)]).step()
    except RuntimeError as error:
        return str(error), bool((parameter.to_local() == 1).all())
    return "stepped", False


@pytest.mark.gloo2
def test_a_gradient_placed_otherwise_is_refused(ranks):
    """A shard of the gradient of another shape than the parameter's raises on every rank, and nothing changes."""
    for message, unchanged in ranks.run(placed_apart).values:
        assert "gradient of w is of shape (4, 4), the parameter's of (2, 8)" in message
        assert unchanged

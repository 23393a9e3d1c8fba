"""CUDA graphs and torch.compile: device counters, replay, and compiled training steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gefen_offload import Gefen
from support.steps import DTYPES, differing, dtype_id, named, parameters, set_gradients, snapshot

SHAPES = ((16, 12), (24,), (), (2, 3, 4), (64, 33))


def trained(device="cpu", dtype=torch.float32, steps=3, lr=0.1, **options):
    """Parameters and an optimizer that has taken some steps."""
    tensors = parameters(dtype, SHAPES, device)
    optimizer = Gefen(named(tensors), lr=lr, weight_decay=0.1, **options)
    for step in range(steps):
        set_gradients(tensors, step)
        optimizer.step()
    return tensors, optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
def test_device_counters_change_no_bit(dtype, factored):
    """On the CPU, `capturable` gives the bits that counters and rates on the host give, for a tensor lr too."""
    plain, first = trained(dtype=dtype, steps=5, factored_v_2d=factored, lr=torch.tensor(0.1))
    captured, second = trained(dtype=dtype, steps=5, factored_v_2d=factored, lr=torch.tensor(0.1), capturable=True)
    assert differing(plain, captured) is None
    state = second.state[captured[0]]
    assert (state["step"].dtype, state["step"].shape, state["step"].item()) == (torch.float32, (), 5.0)
    assert second.state_dict()["gefen_global_step"] == first.state_dict()["gefen_global_step"] == 5


def replayed(context, dtype, factored, tensor_lr):
    """In a rank: three eager steps, then three replays of a captured one; and six eager steps."""
    lr = torch.tensor(0.1, device=context.device) if tensor_lr else 0.1
    tensors, optimizer = trained(context.device, dtype, lr=lr, factored_v_2d=factored, capturable=True)
    set_gradients(tensors, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(3, 6):
        generator = [t.grad for t in tensors]
        set_gradients(tensors, step)
        for held, tensor in zip(generator, tensors, strict=True):
            tensor.grad = held.copy_(tensor.grad)
        graph.replay()
    eager, other = trained(context.device, dtype, steps=6, lr=lr, factored_v_2d=factored, capturable=True)
    return [differing(tensors, eager), differing(optimizer.state_dict(), other.state_dict())]


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "block"])
@pytest.mark.parametrize("tensor_lr", [True, False], ids=["tensor-lr", "float-lr"])
def test_a_replayed_graph_equals_eager_steps(ranks, dtype, factored, tensor_lr):
    """A step captured after warm-up and replayed three times leaves the bits, counters too, of three eager steps."""
    assert ranks.run(replayed, dtype, factored, tensor_lr).values == [[None, None]]


def captured_first(context):
    """In a rank: capture the very first step; what it raises, and whether anything changed."""
    tensors = parameters(device=context.device, shapes=[(16, 8)])
    optimizer = Gefen(tensors, capturable=True)
    set_gradients(tensors, 0)
    before = snapshot([tensors, optimizer.state_dict()])
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    except RuntimeError as error:
        return [str(error), differing(before, snapshot([tensors, optimizer.state_dict()]))]
    return ["", None]


@pytest.mark.gpu1
def test_capturing_the_first_step_is_refused(ranks):
    """Periods and codebook are found on the host, so that a capture before the first step raises, saying so."""
    ((message, difference),) = ranks.run(captured_first).values
    assert "first time during a CUDA graph capture" in message
    assert difference is None


def compiled_run(device, backend):
    """Five steps of a training function compiled whole, optimizer included, and five of it as it is."""

    def train(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        optimizer = Gefen(model.named_parameters(), lr=0.01)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = torch.compile(step, backend=backend) if compiled else step
        losses = [run(torch.full((4, 8), float(i), device=device)).detach().cpu() for i in range(1, 6)]
        return losses, optimizer.state_dict()

    torch._dynamo.reset()
    return differing(train(False), train(True))


def test_a_compiled_training_step():
    """Inside torch.compile the optimizer's step runs as it is, after a graph break: the bits of the eager run."""
    assert compiled_run("cpu", "eager") is None


@pytest.mark.filterwarnings("ignore")
def test_a_whole_graph_is_refused():
    """fullgraph=True over a step is refused by torch.compile, with our reason."""
    tensors, optimizer = trained()
    set_gradients(tensors, 9)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="host") as raised:
        torch.compile(lambda: optimizer.step(), fullgraph=True, backend="eager")()
    assert "dynamo" in type(raised.value).__module__

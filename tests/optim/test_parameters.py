"""Parameters of every kind: dtypes, shapes, strides, ties, devices' odd corners."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gefen_offload import Gefen
from support.steps import DTYPES, differing, dtype_id, named, parameters, set_gradients, snapshot


def step_with(tensors, steps=4, **options):
    """Step an optimizer of these tensors; return it."""
    optimizer = Gefen(named(tensors), lr=0.1, **options)
    for step in range(steps):
        set_gradients(tensors, step)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_a_scalar_steps_and_an_empty_parameter_has_its_name_only(dtype):
    """A 0-d parameter has one block of one element; a 0-element one is left alone."""
    scalar, empty = parameters(dtype, [(), (0, 4)])
    before = scalar.detach().clone()
    optimizer = step_with([scalar, empty])
    assert optimizer.state[scalar]["m_codebook"].shape == (1, 1)
    assert not torch.equal(scalar, before)
    assert optimizer.state_dict()["state"][1] == {"name": "p1"}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_strides_do_not_matter(dtype):
    """A parameter and a gradient of any strides give the bits that contiguous ones give."""
    shapes = [(12, 16), (2, 4, 3, 5), (9, 4), (7,)]
    strided = [nn.Parameter(_strided(tensor.detach())) for tensor in parameters(dtype, shapes)]
    tight = parameters(dtype, shapes)
    assert not any(tensor.is_contiguous() for tensor in strided)
    optimizers = [Gefen(named(tensors), lr=0.1) for tensors in (strided, tight)]
    for step in range(4):
        set_gradients(strided, step)
        set_gradients(tight, step)
        for tensor in strided:
            tensor.grad = _strided(tensor.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert differing(strided, tight) is None
    assert differing(*[optimizer.state_dict() for optimizer in optimizers]) is None


def _strided(tensor):
    """The same values, every other element of memory, the last dimension first where there are several."""
    wide = torch.zeros(*reversed(tensor.shape), 2, dtype=tensor.dtype)
    view = wide[..., 0].permute(*reversed(range(tensor.dim())))
    return view.copy_(tensor)


def test_pieces_of_a_strided_parameter(monkeypatch):
    """Cut into many pieces, that begin and end inside rows, a strided parameter steps as a contiguous one."""
    monkeypatch.setattr("gefen_offload.optim.gefen.PIECE_ELEMENTS", 40)
    shape = (5, 4, 3, 7)
    strided = [nn.Parameter(_strided(parameters(shapes=[shape])[0].detach()))]
    tight = parameters(shapes=[shape])
    first, second = (step_with(tensors, period_one_substrings=("p0",)) for tensors in (strided, tight))
    assert differing(strided, tight) is None
    assert differing(first.state_dict(), second.state_dict()) is None


def test_a_tied_parameter_steps_once():
    """A weight that two modules share is one parameter: `named_parameters()` gives it once, and it steps once."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    optimizer = Gefen(model.named_parameters())
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    assert [state["step"] for state in optimizer.state.values()] == [1]


def test_parameters_on_the_same_memory_are_refused():
    """Two parameters that overlap in memory are named, also across groups; neighbours in one storage are welcome."""
    storage = torch.randn(12)
    first, second, overlapping = nn.Parameter(storage[:6]), nn.Parameter(storage[6:]), nn.Parameter(storage[4:8])
    optimizer = Gefen([("first", first), ("second", second)])
    with pytest.raises(ValueError, match=r"late.* different parameters on the same memory"):
        optimizer.add_param_group({"params": [("late", overlapping)]})
    with pytest.raises(ValueError, match="first and overlapping are different parameters on the same memory"):
        Gefen([("first", first), ("overlapping", overlapping)])
    assert len(optimizer.param_groups) == 1


def test_strided_views_of_the_same_memory_are_refused():
    """Two parameters that are one tensor's transpose, too; views of its columns, which lie apart, are not."""
    weight = torch.randn(6, 8)
    with pytest.raises(ValueError, match="a and b are different parameters on the same memory"):
        Gefen([("a", nn.Parameter(weight.t())), ("b", nn.Parameter(weight.t()))])
    Gefen([("a", nn.Parameter(weight[:, :4])), ("b", nn.Parameter(weight[:, 4:]))])


@pytest.mark.parametrize("together", [1, 2])
def test_a_parameter_that_is_a_negating_view(together):
    """Its memory holds its values negated; it steps by its values, alone and beside others of its size."""
    values = torch.randn(4, 16)
    views, plain = (
        [nn.Parameter(t) for t in (first, *(torch.ones(4, 16),) * (together - 1))]
        for first in (torch._neg_view(-values), values.clone())
    )
    for tensors in (views, plain):
        optimizer = Gefen(tensors, lr=0.1)
        for _ in range(3):
            for number, tensor in enumerate(tensors):
                tensor.grad = torch.full((4, 16), 1.0 + number)
            optimizer.step()
    for view, other in zip(views, plain, strict=True):
        assert torch.equal(view.detach().resolve_neg(), other.detach())
    assert views[0].is_neg()


def test_a_parameter_given_twice_is_refused():
    """The same tensor twice, in one group or in two, raises at construction and names both places."""
    (tensor,) = parameters(shapes=[(4,)])
    with pytest.raises(ValueError, match="b is also in this group as a"):
        Gefen([("a", tensor), ("b", tensor)])
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        Gefen([{"params": [tensor]}, {"params": [tensor]}])


def test_mixed_dtypes_in_one_group():
    """Parameters of four dtypes step in one group as each does alone, given the same codebook."""
    together = [tensor for dtype in DTYPES for tensor in parameters(dtype, [(16, 8), (24,)])]
    apart = [tensor.detach().clone().requires_grad_() for tensor in together]
    whole = Gefen(together, lr=0.1)
    set_gradients(together, 0)
    whole.step()
    parts = [Gefen([tensor], lr=0.1) for tensor in apart]
    for position, part in enumerate(parts):
        checkpoint = whole.state_dict()
        checkpoint["state"] = {0: checkpoint["state"][position]}
        checkpoint["param_groups"] = [part.state_dict()["param_groups"][0]]
        checkpoint["param_groups"][0].pop("_gefen_checkpoint_metadata")
        part.load_state_dict(checkpoint)
        apart[position].data.copy_(together[position].data)
    for step in range(1, 4):
        set_gradients(together, step)
        for tensor, twin in zip(together, apart, strict=True):
            twin.grad = tensor.grad.clone()
        for optimizer in (whole, *parts):
            optimizer.step()
    assert differing(together, apart) is None


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), "int64"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        ("weight", "str"),
    ],
    ids=["integer", "complex", "float8", "not-a-tensor"],
)
def test_parameters_that_gefen_does_not_take(tensor, message):
    """Anything but a dense tensor of the four dtypes raises a TypeError that names the parameter and what it is."""
    with pytest.raises(TypeError, match=f"w .*{message}"):
        Gefen([("w", tensor)])


def test_a_sparse_gradient_is_refused_before_anything_moves():
    """A sparse gradient raises, naming the parameter, and no parameter, state or counter has changed."""
    tensors = parameters(shapes=[(6, 4), (8, 4)])
    optimizer = step_with(tensors)
    before = snapshot([[t.detach() for t in tensors], optimizer.state_dict()])
    set_gradients(tensors, 9)
    tensors[1].grad = tensors[1].grad.to_sparse()
    with pytest.raises(RuntimeError, match="p1 has a sparse"):
        optimizer.step()
    assert differing(before, [[t.detach() for t in tensors], optimizer.state_dict()]) is None


def test_state_that_is_elsewhere():
    """State on another device than its parameter raises before anything changes, naming both and what to call."""
    tensors = parameters(shapes=[(6, 4)])
    optimizer = step_with(tensors)
    state = optimizer.state[tensors[0]]
    state["m_codebook"] = state["m_codebook"].to("meta")
    before = tensors[0].detach().clone()
    with pytest.raises(RuntimeError, match=r"state of p0 is on meta and the parameter on cpu: .*move_state_\(\)"):
        optimizer.step()
    assert differing(before, tensors[0].detach()) is None

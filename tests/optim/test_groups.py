"""Groups: names, options, groups added later, frozen parameters, and the constructor's refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gefen_offload import Gefen
from support.steps import differing, named, parameters, set_gradients


def test_names():
    """Unnamed parameters are param_i, or group_g_param_i in a group dict; given names are kept."""
    a, b, c, d = parameters(shapes=[(2,)] * 4)
    assert Gefen([a, ("x", b)]).param_groups[0]["param_names"] == ["param_0", "x"]
    optimizer = Gefen([{"params": [a]}, {"params": [("y", b), c]}])
    optimizer.add_param_group({"params": d})
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [["group_0_param_0"], ["y", "group_1_param_1"], ["group_2_param_0"]]
    states = optimizer.state_dict()["state"]
    assert [state["name"] for state in states.values()] == [name for group in names for name in group]


def test_a_group_takes_betas_as_a_pair():
    """`betas` in a group dict becomes its beta1 and beta2."""
    (tensor,) = parameters(shapes=[(2,)])
    group = Gefen([{"params": [tensor], "betas": (0.5, 0.6)}]).param_groups[0]
    assert (group["beta1"], group["beta2"], "betas" in group) == (0.5, 0.6, False)


def test_groups_keep_their_own_options():
    """Each group steps as an optimizer with its options alone would, once the codebook is the same."""
    tensors = parameters(shapes=[(8, 4), (16,)])
    twins = parameters(shapes=[(8, 4), (16,)])
    options = [{"lr": 0.1, "weight_decay": 0.3}, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3}]
    both = Gefen([{"params": [t], **option} for t, option in zip(tensors, options, strict=True)])
    for step in range(3):
        set_gradients(tensors, step)
        both.step()
    single = [Gefen([{"params": [t], **option}]) for t, option in zip(twins, options, strict=True)]
    for step in range(3):
        set_gradients(twins, step)
        for optimizer in single:
            optimizer._levels = both._levels
            optimizer.step()
    assert differing(tensors, twins) is None


def test_a_group_added_later_gets_its_periods_then():
    """A parameter added after two steps starts at step 1 with the codebook there is."""
    first, second = parameters(shapes=[(8, 4), (16,)])
    optimizer = Gefen([first])
    for step in range(2):
        set_gradients([first], step)
        optimizer.step()
    codebook = optimizer.state_dict()["gefen_codebook"].clone()
    optimizer.add_param_group({"params": [("late", second)], "lr": 0.5})
    set_gradients([first, second], 2)
    optimizer.step()
    assert (optimizer.state[first]["step"], optimizer.state[second]["step"]) == (3, 1)
    assert torch.equal(optimizer.state_dict()["gefen_codebook"], codebook)


def test_a_frozen_parameter_waits():
    """While a parameter has no gradient its value and state stay; thawed, it goes on from them."""
    frozen, other = parameters(shapes=[(8, 4), (16,)])
    optimizer = Gefen(named([frozen, other]), weight_decay=0.1)
    set_gradients([frozen, other], 0)
    optimizer.step()
    value, state = frozen.detach().clone(), optimizer.state[frozen]["m_codebook"].clone()
    frozen.requires_grad_(False)
    for step in range(1, 4):
        set_gradients([frozen, other], step, without=[0])
        optimizer.step()
    assert differing([value, state], [frozen.detach(), optimizer.state[frozen]["m_codebook"]]) is None
    frozen.requires_grad_(True)
    set_gradients([frozen, other], 4)
    optimizer.step()
    assert (optimizer.state[frozen]["step"], optimizer.state[other]["step"]) == (2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr .*>= 0.*-1"),
        ({"lr": math.nan}, "lr .*finite.*nan"),
        ({"lr": torch.zeros(2)}, r"lr .*shape \(2,\)"),
        ({"lr": "fast"}, "lr must be a number, not 'fast'"),
        ({"betas": (1.0, 0.9)}, "beta1 .*< 1, not 1.0"),
        ({"betas": (0.9, -0.1)}, "beta2 .*>= 0 and < 1"),
        ({"betas": (0.9,)}, r"betas .*pair.*\(0.9,\)"),
        ({"betas": (0.9, 0.99, 0.999)}, "betas .*pair"),
        ({"betas": None}, "betas .*pair.*None"),
        ({"eps": 0.0}, "eps .*> 0"),
        ({"weight_decay": -0.1}, "weight_decay .*>= 0"),
        ({"codebook_refresh_every": -1}, "codebook_refresh_every .*>= 0"),
        ({"codebook_refresh_every": 2.5}, "codebook_refresh_every .*whole"),
        ({"capturable": True, "codebook_refresh_every": 5}, "codebook_refresh_every=5 exclude"),
        ({"fused": True}, "fused=True.*the CPU"),
        ({"fused": True, "capturable": True}, "exclude"),
    ],
    ids=[
        "negative-lr",
        "nan-lr",
        "lr-of-two",
        "word-lr",
        "beta1",
        "beta2",
        "one-beta",
        "three-betas",
        "no-betas",
        "eps",
        "weight_decay",
        "negative-refresh",
        "half-refresh",
        "captured-refresh",
        "fused-on-the-cpu",
        "captured-fused",
    ],
)
def test_options_out_of_range_are_refused(options, message):
    """Each option out of range raises a ValueError with its name, its value and the range."""
    (tensor,) = parameters(shapes=[(2,)])
    with pytest.raises(ValueError, match=message):
        Gefen([tensor], **options)


def test_a_bad_group_leaves_the_optimizer_as_it_was():
    """add_param_group raises on a bad option, a repeated tensor or a set, and adds nothing."""
    first, second = parameters(shapes=[(2,), (3,)])
    optimizer = Gefen([first])
    for group, error in (
        ({"params": [second], "lr": -1.0}, ValueError),
        ({"params": [first]}, ValueError),
        ({"params": {second}}, TypeError),
        ({"params": [second.double().clone()]}, ValueError),
        ([second], TypeError),
    ):
        with pytest.raises(error):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["params"] == [first]


@pytest.mark.parametrize("substrings", [None, 5, (1,), ("bias", None)], ids=["none", "number", "numbers", "mixed"])
def test_fragments_of_the_wrong_kind(substrings):
    """What is no string and no list of strings is refused, naming the option."""
    with pytest.raises(TypeError, match="period_one_substrings must list strings"):
        Gefen(parameters(shapes=[(2,)]), period_one_substrings=substrings)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([("name", nn.Parameter(torch.zeros(2)), 1)], "parameter 0 is a tuple of 3"),
        ([("name",)], "parameter 0 is a tuple of 1"),
        ([{"lr": 0.1}], r"no 'params', only \['lr'\]"),
    ],
    ids=["triple", "name-only", "group-without-params"],
)
def test_malformed_params(params, message):
    """Tuples that are no pairs and groups without parameters are refused in words."""
    with pytest.raises((TypeError, ValueError), match=message):
        Gefen(params)


@pytest.mark.parametrize("stale", ["state", "gradient"])
def test_a_resized_parameter(stale):
    """A parameter resized under the optimizer stops the step before anything changes, until its state is dropped."""
    first, second = parameters(shapes=[(8,), (3,)])
    optimizer = Gefen([("first", first), ("second", second)])
    set_gradients([first, second], 0)
    optimizer.step()
    set_gradients([first, second], 1)
    first.data = torch.ones(16)
    if stale == "state":
        set_gradients([first, second], 1)
    before = [p.detach().clone() for p in (first, second)]
    with pytest.raises(RuntimeError, match=r"first has 16 elements now, its gradient (8|16) and its state 8"):
        optimizer.step()
    assert differing(before, [first.detach(), second.detach()]) is None
    del optimizer.state[first]
    set_gradients([first, second], 2)
    optimizer.step()


@pytest.mark.parametrize(
    "params", [[], nn.Parameter(torch.zeros(2)), {nn.Parameter(torch.zeros(2))}], ids=["none", "one-tensor", "a-set"]
)
def test_params_of_the_wrong_kind(params):
    """An empty list, a single tensor and a set are refused at construction."""
    with pytest.raises((TypeError, ValueError)):
        Gefen(params)


def test_verbose_names_each_period(capsys):
    """With `verbose` the first step prints every parameter's period and what the codebook was learnt from."""
    tensors = parameters(shapes=[(8, 4), (16,)])
    optimizer = Gefen(named(tensors), verbose=True)
    set_gradients(tensors, 0)
    optimizer.step()
    output = capsys.readouterr().out
    assert "p0: period 32" in output
    assert "p1: period 16" in output
    assert "learnt from 48 elements" in output

"""A step inside a training loop: closures, schedulers, gradient scaling, gradients that are not finite."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from gefen_offload import Gefen
from support.steps import differing, named, parameters, set_gradients, snapshot


def everything(optimizer):
    """Parameters and state, copied."""
    return snapshot([[p.detach() for g in optimizer.param_groups for p in g["params"]], optimizer.state_dict()])


def test_a_closure_runs_first_with_gradients_enabled():
    """The closure's gradients are those stepped with, and its value is returned."""
    (tensor,) = parameters(shapes=[(4, 8)])
    optimizer = Gefen([tensor])
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(dict(optimizer.state))
        optimizer.zero_grad()
        loss = tensor.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert calls == [{}]
    assert loss.requires_grad
    assert optimizer.state[tensor]["step"] == 1


def test_a_closure_that_raises_changes_nothing():
    """An exception in the closure passes through, with the optimizer bitwise as it was."""
    tensors = parameters(shapes=[(4, 8)])
    optimizer = Gefen(tensors)
    set_gradients(tensors, 0)
    optimizer.step()
    before = everything(optimizer)

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert differing(before, everything(optimizer)) is None


def test_no_gradient_at_all():
    """A step without a gradient changes nothing but the count of steps."""
    tensors = parameters(shapes=[(4, 8)])
    optimizer = Gefen(tensors)
    optimizer.step()
    assert optimizer.state_dict()["gefen_global_step"] == 1
    assert optimizer.state_dict()["gefen_codebook"] is None


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ],
    ids=["cosine", "lambda", "one-cycle", "plateau"],
)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_schedulers(scheduler, as_tensor):
    """A scheduler's rates are those stepped with, whether the rate is a float or a tensor."""
    scheduled, manual = parameters(shapes=[(4, 8), (6,)]), parameters(shapes=[(4, 8), (6,)])
    first = Gefen(scheduled, lr=torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1)
    second = Gefen(manual, lr=0.1)
    schedule = scheduler(first)
    rates = []
    for step in range(6):
        set_gradients(scheduled, step)
        set_gradients(manual, step)
        rates.append(float(first.param_groups[0]["lr"]))
        second.param_groups[0]["lr"] = rates[-1]
        first.step()
        second.step()
        schedule.step(*([1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    assert len(set(rates)) > 1
    assert differing(scheduled, manual) is None


def test_gradient_scaling():
    """Under GradScaler an overflow changes nothing, counters included; other steps are those without a scaler."""
    scaled, plain = parameters(shapes=[(4, 8), (6,)]), parameters(shapes=[(4, 8), (6,)])
    first, second = Gefen(scaled, lr=0.1), Gefen(plain, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        set_gradients(scaled, step)
        set_gradients(plain, step)
        for tensor in scaled:
            tensor.grad = scaler.scale(tensor.grad)
        overflow = step == 2
        if overflow:
            scaled[1].grad[3] = torch.inf
        before = everything(first)
        scaler.step(first)
        scaler.update()
        if overflow:
            assert differing(before, everything(first)) is None
        else:
            second.step()
    assert differing(scaled, plain) is None
    assert first.state_dict()["gefen_global_step"] == 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later"])
def test_gradients_that_are_not_finite(value, first):
    """As AdamW, the step goes on, and the parameter's block is no number; others are untouched; state_dict() warns."""
    sick, well, alone = parameters(shapes=[(4, 8), (16,), (16,)])
    optimizer = Gefen(named([sick, well]), lr=0.1)
    if not first:
        set_gradients([sick, well], 0)
        optimizer.step()
    set_gradients([sick, well], 1)
    sick.grad[1, 2] = value
    optimizer.step()
    assert sick.isnan().any()
    assert well.isfinite().all()
    with pytest.warns(UserWarning, match="state of p0 is not finite"):
        optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gefen([alone]).state_dict()


def test_gradients_of_zero_do_not_spoil_the_codebook():
    """A first step of zeros, as DeepSpeed and others take to make state, leaves the codebook to the first real one."""
    primed, fresh = parameters(shapes=[(16, 8)]), parameters(shapes=[(16, 8)])
    first, second = Gefen(primed, lr=0.1), Gefen(fresh, lr=0.1)
    primed[0].grad = torch.zeros(16, 8)
    first.step()
    assert differing(primed, fresh) is None
    first.load_state_dict(snapshot(first.state_dict()))
    set_gradients(primed, 0)
    set_gradients(fresh, 0)
    first.step()
    second.step()
    assert differing(first.state_dict()["gefen_codebook"], second.state_dict()["gefen_codebook"]) is None


def test_a_refresh_on_zeros_is_skipped():
    """Gradients that are all zero teach nothing: the codebook and the momentum of a refresh step stay."""
    tensors = parameters(shapes=[(16, 8), (24,)])
    optimizer = Gefen(tensors, codebook_refresh_every=2)
    for step in range(2):
        set_gradients(tensors, step)
        optimizer.step()
    codebook = optimizer.state_dict()["gefen_codebook"].clone()
    before = [tensor.detach().clone() for tensor in tensors]
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    assert differing(codebook, optimizer.state_dict()["gefen_codebook"]) is None
    assert all((a != b).float().mean() > 0.9 for a, b in zip(before, tensors, strict=True))


def test_a_blank_codebook_with_momentum_is_replaced():
    """Loaded with a blank codebook, as gefen-x keeps after zeros, and momentum in it, the momentum is re-quantised."""
    tensors = parameters(shapes=[(16, 8)])
    optimizer = Gefen(tensors, lr=0.1)
    tensors[0].grad = torch.zeros(16, 8)
    optimizer.step()
    saved = snapshot(optimizer.state_dict())
    saved["state"][0]["m_codebook"].fill_(255)
    saved["state"][0]["m_magnitude"].fill_(0.5)
    optimizer.load_state_dict(saved)
    set_gradients(tensors, 1)
    tensors[0].grad *= 1e-6
    optimizer.step()
    state = optimizer.state[tensors[0]]
    assert torch.allclose(state["m_magnitude"], torch.tensor(0.45), atol=1e-3)
    assert (state["m_codebook"] > 250).all()


def test_a_failing_refresh_changes_nothing(monkeypatch):
    """If the new codebook cannot be learnt, indices, magnitudes, codebook and parameters are bitwise as they were."""
    tensors = parameters(shapes=[(16, 8), (24,)])
    optimizer = Gefen(tensors, codebook_refresh_every=2)
    for step in range(2):
        set_gradients(tensors, step)
        optimizer.step()
    before = everything(optimizer)
    monkeypatch.setattr("gefen_offload.optim.gefen.requantise_map", lambda *_: 1 / 0)
    set_gradients(tensors, 2)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert differing(before, everything(optimizer)) is None


def test_it_trains():
    """On a small regression 150 steps take the loss to a fiftieth of what it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    x = torch.randn(256, 16)
    y = torch.sin(x @ torch.randn(16, 4))
    optimizer = Gefen(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 50

"""GefenMuon: what it takes, what it refuses, and the maths it stands on."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from gefen_offload import GefenMuon, OffloadReason, OffloadUnsupportedError
from gefen_offload.optim import muon as module
from gefen_offload.optim.newton_schulz import QUINTIC, lr_ratio, orthogonalise, schedule_of
from gefen_offload.optim.work import Scalars
from support.steps import differing, named, parameters, set_gradients, snapshot

SHAPES = ((12, 8), (8, 12), (9, 8))


def _stepped(steps: int = 3, **options: Any) -> tuple[GefenMuon, list[nn.Parameter]]:
    tensors = parameters(torch.float32, SHAPES)
    optimizer = GefenMuon(named(tensors), lr=1e-2, **options)
    for step in range(steps):
        set_gradients(tensors, step)
        optimizer.step()
    return optimizer, tensors


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_newton_schulz_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    """Singular values end between 0.6 and 1.3, and the singular vectors stay: U S' V' for U S V'."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalise(matrix, schedule_of(QUINTIC, 5), 1e-7).float()
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    kept = s > 0.05 * s.max()
    values = torch.einsum("ik,ij,kj->k", u, result, vh)[kept]
    assert result.shape == shape
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_zero_matrix_stays_zero() -> None:
    """The norm's floor keeps a zero gradient from becoming NaN."""
    assert not orthogonalise(torch.zeros(4, 6), schedule_of(QUINTIC, 5), 1e-7).any()


def test_the_learning_rate_follows_the_shape() -> None:
    """Native scaling grows with tall matrices only; AdamW's with the longer side."""
    assert lr_ratio(None, 64, 16) == lr_ratio("original", 64, 16) == 2
    assert lr_ratio(None, 16, 64) == 1
    assert lr_ratio("match_rms_adamw", 16, 64) == pytest.approx(1.6)


def test_momentum_in_parts_is_momentum_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting the momentum's work into parts of one block changes no bit."""
    whole, in_one = _stepped()
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 1)
    parts, in_parts = _stepped()
    assert differing(in_one, in_parts) is None
    assert differing(whole.state_dict(), parts.state_dict()) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"eps": 0.0}, "eps"),
        ({"nesterov": 2}, "nesterov must be True or False, not 2"),
        ({"ns_steps": 0}, "ns_steps must be an int from 1 to 99, not 0"),
        ({"ns_steps": 2.5}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must hold three finite numbers"),
        ({"ns_coefficients": (1.0, 2.0, float("nan"))}, "ns_coefficients"),
        ({"ns_schedule": "tuned3"}, "ns_schedule='tuned3'"),
        ({"ns_schedule": []}, "ns_schedule must be a list"),
        ({"ns_schedule": [(1.0, 2.0)]}, "ns_schedule must hold three finite numbers"),
        ({"adjust_lr_fn": "adam"}, "adjust_lr_fn must be None or 'original' or 'match_rms_adamw', not 'adam'"),
        ({"fused": True}, "fused=True"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], words: str) -> None:
    """Each option out of range raises a ValueError that names it and shows its value."""
    with pytest.raises(ValueError, match=words):
        GefenMuon(parameters(torch.float32, SHAPES), **{"lr": 1e-2, **options})


def test_kernels_that_cannot_run_here_are_not_asked_for() -> None:
    """As `Gefen`, an optimizer that was made where kernels run, and came here as a pickle, takes the plain path."""
    here, elsewhere = (GefenMuon(parameters(torch.float32, SHAPES), lr=1e-2) for _ in range(2))
    elsewhere._fused = True
    for optimizer in (here, elsewhere):
        set_gradients([p for group in optimizer.param_groups for p in group["params"]], 0)
        optimizer.step()
    assert differing(here.state_dict(), elsewhere.state_dict()) is None


def test_a_group_has_options_of_its_own() -> None:
    """A group's momentum and schedule are its own and wrong ones are refused without adding it."""
    tensors = parameters(torch.float32, SHAPES)
    optimizer = GefenMuon([{"params": tensors[:1], "momentum": 0.5}, {"params": tensors[1:2]}], lr=1e-2)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.95]
    assert [group["beta1"] for group in optimizer.param_groups] == [0.5, 0.95]
    optimizer.add_param_group({"params": (p for p in tensors[2:]), "ns_schedule": [QUINTIC] * 2})
    assert optimizer.param_groups[2]["ns_coefficients"] == [QUINTIC] * 2
    assert optimizer.param_groups[2]["ns_steps"] == 2
    for wrong in ({"betas": (0.9, 0.99)}, {"normuon": True}, {"sharded_mode": "approx"}, {"beta2": 0.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            optimizer.add_param_group({"params": parameters(torch.float32, SHAPES), **wrong})
    assert len(optimizer.param_groups) == 3


def test_anything_but_a_matrix_is_refused_where_it_is_given() -> None:
    """A vector, and a flat partition put in place of a matrix, raise an error that says 2-D and ZeRO."""
    with pytest.raises(ValueError, match=r"bias has 1 dimensions.*2-D.*ZeRO"):
        GefenMuon([("bias", nn.Parameter(torch.zeros(4)))])
    optimizer, _ = _stepped(0)
    flat = nn.Parameter(torch.zeros(64))
    flat.grad = torch.ones(64)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(RuntimeError, match=r"2-D.*ZeRO"):
        optimizer.step()
    assert not flat.any()


def test_two_schedules_of_the_same_steps_are_the_same() -> None:
    """Five equal triples in a schedule are the five default steps."""
    _, plain = _stepped()
    _, listed = _stepped(ns_schedule=[QUINTIC] * 5)
    assert differing(plain, listed) is None


def test_a_tensor_lr_is_the_number_it_holds() -> None:
    """A 1-element tensor lr gives the bits of the float, and follows in-place changes."""
    floats, tensors = parameters(torch.float32, SHAPES), parameters(torch.float32, SHAPES)
    rate = torch.tensor([0.0078125])
    by_float, by_tensor = GefenMuon(floats, lr=0.0078125), GefenMuon(tensors, lr=rate)
    for step in range(3):
        for optimizer, steps in ((by_float, floats), (by_tensor, tensors)):
            set_gradients(steps, step)
            optimizer.step()
        rate.mul_(0.5)
        by_float.param_groups[0]["lr"] *= 0.5
    assert differing(floats, tensors) is None


@pytest.mark.parametrize("lr", [0.0078125, torch.tensor(0.0078125)], ids=["float", "tensor"])
def test_capturable_steps_are_the_same_steps(lr: Any) -> None:
    """With counters in tensors the state is equal to the bit, and parameters to a rounding."""
    tensors = parameters(torch.float32, SHAPES)
    optimizer = GefenMuon(named(tensors), lr=lr, capturable=True)
    plain_tensors = parameters(torch.float32, SHAPES)
    plain = GefenMuon(named(plain_tensors), lr=0.0078125)
    for step in range(3):
        for running, steps in ((optimizer, tensors), (plain, plain_tensors)):
            set_gradients(steps, step)
            running.step()
    assert isinstance(optimizer.state[tensors[0]]["step"], torch.Tensor)
    assert int(optimizer.state[tensors[0]]["step"]) == 3
    for a, b in zip(tensors, plain_tensors, strict=True):
        assert differing(optimizer.state[a]["m_codebook"], plain.state[b]["m_codebook"]) is None
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_tensor_lr_is_never_read_on_the_host() -> None:
    """Tensors without values can be stepped by a tensor lr, as a CUDA graph's capture requires."""
    matrix, rate = torch.empty(4, 6, device="meta"), torch.empty((), dtype=torch.float64, device="meta")
    scalars = Scalars(lr=rate, beta1=0.9, beta2=0.0, eps=1e-7, decay=1 - rate * 0.1, bias1=1.0, bias2=1.0)
    module.apply(matrix, torch.empty(4, 6, dtype=torch.bfloat16, device="meta"), 2.0, scalars)
    assert matrix.shape == (4, 6)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_continues_as_the_original(way: str) -> None:
    """A deep copy and a pickle of optimizer and parameters together take the same next steps."""
    optimizer, tensors = _stepped(codebook_refresh_every=2)
    both = (optimizer, tensors)
    other, others = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    for step in range(3, 7):
        for running, steps in ((optimizer, tensors), (other, others)):
            set_gradients(steps, step)
            running.step()
    assert differing(tensors, others) is None


def test_a_refresh_relearns_the_codebook() -> None:
    """Every second step learns a new codebook; without a refresh the first one stays."""
    for every, changes in ((0, False), (2, True)):
        optimizer, tensors = _stepped(2, codebook_refresh_every=every)
        before = optimizer.state_dict()["gefen_codebook"].clone()
        set_gradients(tensors, 2)
        optimizer.step()
        assert (differing(before, optimizer.state_dict()["gefen_codebook"]) is not None) is changes


def test_offload_is_refused_and_moving_is_not() -> None:
    """`offload_state_()` raises with the `optimizer` reason and changes nothing; `move_state_()` keeps every bit."""
    optimizer, _ = _stepped()
    before = snapshot(optimizer.state_dict())
    with pytest.raises(OffloadUnsupportedError, match="whole matrices") as caught:
        optimizer.offload_state_()
    assert caught.value.reason is OffloadReason.OPTIMIZER
    assert not optimizer.state_offload_active
    optimizer.move_state_()
    optimizer.move_state_("cpu")
    optimizer.restore_state_()
    assert differing(optimizer.state_dict(), before) is None


@pytest.mark.parametrize("name", ["m_codebook", "m_magnitude", "step", "automatic_period"])
def test_a_checkpoint_that_lacks_an_entry_is_refused(name: str) -> None:
    """The error names the missing entry, and nothing changes."""
    optimizer, _ = _stepped()
    broken = snapshot(optimizer.state_dict())
    before = snapshot(broken)
    del broken["state"][1][name]
    with pytest.raises(ValueError, match=name):
        optimizer.load_state_dict(broken)
    assert differing(optimizer.state_dict(), before) is None


@pytest.mark.parametrize(
    "name", ["momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "sharded_mode"]
)
def test_a_checkpoint_whose_groups_lack_an_option_is_refused(name: str) -> None:
    """The error names the missing option, as for a checkpoint of Gefen, and nothing changes."""
    optimizer, _ = _stepped()
    broken = snapshot(optimizer.state_dict())
    before = snapshot(broken)
    del broken["param_groups"][0][name]
    with pytest.raises(ValueError, match=f"no '{name}'"):
        optimizer.load_state_dict(broken)
    assert differing(optimizer.state_dict(), before) is None

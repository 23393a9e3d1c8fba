"""GefenMuon is the published one, to the bit, and reads and writes its checkpoints."""

from __future__ import annotations

import io
from typing import Any

import gefen
import pytest
import torch

from gefen_offload import GefenMuon
from support.steps import DTYPES, differing, dtype_id, named, parameters, set_gradients, snapshot

SHAPES = ((12, 8), (8, 12), (9, 9), (1, 16), (16, 1), (3, 3))  # the published solver takes seconds for many elements
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no-nesterov": {"nesterov": False},
    "original": {"adjust_lr_fn": "original", "weight_decay": 0.0, "ns_steps": 3},
    "match-rms": {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.9, "eps": 1e-3},
    "schedule": {"ns_schedule": [(3.0, -4.0, 2.0), (2.5, -3.0, 1.5)]},
    "coefficients": {"ns_coefficients": (3.0, -4.5, 2.0)},
}


def _pair(dtype: torch.dtype, shapes: Any = SHAPES, **options: Any) -> tuple[Any, Any, list[Any], list[Any]]:
    theirs, ours = parameters(dtype, shapes), parameters(dtype, shapes)
    published = gefen.GefenMuon(named(theirs), lr=1e-2, fused=False, **options)
    return published, GefenMuon(named(ours), lr=1e-2, **options), theirs, ours


def _advance(
    optimizer: Any, tensors: list[Any], first: int, last: int, without: dict[int, tuple[int, ...]] | None = None
) -> None:
    for step in range(first, last):
        set_gradients(tensors, step, without=(without or {}).get(step, ()))
        optimizer.step()


def _momenta(optimizer: Any) -> list[dict[str, Any]]:
    kept = ("automatic_period", "step", "m_codebook", "m_magnitude")
    states = optimizer.state_dict()["state"]
    return [{name: states[key].get(name) for name in kept} for key in sorted(states)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_fifteen_steps_are_the_published_ones(dtype: torch.dtype, options: str) -> None:
    """Parameters, indices, magnitudes, periods and codebook are equal to the bit after 15 steps."""
    published, muon, theirs, ours = _pair(dtype, **OPTIONS[options])
    _advance(published, theirs, 0, 15)
    _advance(muon, ours, 0, 15)
    assert differing(theirs, ours) is None
    assert differing(_momenta(published), _momenta(muon)) is None
    assert differing(published.state_dict()["gefen_codebook"], muon.state_dict()["gefen_codebook"]) is None


def test_a_larger_matrix_is_the_published_one() -> None:
    """A matrix with thousands of filled bins, taller than wide, equals the published one after 5 steps."""
    published, muon, theirs, ours = _pair(torch.bfloat16, ((96, 50),))
    _advance(published, theirs, 0, 5)
    _advance(muon, ours, 0, 5)
    assert differing(theirs, ours) is None


def test_missing_gradients_late_parameters_and_changed_groups_are_the_published_ones() -> None:
    """Gradients that are None, parameters first seen late, momentum and lr changed on the way: equal bits."""
    published, muon, theirs, ours = _pair(torch.float32)
    without = {0: (1, 4), 1: (0,), 4: tuple(range(len(SHAPES)))}
    for optimizer, tensors in ((published, theirs), (muon, ours)):
        _advance(optimizer, tensors, 0, 5, without)
        optimizer.param_groups[0].update(momentum=0.8, lr=3e-2, nesterov=False)
        _advance(optimizer, tensors, 5, 9)
    assert differing(theirs, ours) is None


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=dtype_id)
@pytest.mark.parametrize("way", ["from-published", "to-published"])
def test_a_checkpoint_continues_on_the_other_side(way: str, dtype: torch.dtype, options: str) -> None:
    """Five steps, a checkpoint through a file, and ten more steps on the other side equal fifteen steps here."""
    published, muon, theirs, ours = _pair(dtype, **OPTIONS[options])
    source, steps = (published, theirs) if way == "from-published" else (muon, ours)
    _advance(source, steps, 0, 5)
    saved = _through_a_file(source.state_dict())
    other_published, other_muon, other_theirs, other_ours = _pair(dtype, **OPTIONS[options])
    target, continued = (other_muon, other_ours) if way == "from-published" else (other_published, other_theirs)
    with torch.no_grad():
        for to, value in zip(continued, steps, strict=True):
            to.copy_(value)
    target.load_state_dict(saved)
    _advance(source, steps, 5, 15)
    _advance(target, continued, 5, 15)
    assert differing(steps, continued) is None
    assert differing(_momenta(source), _momenta(target)) is None


def _through_a_file(state_dict: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_checkpoint_shares_nothing_with_the_optimizer_that_loads_it() -> None:
    """Steps after a load change neither the checkpoint nor the optimizer that it came from."""
    _, muon, _, ours = _pair(torch.float32)
    _advance(muon, ours, 0, 2)
    saved = muon.state_dict()
    before = snapshot(saved)
    _, other, _, others = _pair(torch.float32)
    other.load_state_dict(saved)
    _advance(other, others, 2, 5)
    assert differing(saved, before) is None


@pytest.mark.parametrize("option", ["normuon", "cautious"])
def test_a_checkpoint_with_an_option_that_is_lacking_is_refused(option: str) -> None:
    """gefen-x's other options are refused by name, and nothing changes."""
    theirs = parameters(torch.float32, SHAPES)
    published = gefen.GefenMuon(named(theirs), lr=1e-2, fused=False, **{option: True})
    _advance(published, theirs, 0, 2)
    _, muon, _, ours = _pair(torch.float32)
    _advance(muon, ours, 0, 2)
    before = snapshot(muon.state_dict())
    with pytest.raises(ValueError, match=rf"{option}=True; this implementation has no {option}"):
        muon.load_state_dict(published.state_dict())
    assert differing(muon.state_dict(), before) is None


def test_a_tuned_schedule_loads_only_where_it_was_given() -> None:
    """A checkpoint of a tuned schedule is refused, naming ns_schedule, unless the optimizer has that very schedule."""
    theirs = parameters(torch.float32, SHAPES)
    published = gefen.GefenMuon(named(theirs), lr=1e-2, fused=False, ns_schedule="tuned3")
    _advance(published, theirs, 0, 3)
    saved = published.state_dict()
    _, muon, _, _ = _pair(torch.float32)
    with pytest.raises(ValueError, match=r"was made with ns_schedule=.*pass the same list as ns_schedule"):
        muon.load_state_dict(saved)
    ours = [p.detach().clone().requires_grad_() for p in theirs]
    same = GefenMuon(named(ours), lr=1e-2, ns_schedule=saved["param_groups"][0]["ns_coefficients"])
    same.load_state_dict(snapshot(saved))
    _advance(published, theirs, 3, 6)
    _advance(same, ours, 3, 6)
    assert differing(theirs, ours) is None

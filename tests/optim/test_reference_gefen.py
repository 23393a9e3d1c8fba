"""Gefen's steps, one by one from the state before each, against the algorithm as it is described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gefen_offload import Gefen
from support import reference
from support.steps import DTYPES, named, snapshot

SHAPES: list[tuple[int, ...]] = [
    (),
    (1,),
    (5,),
    (12,),
    (16,),
    (0, 3),
    (6, 4),
    (4, 6),
    (1, 9),
    (9, 1),
    (3, 2, 4),
    (40,),
    (7, 7),
]
KINDS = ("noise", "tiny", "spikes", "steps", "zero", "none")


@dataclass(frozen=True)
class Run:
    """What one example trains: parameters, the gradients of each step, and options."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    gradients: tuple[tuple[str, ...], ...]  # for each step, the kind of each parameter's gradient
    options: dict[str, Any]
    seed: int


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Up to three parameters and four steps under any options."""
    shapes = tuple(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)))
    kinds = st.tuples(*[st.sampled_from(KINDS) for _ in shapes])
    options = {
        "lr": draw(st.sampled_from([0.0, 1e-3, 0.5])),
        "betas": (draw(st.sampled_from([0.0, 0.4, 0.9])), draw(st.sampled_from([0.0, 0.9, 0.999]))),
        "eps": draw(st.sampled_from([1e-8, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "factored_v_2d": draw(st.booleans()),
        "codebook_refresh_every": draw(st.integers(0, 2)),
        "force_1d_period_one": draw(st.booleans()),
        "period_one_substrings": draw(st.sampled_from([(), ("P1",)])),
    }
    gradients = tuple(draw(st.lists(kinds, min_size=1, max_size=4)))
    return Run(draw(st.sampled_from(DTYPES)), shapes, gradients, options, draw(st.integers(0, 2**16)))


def gradient_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor | None:
    """A gradient of that kind. No error that decides a period is exactly a tie, but for flat ones."""
    noise = torch.randn(shape, generator=draw)
    made = {
        "noise": noise,
        "tiny": noise * 1e-3,
        "spikes": torch.where(torch.rand(shape, generator=draw) < 0.2, noise * 30, torch.zeros(())),
        "steps": noise * (torch.arange(noise.numel()).reshape(shape) // 4 % 3 + 0.1),
        "zero": torch.zeros(shape),
    }
    return made[kind].to(dtype) if kind in made else None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(runs())
def test_each_step_follows_the_description(run: Run) -> None:
    """Periods, codebook, indices, magnitudes, second moments, counters and parameters, for any mixture of options."""
    draw = torch.Generator().manual_seed(run.seed)
    parameters = [nn.Parameter(torch.randn(shape, generator=draw).to(run.dtype)) for shape in run.shapes]
    optimizer = Gefen(named(parameters), fused=False, **run.options)
    for count, kinds in enumerate(run.gradients):
        for parameter, kind in zip(parameters, kinds, strict=True):
            parameter.grad = gradient_of(kind, parameter.shape, run.dtype, draw)
        before = snapshot(optimizer.state_dict()), snapshot([p.detach() for p in parameters])
        optimizer.step()
        after = optimizer.state_dict()
        assert after["gefen_global_step"] == count + 1
        levels = _check_codebook(run, parameters, before[0], after)
        for position, parameter in enumerate(parameters):
            _check_parameter(run, position, parameter, before, after, levels)


def _check_codebook(run: Run, parameters: list[nn.Parameter], before: Any, after: Any) -> tuple[Any, Any]:
    """The codebooks before and after the momentum was stored; equal unless this step learnt one."""
    old, new = before["gefen_codebook"], after["gefen_codebook"]
    every, count = run.options["codebook_refresh_every"], before["gefen_global_step"]
    graded = [i for i, p in enumerate(parameters) if p.grad is not None and p.numel()]
    blank = old is None or (len(set(old.tolist())) == 3 and old[1] == 2**-12)
    if graded and (blank or (every and count and count % every == 0)):
        counts = sum(
            reference.histogram_by_definition(parameters[i].grad, after["state"][i]["automatic_period"]) for i in graded
        )
        np.testing.assert_array_equal(new.numpy(), reference.levels_from_centres(counts))
    else:
        assert (new is None and old is None) or torch.equal(new, old)
    return old, new


def _check_parameter(run: Run, position: int, parameter: nn.Parameter, before: Any, after: Any, levels: Any) -> None:
    state, earlier = after["state"][position], before[0]["state"][position]
    old, value = levels[0], before[1][position]
    if parameter.grad is None or parameter.numel() == 0:
        assert torch.equal(parameter, value)
        assert set(state) == set(earlier)
        if "m_codebook" in state and torch.equal(old, levels[1]):
            assert torch.equal(state["m_codebook"], earlier["m_codebook"])
        return
    _check_counters(run, position, parameter, state, earlier)
    gradient = reference.as_float64(parameter.grad).reshape(state["m_codebook"].shape)
    _check_momentum(run, gradient, state, earlier, levels)
    stepsize = _check_second_moment(run, parameter, gradient, state, earlier)
    stored = reference.stored_momentum(state["m_codebook"], state["m_magnitude"], levels[1], run.dtype)
    update = stored * stepsize.reshape(stored.shape if stepsize.size == stored.size else stepsize.shape)
    expected = reference.applied(value, update, run.options["lr"], run.options["weight_decay"])
    assert expected.admit(parameter)


def _check_counters(run: Run, position: int, parameter: nn.Parameter, state: Any, earlier: Any) -> None:
    assert state["name"] == f"p{position}"
    assert state["step"] == earlier.get("step", 0) + 1
    forced = run.options["force_1d_period_one"] and parameter.dim() == 1
    forced = forced or (position == 1 and bool(run.options["period_one_substrings"]))
    if "automatic_period" in earlier:
        assert state["automatic_period"] == earlier["automatic_period"]
    else:
        found = 1 if forced else reference.period_by_definition(parameter.grad, tuple(parameter.shape))
        assert state["automatic_period"] == found


def _check_momentum(run: Run, gradient: Any, state: Any, earlier: Any, levels: Any) -> None:
    before = np.zeros_like(gradient)
    if "m_codebook" in earlier:
        indices = reference.moved(earlier["m_codebook"], *levels)
        before = reference.stored_momentum(indices, earlier["m_magnitude"], levels[1], run.dtype)
    momentum = reference.averaged(before, gradient, run.options["betas"][0], reference.wide(run.dtype))
    assert reference.largest(momentum).admit(state["m_magnitude"])
    least, greatest = reference.index_range(momentum, state["m_magnitude"], levels[1], torch.float32)
    found = state["m_codebook"].numpy().astype(int)
    assert ((least <= found) & (found <= greatest)).all()


def _check_second_moment(run: Run, parameter: nn.Parameter, gradient: Any, state: Any, earlier: Any) -> Any:
    """Check it, and return the step sizes that it gives."""
    beta1, beta2 = run.options["betas"]
    eps = run.options["eps"]
    if parameter.dim() == 2 and run.options["factored_v_2d"]:
        matrix = gradient.reshape(parameter.shape)
        for name, axis in (("v_row", 1), ("v_col", 0)):
            first = torch.zeros(parameter.shape[1 - axis])
            assert reference.factored_moment(earlier.get(name, first), matrix, beta2, axis).admit(state[name])
        age = state["factored_step"]
        assert age == earlier.get("factored_step", 0) + 1
        return reference.factored_stepsize(state["v_row"], state["v_col"], state["step"], age, beta1, beta2, eps)
    first = torch.zeros(len(gradient), 1)
    assert reference.block_moment(earlier.get("vmean", first), gradient, beta2, run.dtype).admit(state["vmean"])
    age = state["vmean_step"]
    assert age == earlier.get("vmean_step", 0) + 1
    return reference.block_stepsize(state["vmean"], state["step"], age, beta1, beta2, eps)

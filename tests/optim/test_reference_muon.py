"""GefenMuon's steps, one by one from the state before each, against the algorithm as it is described."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gefen_offload import GefenMuon
from support import reference
from support.steps import named, snapshot

SHAPES = [(6, 4), (4, 6), (1, 9), (9, 1), (8, 8), (3, 16)]
QUINTIC = (3.4445, -4.7750, 2.0315)
SCHEDULE = [(3.0, -4.0, 2.0), (2.5, -3.0, 1.5)]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
    graded=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=4),
    options=st.fixed_dictionaries(
        {
            "lr": st.sampled_from([0.0, 1e-2, 0.5]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "momentum": st.sampled_from([0.0, 0.4, 0.95]),
            "nesterov": st.booleans(),
            "ns_schedule": st.sampled_from([None, SCHEDULE]),
            "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
            "codebook_refresh_every": st.integers(0, 2),
        }
    ),
    seed=st.integers(0, 2**16),
)
def test_each_step_follows_the_description(dtype: Any, shapes: Any, graded: Any, options: Any, seed: int) -> None:
    """Periods, codebook, indices, magnitudes and counters, and the direction to what bfloat16 leaves of it."""
    draw = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]
    optimizer = GefenMuon(named(parameters), **options)
    for step in graded:
        for parameter, present in zip(parameters, step, strict=False):
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(dtype) if present else None
        before = snapshot(optimizer.state_dict()), snapshot([p.detach() for p in parameters])
        optimizer.step()
        after = optimizer.state_dict()
        _check_codebook(parameters, before[0], after, options["codebook_refresh_every"])
        for position, parameter in enumerate(parameters):
            earlier, value = before[0]["state"][position], before[1][position]
            if parameter.grad is None:
                assert torch.equal(parameter, value)
                assert set(after["state"][position]) == set(earlier)
            else:
                _check_matrix(parameter, value, after["state"][position], earlier, (before[0], after), options)


def _check_codebook(parameters: list[nn.Parameter], before: Any, after: Any, every: int) -> None:
    old, new, count = before["gefen_codebook"], after["gefen_codebook"], before["gefen_global_step"]
    graded = [i for i, p in enumerate(parameters) if p.grad is not None]
    if graded and (old is None or (every and count and count % every == 0)):
        counts = sum(
            reference.histogram_by_definition(parameters[i].grad, after["state"][i]["automatic_period"]) for i in graded
        )
        np.testing.assert_array_equal(new.numpy(), reference.levels_from_centres(counts))
    else:
        assert (new is None and old is None) or torch.equal(new, old)


def _check_matrix(
    parameter: nn.Parameter, value: torch.Tensor, state: Any, earlier: Any, packed: Any, options: Any
) -> None:
    old, new = (part["gefen_codebook"] for part in packed)
    assert set(state) == {"name", "automatic_period", "step", "m_codebook", "m_magnitude"}
    assert state["step"] == earlier.get("step", 0) + 1
    dtype, mu = parameter.dtype, options["momentum"]
    gradient = reference.as_float64(parameter.grad).reshape(state["m_codebook"].shape)
    before = np.zeros_like(gradient)
    if "m_codebook" in earlier:
        indices = reference.moved(earlier["m_codebook"], old, new)
        before = reference.stored_momentum(indices, earlier["m_magnitude"], new, dtype)
    else:
        assert state["automatic_period"] == reference.period_by_definition(parameter.grad, tuple(parameter.shape))
    momentum = reference.averaged(before, gradient, mu, dtype)
    assert reference.largest(momentum).admit(state["m_magnitude"])
    least, greatest = reference.index_range(momentum, state["m_magnitude"], new, dtype)
    found = state["m_codebook"].numpy().astype(int)
    assert ((least <= found) & (found <= greatest)).all()
    stored = reference.stored_momentum(state["m_codebook"], state["m_magnitude"], new, dtype)
    update = mu * stored + (1 - mu) * gradient if options["nesterov"] else stored
    _check_direction(parameter, value, update.reshape(parameter.shape), options)


def _check_direction(parameter: nn.Parameter, value: torch.Tensor, update: Any, options: Any) -> None:
    """The parameter moved along the orthogonalised update, whose bfloat16 leaves an error of a few per cent."""
    rows, cols = parameter.shape
    steps = options["ns_schedule"] or [QUINTIC] * 5
    native = (
        0.2 * max(rows, cols) ** 0.5 if options["adjust_lr_fn"] == "match_rms_adamw" else max(1, rows / cols) ** 0.5
    )
    length = options["lr"] * native
    shrunk = reference.as_float64(value) * (1 - options["lr"] * options["weight_decay"])
    moved = shrunk - length * reference.orthogonalised(update, steps, 1e-7)
    error = np.linalg.norm(reference.as_float64(parameter) - moved)
    rounding = 4 * torch.finfo(parameter.dtype).eps * np.linalg.norm(shrunk)
    assert error <= 0.1 * length * min(rows, cols) ** 0.5 + rounding

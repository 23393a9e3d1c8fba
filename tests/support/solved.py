"""Runs that are compared learn the same codebook: here it is solved once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

from gefen_offload.optim.codebook import solve_codebook

SOLVED: dict[bytes, Tensor] = {}


def remembered(counts: Tensor) -> Tensor:
    """The solver is a pure function of the counts; the runs only need what it returns."""
    key = counts.numpy().tobytes()
    if key not in SOLVED:
        SOLVED[key] = solve_codebook(counts)
    return SOLVED[key].clone()


@contextmanager
def solving_once() -> Iterator[None]:
    """In place of the solver wherever the optimizers imported it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            mine = name.startswith("gefen_offload.optim.")
            if mine and getattr(module, "solve_codebook", None) is solve_codebook:
                patch.setattr(module, "solve_codebook", remembered)
        yield

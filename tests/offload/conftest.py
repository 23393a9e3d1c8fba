"""Every test here compares runs that learn the same codebook."""

from __future__ import annotations

import pytest

import gefen_offload.optim.gefen  # noqa: F401 - what imports the solver is imported before it is replaced
from support.solved import solving_once


@pytest.fixture(autouse=True)
def solve_each_codebook_once():
    """See `support.solved`."""
    with solving_once():
        yield

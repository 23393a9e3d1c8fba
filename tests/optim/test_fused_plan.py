"""How pieces are divided among programs."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gefen_offload.optim import fused
from gefen_offload.optim.fused.plan import EVEN, LONGEST_SHORT, plan_blocks, plan_factors


@given(period=st.integers(1, 10**8), cols=st.integers(0, 10**5))
@example(period=2 * 50304, cols=50304)
@example(period=16 * 9001, cols=9001)
def test_segments_cover_a_block(period: int, cols: int) -> None:
    """Segments fit in a tile, cover a long block exactly, and stay inside rows where the plan says so."""
    plan = plan_blocks(period, cols)
    assert plan.length <= plan.width <= max(LONGEST_SHORT, plan.width * plan.blocks)
    assert plan.long == (period > LONGEST_SHORT)
    if plan.long:
        assert (plan.parts - 1) * plan.length < period <= plan.parts * plan.length
        assert plan.length % EVEN == 0 or period % EVEN
    if plan.moment == 1:
        assert cols % plan.length == 0
        assert period % plan.length == 0
    assert plan.width & (plan.width - 1) == 0


@given(rows=st.integers(1, 10**6), cols=st.integers(1, 10**5))
def test_strips_cover_a_matrix(rows: int, cols: int) -> None:
    """The first stage's programs cover every row and column, and a column has few partial sums."""
    plan = plan_factors(rows, cols)
    assert (plan.strips - 1) * plan.strip < rows <= plan.strips * plan.strip
    assert (plan.groups - 1) * plan.width < cols <= plan.groups * plan.width
    assert plan.strips <= 256


@given(rows=st.integers(1, 2**12), cols=st.integers(1, 2**12), blocks=st.integers(1, 2**6))
def test_blocks_of_whole_tiles(rows: int, cols: int, blocks: int) -> None:
    """A block has tiles of its own in the pass for row and column sums where it consists of whole ones, else none."""
    plan = plan_factors(rows * blocks, cols)
    tiles = plan.block_tiles(rows * cols, cols)
    assert tiles == (rows // plan.height * plan.groups if rows % plan.height == 0 else 0)
    assert plan.block_tiles(rows * cols + 1, cols) == 0 or cols * plan.height == 1


def test_unavailable_says_why() -> None:
    """On the CPU, outside the interpreter, and for float64 the kernels say why they cannot run."""
    assert "float64" in str(fused.why_not(torch.device("cuda"), torch.float64))
    assert not fused.available(torch.device("cpu"), torch.float64)


def test_negating_views_are_not_stepped_in_place():
    """Their memory holds other values than theirs, though it is contiguous."""
    from gefen_offload.optim.fused.update import _in_place
    from support.fused import Case, pieces_of

    (piece,) = pieces_of(Case((4, 32), 8), torch.float32, torch.device("cpu"))
    work = piece.piece.work
    assert _in_place(piece)
    for name in ("parameter", "gradient"):
        negated = replace(work, **{name: torch._neg_view(getattr(work, name))})
        assert not _in_place(replace(piece, piece=replace(piece.piece, work=negated)))

"""Staged pieces as the kernels read them: a row of 20 words each, in groups that one launch can step."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from gefen_offload.optim.fused.plan import TILES, BlockPlan, plan_blocks, plan_factors
from gefen_offload.optim.work import Scalars, StagedPiece, Work

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

ROW_WORDS = 20
SCALAR_WORDS = 16  # where a row's hyper-parameters begin
_WORDS = struct.Struct("<16q")
_SCALARS = struct.Struct("<8f")


class StepKind(NamedTuple):
    """What the pieces of one update launch have in common."""

    long: bool
    width: int
    blocks: int
    moment: int
    parameter: torch.dtype
    gradient: torch.dtype
    exact: bool
    aligned: int
    near: bool  # 1 - beta1 is below a half


class FactorKind(NamedTuple):
    """What the matrices of one launch for row and column sums have in common."""

    height: int
    width: int
    gradient: torch.dtype
    exact: bool
    aligned: int
    momentum: bool  # blocks are such that the largest |m| can be taken as well
    near: bool


class Row(NamedTuple):
    """A row, and what of it a later step changes: a gradient's address, at `word`, and the hyper-parameters."""

    content: bytes
    work: Work
    word: int
    offset: int  # of the address, in the gradient, in bytes


@dataclass
class Group:
    """Rows of one kind, and for each of the launches that read them every row's programs."""

    warps: int
    rows: list[Row] = field(default_factory=list)
    programs: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outline:
    """What is the same for all pieces of one shape: it is worked out once, as a step has many of them."""

    plan: BlockPlan
    kinds: dict[tuple[int, bool], StepKind]  # by alignment, near
    programs: tuple[int, int, int]
    split: int
    magic: int
    partials: int
    results: int
    block_slots: int  # of a block in the pass that takes row and column sums, where that can take them


Outlines = dict[tuple[torch.dtype, torch.dtype, int, int, int], Outline]


def outline_of(parameter: torch.dtype, gradient: torch.dtype, period: int, blocks: int, cols: int) -> Outline:
    """The outline of a piece of `blocks` blocks; `cols` is the matrix's width, or 0 for the block second moment."""
    plan = plan_blocks(period, cols)
    exact = plan.length == plan.width and period % plan.length == 0
    common = (plan.long, plan.width, plan.blocks, plan.moment, parameter, gradient, exact)
    kinds = {key: StepKind(*common, *key) for key in product((1, 2, 4, 8, 16), (False, True))}
    tiles = -(-blocks * max(1, plan.parts) // plan.blocks)
    programs = -(-tiles // TILES)
    block_slots = plan_factors(blocks * period // cols, cols).block_tiles(period, cols) if cols and plan.long else 0
    return Outline(
        plan,
        kinds,
        (programs, blocks, programs),
        plan.length | plan.parts << 32,
        min(-(-(2**32) // cols), 2**32 - 1) if cols else 0,
        2 * blocks * max(plan.parts, block_slots),
        4 * blocks if plan.long else 0,
        block_slots,
    )


class Description:
    """Staged pieces, described one by one. Their sums take `floats` of scratch; `outlines` are kept between steps.

    Gradients must be contiguous.
    """

    def __init__(self, outlines: Outlines) -> None:
        self.floats = 0
        self.steps: dict[StepKind, Group] = {}
        self.factors: dict[FactorKind, Group] = {}
        self._outlines = outlines
        self._scalars: dict[tuple[int, bool], bytes] = {}
        self._means: dict[int, int] = {}

    def add(self, staged: StagedPiece, parameter_at: int) -> None:
        """Describe a piece with its elements at `parameter_at`: its update and, for a matrix, its sums."""
        piece, tensors = staged.piece, staged.tensors
        work, first = piece.work, piece.first
        parameter, gradient, period, factored = work.parameter, work.gradient, work.period, work.factored
        blocks, position = piece.last - first, first * period
        scalars = self._scalars.get((id(work.scalars), factored)) or self._pack(work.scalars, factored)
        offset = position * gradient.itemsize
        gradient_at = gradient.data_ptr() + offset
        indices_at, magnitudes_at = tensors["m_codebook"].data_ptr(), tensors["m_magnitude"].data_ptr()
        addresses = parameter_at | gradient_at | indices_at
        if factored:
            v_col = tensors["v_col"]
            moments_at, columns_at, cols = tensors["v_row"].data_ptr(), v_col.data_ptr(), v_col.numel()
            addresses |= columns_at
        else:
            moments_at, columns_at, cols, mean = tensors["vmean"].data_ptr(), 0, 0, 0
        key = (parameter.dtype, gradient.dtype, period, blocks, cols)
        outline = self._outlines.get(key)
        if outline is None:
            outline = self._outlines[key] = outline_of(*key)
        partials = self.floats
        results = partials + outline.partials
        self.floats = (results + outline.results + 3) & -4
        programs, slots = outline.programs, outline.plan.parts
        if factored:
            if id(work) not in self._means:
                shape, possible = (work.blocks * period // cols, cols), outline.block_slots > 0
                taken = possible and blocks == work.blocks and indices_at % 16 == 0
                state = (moments_at, columns_at, indices_at, magnitudes_at, partials)
                self._add_matrix(work, shape, state, first, possible, taken, scalars)
                if taken:
                    programs, slots = (0, *programs[1:]), outline.block_slots
            mean = self._means[id(work)]
        row = _WORDS.pack(
            parameter_at,
            gradient_at,
            indices_at,
            magnitudes_at,
            moments_at,
            columns_at,
            blocks,
            period,
            position,
            cols,
            mean,
            outline.magic,
            outline.split,
            partials,
            results,
            slots,
        )
        aligned = alignment_of(period, blocks, outline.plan, addresses)
        kind = outline.kinds[aligned, nearer_to_momentum(work.scalars)]
        group = self.steps.get(kind)
        if group is None:
            group = self.steps[kind] = Group(outline.plan.warps)
        group.rows.append(Row(row + scalars, work, 1, offset))
        group.programs.append(programs)

    def _add_matrix(
        self,
        work: Work,
        shape: tuple[int, int],
        state: tuple[int, int, int, int, int],
        first: int,
        momentum: bool,
        taken: bool,
        scalars: bytes,
    ) -> None:
        """Describe a matrix's row and column averages, taken anew on its first piece.

        `momentum`: that pass can take the largest |m| as well. `taken`: it does, and leaves them from `state[-1]` on.
        """
        rows, cols = shape
        gradient = work.gradient
        plan = plan_factors(rows, cols)
        fresh = plan.groups if first == 0 else 0
        mean = self._means[id(work)] = self._take(1)
        row = _WORDS.pack(
            *state[:2],
            gradient.data_ptr(),
            rows,
            cols,
            plan.strip,
            self._take(rows * plan.groups if fresh else 0),
            self._take(cols * plan.strips if fresh else 0),
            self._take(-(-rows // 512)),
            mean,
            fresh,
            *state[2:4],
            work.period // cols if taken else 0,
            state[4],
            0,
        )
        aligned = 16 if cols % 16 == 0 and gradient.data_ptr() % 16 == 0 else 1
        near = momentum and nearer_to_momentum(work.scalars)
        kind = FactorKind(plan.height, plan.width, gradient.dtype, plan.exact(rows, cols), aligned, momentum, near)
        group = self.factors.get(kind)
        if group is None:
            group = self.factors[kind] = Group(plan.warps)
        group.rows.append(Row(row + scalars, work, 2, 0))
        columns = 1 + (-(-cols // 128) if fresh else 0)
        group.programs.append((plan.strips * plan.groups if fresh else 0, -(-rows // 512), columns))

    def _take(self, floats: int) -> int:
        """The position of `floats` new floats of scratch, a multiple of 4."""
        position, self.floats = self.floats, self.floats + (floats + 3) // 4 * 4
        return position

    def _pack(self, scalars: Scalars, factored: bool) -> bytes:
        packed = self._scalars[id(scalars), factored] = pack_scalars(scalars, factored)
        return packed


def nearer_to_momentum(scalars: Scalars) -> bool:
    """Whether 1 - beta1 is below a half: torch's lerp then begins at the momentum, else at the gradient."""
    return bool(np.float32(1 - scalars.beta1) < 0.5)


def pack_scalars(scalars: Scalars, factored: bool) -> bytes:
    """The half words of a row: float32; the second bias correction as torch's CUDA division by a scalar has it."""
    values = (scalars.lr, scalars.decay, scalars.bias1, scalars.bias2)
    if any(isinstance(value, Tensor) for value in values):
        raise TypeError("the fused update takes hyper-parameters as Python floats; device scalars need the plain path")
    lr, decay, bias1, bias2 = (float(value) for value in values)
    inverse2 = np.float32(1) / np.float32(bias2 if factored else bias2**0.5)
    return _SCALARS.pack(
        1 - scalars.beta1, scalars.beta2, 1 - scalars.beta2, scalars.eps, decay, lr, 1 / bias1, float(inverse2)
    )


def alignment_of(period: int, blocks: int, plan: BlockPlan, addresses: int) -> int:
    """The bytes that every address of a piece, or'ed into `addresses`, may be taken to be a multiple of.

    [Note: alignment] The compiler lays a tile out by it, and a layout decides the order of a sum. So wherever there are
    sums it must not depend on how a parameter was cut: it follows from the period where blocks are short, and for
    others from addresses that are the same however the state is staged (state tensors are 16-byte aligned).
    """
    if period == plan.width and period < 16 and period > 1:
        return period if addresses % period == 0 else 1
    if addresses % 16:
        return 1
    return 16 if period % 16 == 0 or (period == 1 and blocks % 16 == 0) else 1

"""GefenMuon's momentum of one matrix: the largest |m| of each block, then indices and what is orthogonalised.

Every operation is rounded to the gradient's dtype, as the plain path's are. A program takes TILE elements in a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from gefen_offload.optim.fused.arithmetic import INTERPRETED, lerp, magnitude_bits, nearest, rounded


@triton.jit
def _to(x, DTYPE: tl.constexpr):
    """x as DTYPE would hold it, in float32."""
    return rounded(x, DTYPE).to(tl.float32)


@triton.jit
def _places(count, period, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """This tile's elements, which of them there are, and the block of each; WHOLE: a tile lies in one block."""
    first = tl.program_id(0).to(tl.int64) * TILE
    lanes = tl.arange(0, TILE)
    block = first // period
    if not WHOLE:
        block += ((first - block * period).to(tl.int32) + lanes) // period
    return first + lanes, first + lanes < count, block


@triton.jit
def _moved(gradients, indices, magnitudes, levels, weight, elements, inside, block, NEAR: tl.constexpr):
    """The gradient, and the momentum that it makes of the stored one: lerp(m, g, weight)."""
    DTYPE: tl.constexpr = gradients.dtype.element_ty
    g = tl.load(gradients + elements, mask=inside, other=0.0).to(tl.float32)
    index = tl.load(indices + elements, mask=inside, other=0).to(tl.int32)
    magnitude = _to(tl.load(magnitudes + block), DTYPE)
    stored = _to(tl.load(levels + index) * magnitude, DTYPE)
    return g, _to(lerp(stored, g, weight, NEAR), DTYPE)


@triton.jit(do_not_specialize=["count", "period", "weight"])
def largest_momenta(
    gradients,
    indices,
    magnitudes,
    levels,
    largest,
    count: tl.int64,
    period: tl.int32,
    weight: tl.float32,
    NEAR: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raise each block's `largest`, zeros before, to its largest |m|, as the bits of a float32.

    Bits of magnitudes order as these do, so that integers are compared, exactly and in any order.
    """
    elements, inside, block = _places(count, period, WHOLE, TILE)
    block = tl.minimum(block, (count - 1) // period)
    _, m = _moved(gradients, indices, magnitudes, levels, weight, elements, inside, block, NEAR)
    bits = tl.where(inside, magnitude_bits(m), 0)
    if WHOLE:
        tl.atomic_max(largest + block, tl.max(bits, 0), sem="relaxed")
    else:
        tl.atomic_max(largest + block, bits, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["count", "period", "weight", "momentum"])
def store_momenta(
    gradients,
    indices,
    magnitudes,
    levels,
    largest,
    cells,
    updates,
    count: tl.int64,
    period: tl.int32,
    weight: tl.float32,
    momentum: tl.float32,
    NEAR: tl.constexpr,
    NESTEROV: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The indices of m over its block's largest, and what they stand for, one gradient ahead if NESTEROV, bfloat16."""
    DTYPE: tl.constexpr = gradients.dtype.element_ty
    elements, inside, block = _places(count, period, WHOLE, TILE)
    block = tl.minimum(block, (count - 1) // period)
    g, m = _moved(gradients, indices, magnitudes, levels, weight, elements, inside, block, NEAR)
    magnitude = tl.load(largest + block)
    quotient = _to(tl.div_rn(m, tl.where(magnitude == 0.0, 1.0, magnitude) + tl.zeros_like(m)), DTYPE)
    index = nearest(quotient, levels, cells, STEPS)
    tl.store(indices + elements, index.to(tl.uint8), mask=inside)
    update = _to(tl.load(levels + index.to(tl.uint32)) * magnitude, DTYPE)
    if NESTEROV:
        if INTERPRETED:  # torch rounds the weight of a sum to DTYPE on the CPU, and only there
            weight = _to(weight + tl.zeros_like(g), DTYPE)
        update = _to(tl.fma(weight, g, _to(update * momentum, DTYPE)), DTYPE)
    tl.store(updates + elements, rounded(update, tl.bfloat16), mask=inside)

"""The arithmetic of one element, in Triton, with each rounding where the plain path has it.

Kernels that use these functions are compiled with `enable_fp_fusion=False`: a product and a sum are contracted only
where `tl.fma` says so, which is where torch's own kernels contract them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

ROW = tl.constexpr(20)  # int64 words of one piece's row in the table
SCALE = tl.constexpr(256)  # where what finds a cell begins in the table of levels
THRESHOLDS = tl.constexpr(264)  # where they begin in the table of levels
SLOTS = tl.constexpr(256)  # pieces of one launch


@triton.jit
def _probe():
    pass


INTERPRETED = tl.constexpr(isinstance(_probe, InterpretedFunction))


@triton.jit
def find_piece(starts):
    """This program's piece and its tile in it; starts[k] is the first program of piece k, ascending."""
    program = tl.program_id(0)
    slots = tl.arange(0, SLOTS)
    piece = tl.sum((tl.load(starts + slots) <= program).to(tl.int32), 0) - 1
    return piece, program - tl.load(starts + piece)


@triton.jit
def address(word, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to DTYPE stored at `word`, which is a multiple of ALIGNED bytes."""
    pointer = tl.load(word).to(tl.pointer_type(DTYPE))
    if ALIGNED > 1:
        pointer = tl.multiple_of(pointer, ALIGNED)
    return pointer


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 to DTYPE, to nearest even. The interpreter would truncate to bfloat16, so there the bits are rounded."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def magnitude_bits(x):
    """|x| as an integer that orders as |x| does, a NaN last: the largest is exact in any order and keeps a NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def lerp(m, g, weight, NEAR: tl.constexpr):
    """torch.lerp(m, g, weight), contracted as torch's CUDA kernel is; NEAR: the weight is below a half."""
    if NEAR:
        return tl.fma(weight, g - m, m)
    return tl.fma(weight - 1.0, g - m, g)


@triton.jit
def products(index, levels, a, b, c):
    """((levels[index] * a) * b) * c for the elements of one block: the 256 products are looked up in shared memory."""
    return tl.gather(tl.load(levels + tl.arange(0, 256)) * a * b * c, index, 0)


@triton.jit
def divided(a, negative, inverse):
    """a / b, given -b and 1 / b rounded: corrected once, so that it is a / b rounded but for rare last bits."""
    q = a * inverse
    return tl.fma(tl.fma(q, negative, a), inverse, q)


@triton.jit
def divisor_of(largest):
    """For m / largest: a power of two that brings `largest` into a safe range, minus their product, and its reciprocal.

    Blocks of zeros divide by one. Three multiplications an element then do what `div_rn` needs a branch for.
    """
    scale = tl.where(largest < 5.421010862427522e-20, 7.922816251426434e28, 1.0)
    scale = tl.where(largest > 1.8446744073709552e19, 5.421010862427522e-20, scale)
    divisor = tl.where(largest == 0.0, 1.0, largest * scale)
    return scale, -divisor, tl.div_rn(1.0, divisor)


@triton.jit
def nearest(x, levels, cells, STEPS: tl.constexpr):
    """The index of the level nearest to x, of [-1, 1]: how many thresholds are below x (see tables.py).

    A cell says how many lie below it and which one is next; inside it there are at most STEPS to compare.
    STEPS = 0 means that there may be many: then a binary search.
    """
    if STEPS == 0:
        found = tl.zeros_like(x).to(tl.int32)
        for step in tl.static_range(8):
            half = 128 >> step
            found += tl.where(x > tl.load(levels + found + (THRESHOLDS + half - 1)), half, 0)
    else:
        # Adding 2**23 leaves the nearest integer in the low bits; the mask keeps what is not a number inside the table.
        cell = tl.fma(x, tl.load(levels + SCALE), tl.load(levels + SCALE + 1)).to(tl.int32, bitcast=True) & 0x1FFF
        entry = tl.load(cells + cell.to(tl.uint32))
        below = (entry >> 32).to(tl.int32)
        found = below + (x > entry.to(tl.int32).to(tl.float32, bitcast=True)).to(tl.int32)
        for step in tl.static_range(1, STEPS):
            found += (x > tl.load(levels + below + (THRESHOLDS + step))).to(tl.int32)
    return found


@triton.jit
def block_mean(total, period, GRADIENT: tl.constexpr):
    """The mean of g^2 over blocks from its sum, rounded as the plain path rounds it."""
    mean = total * tl.div_rn(1.0, period.to(tl.float32))
    if tl.bfloat16 == GRADIENT:
        mean = rounded(mean, tl.bfloat16).to(tl.float32)
    return mean


@triton.jit
def square(g, GRADIENT: tl.constexpr):
    """g^2 in float32, rounded to bfloat16 for a bfloat16 gradient."""
    squared = g * g
    if tl.bfloat16 == GRADIENT:
        squared = rounded(squared, tl.bfloat16).to(tl.float32)
    return squared


@triton.jit
def averaged(old, mean, beta2, rest2):
    """beta2 old + (1 - beta2) mean, as mul_ and add_ with alpha round it."""
    return tl.fma(rest2, mean, old * beta2)


@triton.jit
def stepsize_of(v, scale, inverse1, eps):
    """(1/bc1) / (sqrt(v) scale + eps), where `scale` is 1 / sqrt(bc2)."""
    return tl.div_rn(1.0, tl.sqrt_rn(v) * scale + eps) * inverse1


@triton.jit
def rough_root(v):
    """1 / sqrt(|v|) to about a last bit, for |v| >= 1e-38."""
    if INTERPRETED:
        return tl.rsqrt(tl.abs(v))
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; rsqrt.approx.ftz.f32 $0, a; }", "=f,f", [v], tl.float32, True, 1
    )


@triton.jit
def rough_inverse(d):
    """1 / |d| to about a last bit."""
    if INTERPRETED:
        return tl.div_rn(1.0, tl.abs(d))
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; rcp.approx.ftz.f32 $0, a; }", "=f,f", [d], tl.float32, True, 1
    )


@triton.jit
def half_inverse(negative, scale, eps):
    """0.5 / (sqrt(v) scale + eps) to the last bits, given -v, for v >= 1e-38.

    Without the branches of `sqrt_rn` and `div_rn`: each approximation is corrected once by what it leaves. Twice the
    root's correction is that over the root, and doubling is exact, so the double is what is computed; with the sign
    turned, as a negation would be an operation of its own.
    """
    y = rough_root(negative)
    root = negative * y
    twice = tl.fma(tl.fma(root, root, negative) * scale, y, tl.fma(root, 2.0 * scale, -2.0 * eps))
    inverse = rough_inverse(twice)
    return tl.fma(tl.fma(twice, inverse, 1.0), inverse, inverse)


@triton.jit
def applied(p, change, decay, PARAMETER: tl.constexpr):
    """p (1 - lr wd), rounded; then p - lr update, rounded once."""
    if decay != 1.0:
        p = rounded(p * decay, PARAMETER).to(tl.float32)
    return rounded(p - change, PARAMETER)


@triton.jit
def rows_within(j, cols, magic):
    """j // cols for 0 <= j < cols + 2**13. magic = ceil(2**32 / cols) below 2**15 columns; above, j passes one end."""
    q = tl.umulhi(j.to(tl.uint32), magic.to(tl.uint32)).to(tl.int32)
    q = tl.where(cols >= 32768, 0, q)
    return q + (j - q * cols >= cols).to(tl.int32)

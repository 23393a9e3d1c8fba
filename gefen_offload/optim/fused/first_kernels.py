"""The kernels of a first step: counts for the codebook's histogram, and the sums that a period is chosen by.

[Note: variants] A small model's first step is mostly the time that its kernels compile. So each has one variant for a
dtype: whatever else differs between gradients is a number that nobody specialises on, and little is unrolled.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(4096)


@triton.jit(do_not_specialize=["gradient", "largest", "counts", "count", "period"])
def bin_counts(gradient, largest, counts, count: tl.int32, period: tl.int32, TILE: tl.constexpr, COPIES: tl.constexpr):
    """Count `count` elements, divided by the largest of their block, into 4096 bins: one of COPIES rows a program.

    Integer sums are exact in any order; the copies are there so that few programs wait for the same counter.
    """
    program = tl.program_id(0)
    element = program * TILE + tl.arange(0, TILE)
    inside = element < count
    g = tl.load(gradient + element, mask=inside, other=0.0).to(tl.float32)
    x = tl.div_rn(g, tl.load(largest + element // period, mask=inside, other=1.0))
    x = tl.where(x == x, x, 0.0)
    bin = tl.minimum(tl.maximum((x + 1.0) * (BINS // 2), 0.0), BINS - 1.0).to(tl.int32)
    tl.atomic_add(counts + (program % COPIES * BINS + bin), 1, mask=inside, sem="relaxed")


@triton.jit
def _square(pointers, inside):
    x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return (x * x).to(tl.float64)


@triton.jit(do_not_specialize=["source", "sums", "kept", "count", "period"])
def pair_sums(source, sums, kept, count: tl.int64, period: tl.int32, BLOCKS: tl.constexpr, LEVELS: tl.constexpr):
    """Sums over `count` blocks of `period` squared gradients, or over block means (of float64), BLOCKS a program.

    Sum 0: the squared deviations of the elements from their blocks' means. Sum k of LEVELS: the squared differences of
    the two means of each pair, where level k pairs the means of level k - 1. The means of the last level are kept.
    All in float64 and in a fixed order. What lies beyond `count` is zero, so sum k is right while 2**k divides `count`.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    block = program.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    first = source + block * period
    if tl.float64 == source.dtype.element_ty:
        means = tl.load(first, mask=inside, other=0.0)
    else:
        means = _square(first, inside)
        if period > 1:
            for k in range(1, period):
                means += _square(first + k, inside)
            means = means / period.to(tl.float64)
            apart = tl.zeros([BLOCKS], tl.float64)
            for k in range(period):
                deviations = _square(first + k, inside) - means
                apart += deviations * deviations
            tl.store(sums + program, tl.sum(apart, 0))
    for level in tl.static_range(1, LEVELS + 1):
        left, right = tl.split(tl.reshape(means, [BLOCKS >> level, 2]))
        means = (left + right) * 0.5
        tl.store(sums + level * programs + program, tl.sum((left - right) * (left - right), 0))
    tl.store(kept + program.to(tl.int64) * (BLOCKS >> LEVELS) + tl.arange(0, BLOCKS >> LEVELS), means)

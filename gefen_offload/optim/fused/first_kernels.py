"""The kernels of a first step: counts for the codebook's histogram, and the sums that a period is chosen by."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from gefen_offload.optim.fused.arithmetic import ROW, address, find_piece, magnitude_bits

# Words of a row.
SOURCE, COUNT, PERIOD, SPLIT, LARGEST, MEANS, SUMS = (tl.constexpr(word) for word in range(7))

BINS = tl.constexpr(4096)
LEVELS_KEPT = tl.constexpr(16)  # sums that a program of `pair_sums` leaves


@triton.jit
def _segments(words, tile, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr):
    """The tile's segments, their blocks, their first elements and how many each has."""
    period = tl.load(words + PERIOD)
    length = tl.load(words + SPLIT) & 0xFFFFFFFF
    parts = tl.load(words + SPLIT) >> 32
    segment = tile.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    block = segment // parts
    part = segment - block * parts
    begin = block * period + part * length
    within = block < tl.load(words + COUNT)
    filled = tl.where(within, tl.minimum(length, period - part * length), 0).to(tl.int32)
    if ALIGNED == 16:
        begin = tl.multiple_of(begin, 16)
        filled = tl.multiple_of(filled, 16)
    return segment, block, begin, filled, within


@triton.jit(do_not_specialize=["row", "start"])
def segment_largest(
    words,
    floats,
    starts,
    row,
    start,
    counts,
    GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The bits of the largest |g| of each block that is cut into segments: an integer maximum, exact in any order."""
    piece, tile = find_piece(starts + start)
    words += (row + piece) * ROW
    _, block, begin, filled, within = _segments(words, tile, WIDTH, BLOCKS, ALIGNED)
    lanes = tl.arange(0, WIDTH)
    inside = lanes[:, None] < filled[None, :]
    local = lanes[:, None] + begin[None, :]
    g = tl.load(address(words + SOURCE, GRADIENT, ALIGNED) + local, mask=inside, other=0.0).to(tl.float32)
    largest = address(words + LARGEST, tl.int32, 4)
    tl.atomic_max(largest + block, tl.max(magnitude_bits(g), 0), mask=within, sem="relaxed")


@triton.jit(do_not_specialize=["row", "start"])
def bin_counts(
    words,
    floats,
    starts,
    row,
    start,
    counts,
    GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LONG: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILES: tl.constexpr,
):
    """Count the elements, divided by the largest of their block, into 4096 bins: TILES tiles a program."""
    piece, group = find_piece(starts + start)
    words += (row + piece) * ROW
    gradients = address(words + SOURCE, GRADIENT, ALIGNED)
    segments = tl.load(words + COUNT) * (tl.load(words + SPLIT) >> 32)
    tiles = tl.minimum((segments + BLOCKS - 1) // BLOCKS - group.to(tl.int64) * TILES, TILES).to(tl.int32)
    lanes = tl.arange(0, WIDTH)
    found = tl.zeros([BINS], tl.int32)
    padding = 0
    for step in range(tiles):
        _, block, begin, filled, within = _segments(words, group * TILES + step, WIDTH, BLOCKS, ALIGNED)
        inside = lanes[:, None] < filled[None, :]
        local = lanes[:, None] + begin[None, :]
        g = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
        if LONG:
            bits = tl.load(address(words + LARGEST, tl.int32, 4) + block, mask=within, other=0)
        else:
            bits = tl.max(magnitude_bits(g), 0)
        x = tl.div_rn(g, bits.to(tl.float32, bitcast=True)[None, :])
        x = tl.where(x == x, x, 0.0)
        bin = tl.minimum(tl.maximum((x + 1.0) * 2048.0, 0.0), 4095.0).to(tl.int32)
        bin = tl.where(inside, bin, 2048)
        found += tl.histogram(tl.reshape(bin, [WIDTH * BLOCKS]), BINS)
        padding += WIDTH * BLOCKS - tl.sum(filled, 0)
    bins = tl.arange(0, BINS)
    found -= tl.where(bins == 2048, padding, 0)
    tl.atomic_add(counts + bins, found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["row", "start"])
def pair_sums(
    words,
    floats,
    starts,
    row,
    start,
    counts,
    SOURCE_TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr,
    KEEP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Sums over BLOCKS blocks of `period` squared gradients, or over as many block means (SOURCE_TYPE float64).

    Sum 0: the squared deviations of the elements from their blocks' means. Sum k of LEVELS: those of the blocks' means
    from the means of 2**k blocks side by side. KEEP: the means of the last level are stored. All in float64, in a fixed
    order; `count` is a multiple of 2**LEVELS, so that no group is cut.
    """
    piece, tile = find_piece(starts + start)
    words += (row + piece) * ROW
    period = tl.load(words + PERIOD).to(tl.int32)
    count = tl.load(words + COUNT)
    first = tile.to(tl.int64) * BLOCKS
    sums = address(words + SUMS, tl.float64, 8) + tile * LEVELS_KEPT
    source = address(words + SOURCE, SOURCE_TYPE, ALIGNED) + first * period
    blocks = tl.arange(0, BLOCKS)
    if WIDTH == 1:
        x = tl.load(source + blocks, mask=first + blocks < count, other=0.0)
        if tl.float64 == SOURCE_TYPE:
            means = x
        else:
            x = x.to(tl.float32)
            means = (x * x).to(tl.float64)
        tl.store(sums, 0.0)
    else:
        lanes = tl.arange(0, WIDTH)
        inside = (lanes < period)[:, None] & (first + blocks < count)[None, :]
        x = tl.load(source + (lanes[:, None] + blocks[None, :] * period), mask=inside, other=0.0).to(tl.float32)
        y = (x * x).to(tl.float64)
        means = tl.sum(y, 0) / period.to(tl.float64)
        deviations = tl.where(inside, y - means[None, :], 0.0)
        tl.store(sums, tl.sum(tl.sum(deviations * deviations, 0), 0))
    joined = means
    for level in tl.static_range(LEVELS):
        groups = tl.reshape(means, [BLOCKS >> (level + 1), 2 << level])
        joined = tl.sum(groups, 1) * (0.5 / (1 << level))
        apart = groups - joined[:, None]
        tl.store(sums + level + 1, tl.sum(tl.sum(apart * apart, 1), 0))
    if KEEP:
        kept = (first >> LEVELS) + tl.arange(0, BLOCKS >> LEVELS)
        tl.store(address(words + MEANS, tl.float64, 8) + kept, joined, mask=kept < (count >> LEVELS))

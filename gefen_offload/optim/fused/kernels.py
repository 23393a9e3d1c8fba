"""The update kernels: blocks that fit in a tile in one pass, longer ones in three launches.

A launch steps many pieces. Each has a row of 20 words in a table; see `Description.add` for what they hold. A tile is
BLOCKS segments of up to WIDTH elements: whole blocks in the short kernel, parts of blocks in the long ones.
Tiles are (WIDTH, BLOCKS): with the elements that lie side by side along the first axis, the compiler gives the look-ups
in the tables the layout of the loads, and nothing is exchanged between threads. What a block's result depends on is the
block alone, so neither the pieces nor the launches they are grouped into matter.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from gefen_offload.optim.fused.arithmetic import (
    ROW,
    address,
    applied,
    averaged,
    block_mean,
    divided,
    divisor_of,
    find_piece,
    inverse_roots,
    lerp,
    magnitude_bits,
    nearest,
    rows_within,
    square,
    stepsize_of,
)

# Words of a row; the hyper-parameters are float32, counted in half words.
GRADIENTS, INDICES, MAGNITUDES, MOMENTS, COLUMNS = (tl.constexpr(word) for word in range(1, 6))
COUNT, PERIOD, POSITION, COLS, MEAN, MAGIC, SPLIT, PARTIALS, RESULTS = (tl.constexpr(word) for word in range(6, 15))
WEIGHT, BETA2, REST2, EPS, DECAY, LR, INVERSE1, INVERSE2 = (tl.constexpr(half) for half in range(32, 40))

LARGEST = tl.constexpr(3.4028234663852886e38)  # float32

BLOCK_MOMENT = tl.constexpr(0)  # one second moment a block
ALONG_ROWS = tl.constexpr(1)  # factored, and every segment lies inside one matrix row
ANYWHERE = tl.constexpr(2)  # factored, with segments that may cross rows


@triton.jit
def _factored_stepsize(
    words,
    floats,
    means,
    start,
    local,
    lanes,
    within,
    inside,
    MOMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPACED: tl.constexpr,
):
    """(1/bc1) / (sqrt(V/bc2) + eps) of each element of a tile, which begins at the piece's element `start` (int64)."""
    rows = address(words + MOMENTS, tl.float32, 1)
    columns = address(words + COLUMNS, tl.float32, ALIGNED)
    position = start + tl.load(words + POSITION)
    cols = tl.load(words + COLS)
    magic = tl.load(words + MAGIC)
    top = position // cols
    j = (position - top * cols).to(tl.int32) + local
    cols = cols.to(tl.int32)
    row = rows_within(j, cols, magic)
    col = j - row * cols
    mean = tl.load(means + tl.load(words + MEAN))
    share = tl.minimum(tl.div_rn(tl.load(floats + INVERSE2), mean), LARGEST)  # mean is tiny where every row is zero
    if MOMENT == ALONG_ROWS:  # local is the segments' beginnings: (BLOCKS,)
        if ALIGNED == 16 and SPACED:
            col = tl.multiple_of(col, 16)
        r = tl.load(rows + top + row, mask=within, other=0.0) * share
        c = tl.load(columns + (lanes[:, None] + col[None, :]), mask=inside, other=0.0)
        v = tl.fma(r[None, :], c, 1.2e-38)
    else:
        r = tl.load(rows + top + row, mask=inside, other=0.0) * share
        v = tl.fma(r, tl.load(columns + col, mask=inside, other=0.0), 1.2e-38)
    return inverse_roots(v, 1.0, tl.load(floats + EPS)) * tl.load(floats + INVERSE1)


@triton.jit(do_not_specialize=["row", "start"])
def step_short(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    bins,
    scratch,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    MOMENT: tl.constexpr,
    EXACT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    NEAR: tl.constexpr,
    DECAYS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Step BLOCKS whole blocks of at most WIDTH elements; EXACT: the period is WIDTH."""
    piece, group = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    period = tl.load(words + PERIOD).to(tl.int32)
    if EXACT:
        period = WIDTH
    elif ALIGNED == 16:
        period = tl.multiple_of(period, 16)
    tiles = ((tl.load(words + COUNT) + BLOCKS - 1) // BLOCKS).to(tl.int32)
    for step in range(tl.minimum(tiles - group * TILES, TILES)):
        tile = group * TILES + step
        first = tile.to(tl.int64) * BLOCKS
        begin = first * period
        block = first + tl.arange(0, BLOCKS)
        lanes = tl.arange(0, WIDTH)
        within = block < tl.load(words + COUNT)
        segments = tl.arange(0, BLOCKS) * period
        if ALIGNED == 16 and not EXACT:
            segments = tl.multiple_of(segments, 16)
        local = lanes[:, None] + segments[None, :]
        inside = within[None, :] & (lanes < period)[:, None]
        if EXACT and BLOCKS == 1:  # a program has no tile but whole ones
            inside = tl.full([WIDTH, BLOCKS], True, tl.int1)
        INDEX_ALIGNED: tl.constexpr = ALIGNED if ALIGNED < 16 else 128 // GRADIENT.primitive_bitwidth
        gradients = address(words + GRADIENTS, GRADIENT, ALIGNED) + begin
        indices = address(words + INDICES, tl.uint8, INDEX_ALIGNED) + begin
        parameters = address(words, PARAMETER, ALIGNED) + begin
        magnitudes = address(words + MAGNITUDES, tl.float32, 1) + block

        g = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
        index = tl.load(indices + local, mask=inside, other=0).to(tl.int32)
        p = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
        magnitude = tl.load(magnitudes, mask=within, other=0.0)

        if MOMENT == BLOCK_MOMENT:
            # [Note: shared values] Several warps hold one block's value. All of them must have read it before one of
            # them writes it: reads come before the reductions, whose barriers part them from the writes.
            moments = address(words + MOMENTS, tl.float32, 1) + block
            v = tl.load(moments, mask=within, other=0.0)
        m = lerp(tl.load(levels + index) * magnitude[None, :], g, tl.load(floats + WEIGHT), NEAR)
        if not EXACT:
            m = tl.where(inside, m, 0.0)
        largest = tl.max(magnitude_bits(m), 0).to(tl.float32, bitcast=True)
        scale, divisor, inverse = divisor_of(largest)
        x = divided(m * scale[None, :], divisor[None, :], inverse[None, :])
        index, level = nearest(x, levels, bins, STEPS)
        tl.store(indices + local, index.to(tl.uint8), mask=inside)
        tl.store(magnitudes, largest, mask=within)
        if MOMENT == BLOCK_MOMENT:
            total = tl.sum(square(g, GRADIENT), 0)
            v = averaged(v, block_mean(total, period, GRADIENT), tl.load(floats + BETA2), tl.load(floats + REST2))
            tl.store(moments, v, mask=within)
            stepsize = stepsize_of(v, tl.load(floats + INVERSE2), tl.load(floats + INVERSE1), tl.load(floats + EPS))
            stepsize = stepsize[None, :]
        elif MOMENT == ALONG_ROWS:
            stepsize = _factored_stepsize(
                words, floats, scratch, begin, segments, lanes, within, inside, MOMENT, ALIGNED, WIDTH >= 16
            )
        else:
            stepsize = _factored_stepsize(
                words, floats, scratch, begin, local, lanes, within, inside, MOMENT, ALIGNED, False
            )
        change = level * largest[None, :] * stepsize * tl.load(floats + LR)
        new = applied(p, change, tl.load(floats + DECAY), PARAMETER, DECAYS)
        tl.store(parameters + local, new, mask=inside)


@triton.jit
def _long_tile(words, tile, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr):
    """The tile's segments, their blocks, their first elements in the piece, and which lanes they fill."""
    period = tl.load(words + PERIOD)
    length = tl.load(words + SPLIT) & 0xFFFFFFFF
    per_block = tl.load(words + SPLIT) >> 32
    segment = tile.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    block = segment // per_block
    part = segment - block * per_block
    begin = block * period + part * length
    if ALIGNED == 16:
        begin = tl.multiple_of(begin, 16)
    within = block < tl.load(words + COUNT)
    filled = tl.where(within, tl.minimum(length, period - part * length), 0).to(tl.int32)
    if ALIGNED == 16:
        filled = tl.multiple_of(filled, 16)
    return segment, block, begin, filled, within


@triton.jit(do_not_specialize=["row", "start"])
def long_partials(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    bins,
    scratch,
    GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    MOMENT: tl.constexpr,
    EXACT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NEAR: tl.constexpr,
    TILES: tl.constexpr,
):
    """Of each segment of long blocks: the largest |m|, and the sum of g^2, into two slots of the scratch."""
    piece, group = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    tiles = ((tl.load(words + COUNT) * (tl.load(words + SPLIT) >> 32) + BLOCKS - 1) // BLOCKS).to(tl.int32)
    for step in range(tl.minimum(tiles - group * TILES, TILES)):
        tile = group * TILES + step
        segment, block, begin, filled, within = _long_tile(words, tile, WIDTH, BLOCKS, ALIGNED)
        lanes = tl.arange(0, WIDTH)
        inside = lanes[:, None] < filled[None, :]
        if EXACT and BLOCKS == 1:
            inside = tl.full([WIDTH, BLOCKS], True, tl.int1)
        INDEX_ALIGNED: tl.constexpr = ALIGNED if ALIGNED < 16 else 128 // GRADIENT.primitive_bitwidth
        local = lanes[:, None] + begin[None, :]
        g = tl.load(address(words + GRADIENTS, GRADIENT, ALIGNED) + local, mask=inside, other=0.0).to(tl.float32)
        index = tl.load(address(words + INDICES, tl.uint8, INDEX_ALIGNED) + local, mask=inside, other=0).to(tl.int32)
        magnitude = tl.load(address(words + MAGNITUDES, tl.float32, 1) + block, mask=within, other=0.0)
        m = lerp(tl.load(levels + index) * magnitude[None, :], g, tl.load(floats + WEIGHT), NEAR)
        if not (EXACT and BLOCKS == 1):
            m = tl.where(inside, m, 0.0)
        slots = scratch + tl.load(words + PARTIALS) + segment * 2
        tl.store(slots, tl.max(magnitude_bits(m), 0).to(tl.float32, bitcast=True), mask=within)
        if MOMENT == BLOCK_MOMENT:
            tl.store(slots + 1, tl.sum(square(g, GRADIENT), 0), mask=within)


@triton.jit(do_not_specialize=["row", "start"])
def long_blocks(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    bins,
    scratch,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of each long block: its magnitude and second moment, from its segments; the old magnitude is kept in scratch."""
    piece, block = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    per_block = (tl.load(words + SPLIT) >> 32).to(tl.int32)
    partials = scratch + tl.load(words + PARTIALS) + block.to(tl.int64) * per_block * 2
    results = scratch + tl.load(words + RESULTS) + block.to(tl.int64) * 4
    lanes = tl.arange(0, WIDTH)
    largest = tl.zeros([WIDTH], tl.int32)
    total = tl.zeros([WIDTH], tl.float32)
    for done in range(0, per_block, WIDTH):
        inside = done + lanes < per_block
        slots = partials + (done + lanes) * 2
        largest = tl.maximum(largest, magnitude_bits(tl.load(slots, mask=inside, other=0.0)))
        if MOMENT == BLOCK_MOMENT:
            total += tl.load(slots + 1, mask=inside, other=0.0)
    magnitudes = address(words + MAGNITUDES, tl.float32, 1) + block
    tl.store(results, tl.load(magnitudes))
    magnitude = tl.max(largest, 0).to(tl.float32, bitcast=True)
    tl.store(results + 1, magnitude)
    tl.store(magnitudes, magnitude)
    if MOMENT == BLOCK_MOMENT:
        moments = address(words + MOMENTS, tl.float32, 1) + block
        mean = block_mean(tl.sum(total, 0), tl.load(words + PERIOD), GRADIENT)
        v = averaged(tl.load(moments), mean, tl.load(floats + BETA2), tl.load(floats + REST2))
        tl.store(moments, v)
        scale = tl.load(floats + INVERSE2)
        tl.store(results + 2, stepsize_of(v, scale, tl.load(floats + INVERSE1), tl.load(floats + EPS)))


@triton.jit(do_not_specialize=["row", "start"])
def step_long(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    bins,
    scratch,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    MOMENT: tl.constexpr,
    EXACT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    NEAR: tl.constexpr,
    DECAYS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Step segments of long blocks, whose magnitudes and second moments `long_blocks` has left in the scratch."""
    piece, group = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    tiles = ((tl.load(words + COUNT) * (tl.load(words + SPLIT) >> 32) + BLOCKS - 1) // BLOCKS).to(tl.int32)
    for step in range(tl.minimum(tiles - group * TILES, TILES)):
        tile = group * TILES + step
        _, block, begin, filled, within = _long_tile(words, tile, WIDTH, BLOCKS, ALIGNED)
        lanes = tl.arange(0, WIDTH)
        inside = lanes[:, None] < filled[None, :]
        if EXACT and BLOCKS == 1:
            inside = tl.full([WIDTH, BLOCKS], True, tl.int1)
        INDEX_ALIGNED: tl.constexpr = ALIGNED if ALIGNED < 16 else 128 // GRADIENT.primitive_bitwidth
        local = lanes[:, None] + begin[None, :]
        indices = address(words + INDICES, tl.uint8, INDEX_ALIGNED)
        parameters = address(words, PARAMETER, ALIGNED)
        g = tl.load(address(words + GRADIENTS, GRADIENT, ALIGNED) + local, mask=inside, other=0.0).to(tl.float32)
        index = tl.load(indices + local, mask=inside, other=0).to(tl.int32)
        p = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
        results = scratch + tl.load(words + RESULTS) + block * 4
        magnitude = tl.load(results, mask=within, other=0.0)
        largest = tl.load(results + 1, mask=within, other=0.0)
        m = lerp(tl.load(levels + index) * magnitude[None, :], g, tl.load(floats + WEIGHT), NEAR)
        scale, divisor, inverse = divisor_of(largest)
        x = divided(m * scale[None, :], divisor[None, :], inverse[None, :])
        index, level = nearest(x, levels, bins, STEPS)
        tl.store(indices + local, index.to(tl.uint8), mask=inside)
        if MOMENT == BLOCK_MOMENT:
            stepsize = tl.load(results + 2, mask=within, other=0.0)
            stepsize = stepsize[None, :]
        else:
            origin = tl.min(tl.where(within, begin, 0x7FFFFFFFFFFFFFFF), 0)
            near = (begin - origin).to(tl.int32)
            if MOMENT == ALONG_ROWS:
                near = tl.where(within, near, 0)
                stepsize = _factored_stepsize(
                    words, floats, scratch, origin, near, lanes, within, inside, MOMENT, ALIGNED, True
                )
            else:
                near = lanes[:, None] + tl.where(within, near, 0)[None, :]
                stepsize = _factored_stepsize(
                    words, floats, scratch, origin, near, lanes, within, inside, MOMENT, ALIGNED, True
                )
        change = level * largest[None, :] * stepsize * tl.load(floats + LR)
        new = applied(p, change, tl.load(floats + DECAY), PARAMETER, DECAYS)
        tl.store(parameters + local, new, mask=inside)


@triton.jit(do_not_specialize=["row", "start"])
def step_single(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    bins,
    scratch,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    MOMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    NEAR: tl.constexpr,
    DECAYS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Step BLOCKS blocks of one element."""
    piece, group = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    tiles = ((tl.load(words + COUNT) + BLOCKS - 1) // BLOCKS).to(tl.int32)
    for step in range(tl.minimum(tiles - group * TILES, TILES)):
        tile = group * TILES + step
        begin = tile.to(tl.int64) * BLOCKS
        local = tl.arange(0, BLOCKS)
        count = tl.load(words + COUNT)
        if ALIGNED == 16:
            count = tl.multiple_of(count, 16)
        inside = begin + local < count
        INDEX_ALIGNED: tl.constexpr = ALIGNED if ALIGNED < 16 else 128 // GRADIENT.primitive_bitwidth
        gradients = address(words + GRADIENTS, GRADIENT, ALIGNED) + begin
        indices = address(words + INDICES, tl.uint8, INDEX_ALIGNED) + begin
        parameters = address(words, PARAMETER, ALIGNED) + begin
        magnitudes = address(words + MAGNITUDES, tl.float32, 4) + begin
        g = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
        index = tl.load(indices + local, mask=inside, other=0).to(tl.int32)
        magnitude = tl.load(magnitudes + local, mask=inside, other=0.0)
        m = lerp(tl.load(levels + index) * magnitude, g, tl.load(floats + WEIGHT), NEAR)
        largest = tl.abs(m)
        x = tl.where(m > 0.0, 1.0, tl.where(m < 0.0, -1.0, 0.0))
        index, level = nearest(x, levels, bins, STEPS)
        tl.store(indices + local, index.to(tl.uint8), mask=inside)
        tl.store(magnitudes + local, largest, mask=inside)
        if MOMENT == BLOCK_MOMENT:
            moments = address(words + MOMENTS, tl.float32, 4) + begin
            v = tl.load(moments + local, mask=inside, other=0.0)
            v = averaged(v, square(g, GRADIENT), tl.load(floats + BETA2), tl.load(floats + REST2))
            tl.store(moments + local, v, mask=inside)
            scale = tl.load(floats + INVERSE2)
            roots = inverse_roots(tl.maximum(v, 1.2e-38), scale, tl.load(floats + EPS))
            stepsize = roots * tl.load(floats + INVERSE1)
        else:
            stepsize = _factored_stepsize(
                words, floats, scratch, begin, local, local, inside, inside, ANYWHERE, ALIGNED, False
            )
        p = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
        change = level * largest * stepsize * tl.load(floats + LR)
        new = applied(p, change, tl.load(floats + DECAY), PARAMETER, DECAYS)
        tl.store(parameters + local, new, mask=inside)

"""The update kernels: blocks that fit in a tile in one pass, longer ones in three launches.

A launch steps many pieces. Each has a row of 20 words in a table; see `Description.add` for what they hold. A program
takes TILES tiles, one after the other. In the short kernel a tile is BLOCKS whole blocks of up to WIDTH elements, in
the long ones it is one segment of a block.

[Note: flat] A tile's elements are one axis, whatever blocks they belong to: then the compiler gives the look-ups in the
tables the layout of the loads, and nothing is exchanged between threads. Only where a tile has several blocks do their
values pass through a second axis. What a block's result depends on is the block alone, so neither the pieces nor the
launches they are grouped into matter.
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
    half_inverse,
    lerp,
    magnitude_bits,
    nearest,
    products,
    rows_within,
    square,
    stepsize_of,
)

# Words of a row; the hyper-parameters are float32, counted in half words.
GRADIENTS, INDICES, MAGNITUDES, MOMENTS, COLUMNS = (tl.constexpr(word) for word in range(1, 6))
COUNT, PERIOD, POSITION, COLS, MEAN, MAGIC, SPLIT, PARTIALS, RESULTS, BLOCK_SLOTS = (
    tl.constexpr(word) for word in range(6, 16)
)
WEIGHT, BETA2, REST2, EPS, DECAY, LR, INVERSE1, INVERSE2 = (tl.constexpr(half) for half in range(32, 40))

LARGEST = tl.constexpr(3.4028234663852886e38)  # float32

BLOCK_MOMENT = tl.constexpr(0)  # one second moment a block
ALONG_ROWS = tl.constexpr(1)  # factored, and every segment lies inside one matrix row
ANYWHERE = tl.constexpr(2)  # factored, with segments that may cross rows


@triton.jit
def _spread(value, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """A value of each of a tile's blocks for the blocks' elements."""
    if BLOCKS > 1:
        value = tl.reshape(tl.broadcast_to(value[:, None], (BLOCKS, WIDTH)), (BLOCKS * WIDTH,))
    return value


@triton.jit
def _by_block(x, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """A tile's elements with those of each block along the last axis."""
    if BLOCKS > 1:
        x = tl.reshape(x, (BLOCKS, WIDTH))
    return x


@triton.jit
def _products(index, levels, magnitude, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """Each element's level times its block's magnitude; for a block with many, looked up among 256 products."""
    if BLOCKS == 1 and WIDTH >= 1024:
        product = products(index, levels, magnitude, 1.0, 1.0)
    else:
        product = tl.load(levels + index.to(tl.uint32)) * _spread(magnitude, WIDTH, BLOCKS)
    return product


@triton.jit
def _changes(index, levels, magnitude, stepsize, lr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """The same times the blocks' step size and the learning rate, in this order."""
    if BLOCKS == 1 and WIDTH >= 1024:
        change = products(index, levels, magnitude, stepsize, lr)
    else:
        change = _products(index, levels, magnitude, WIDTH, BLOCKS) * _spread(stepsize, WIDTH, BLOCKS) * lr
    return change


@triton.jit
def _quantised(m, largest, levels, cells, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr):
    """The indices of the levels nearest to m / largest."""
    scale, negative, inverse = divisor_of(largest)
    if BLOCKS == 1:
        if scale != 1.0:
            m *= scale
    else:
        m *= _spread(scale, WIDTH, BLOCKS)
    x = divided(m, _spread(negative, WIDTH, BLOCKS), _spread(inverse, WIDTH, BLOCKS))
    return nearest(x, levels, cells, STEPS)


@triton.jit
def _matrix(words, floats, scratch, begin, ALIGNED: tl.constexpr):
    """What a tile that begins at the piece's element `begin` needs of its matrix.

    Where its first row's average is, and its first column; where the columns' averages are, how many, and what divides
    by that; and minus what turns a product of two averages into V/bc2.
    """
    position = tl.load(words + POSITION) + begin
    cols = tl.load(words + COLS)
    top = position // cols
    mean = tl.load(scratch + tl.load(words + MEAN))
    share = tl.minimum(tl.div_rn(tl.load(floats + INVERSE2), mean), LARGEST)  # mean is tiny where every row is zero
    return (
        address(words + MOMENTS, tl.float32, 1) + top,
        (position - top * cols).to(tl.int32),
        address(words + COLUMNS, tl.float32, ALIGNED),
        cols.to(tl.int32),
        tl.load(words + MAGIC),
        -share,
    )


@triton.jit
def _moved_on(matrix, elements):
    """The same from `elements` elements on, at most 2**13."""
    rows, col, columns, cols, magic, share = matrix
    col += elements
    crossed = rows_within(col, cols, magic)
    return rows + crossed, col - crossed * cols, columns, cols, magic, share


@triton.jit
def _factored_stepsize(
    matrix,
    local,
    inside,
    segments,
    within,
    eps,
    inverse1,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    MOMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """(1/bc1) / (sqrt(V/bc2) + eps) of each element of a tile that begins where `matrix` does."""
    rows, first, columns, cols, magic, share = matrix
    if MOMENT == ALONG_ROWS and BLOCKS == 1:
        col = first + local
        if ALIGNED == 16:
            col = tl.max_contiguous(tl.multiple_of(col, 16), WIDTH)
        r = tl.load(rows) * share
    else:
        j = first + (segments if MOMENT == ALONG_ROWS else local)
        row = rows_within(j, cols, magic)
        col = j - row * cols
        if MOMENT == ALONG_ROWS:
            r = _spread(tl.load(rows + row, mask=within, other=0.0) * share, WIDTH, BLOCKS)
            col = _spread(col, WIDTH, BLOCKS) + tl.arange(0, WIDTH * BLOCKS) % WIDTH
            if ALIGNED == 16 and WIDTH >= 16:
                col = tl.max_contiguous(tl.multiple_of(col, 16), 16)
        else:
            r = tl.load(rows + row, mask=inside, other=0.0) * share
    v = tl.fma(r, tl.load(columns + col, mask=inside, other=0.0), -1.2e-38)
    return half_inverse(v, 1.0, eps) * (2.0 * inverse1)


@triton.jit(do_not_specialize=["row", "start"])
def step_short(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    cells,
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
    TILES: tl.constexpr,
):
    """Step BLOCKS whole blocks of at most WIDTH elements; EXACT: the period is WIDTH."""
    piece, group = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    count = tl.load(words + COUNT).to(tl.int32)
    period = tl.load(words + PERIOD).to(tl.int32)
    elements = tl.arange(0, WIDTH * BLOCKS)
    lanes = elements % WIDTH
    segments = tl.arange(0, BLOCKS)
    if EXACT:
        period = WIDTH
        local = elements
    else:
        if ALIGNED == 16:
            period = tl.multiple_of(period, 16)
        local = elements // WIDTH * period + lanes
    INDEX_ALIGNED: tl.constexpr = ALIGNED if ALIGNED < 16 else 128 // GRADIENT.primitive_bitwidth
    AXIS: tl.constexpr = 0 if BLOCKS == 1 else 1
    block = group * (TILES * BLOCKS)
    begin = block.to(tl.int64) * period
    gradients = address(words + GRADIENTS, GRADIENT, ALIGNED) + begin
    indices = address(words + INDICES, tl.uint8, INDEX_ALIGNED) + begin
    parameters = address(words, PARAMETER, ALIGNED) + begin
    if MOMENT != BLOCK_MOMENT:
        matrix = _matrix(words, floats, scratch, begin, ALIGNED)
    weight, decay, lr = tl.load(floats + WEIGHT), tl.load(floats + DECAY), tl.load(floats + LR)
    eps, inverse1 = tl.load(floats + EPS), tl.load(floats + INVERSE1)
    for _ in range(tl.minimum(tl.cdiv(count - block, BLOCKS), TILES)):
        places = block if BLOCKS == 1 else block + segments
        within = places < count
        inside = (block + elements // WIDTH < count) & (lanes < period)
        if EXACT and BLOCKS == 1:  # a program has no tile but whole ones
            inside = tl.full([WIDTH], True, tl.int1)
        g = tl.load(gradients + local, mask=inside, other=0).to(tl.float32)
        index = tl.load(indices + local, mask=inside, other=0).to(tl.int32)
        p = tl.load(parameters + local, mask=inside, other=0).to(tl.float32)
        # [Note: shared values] Several warps hold one block's value. All of them must have read it before one of them
        # writes it: reads come before the reductions, whose barriers part them from the writes.
        magnitudes = address(words + MAGNITUDES, tl.float32, 1) + places
        moments = address(words + MOMENTS, tl.float32, 1) + places
        magnitude = tl.load(magnitudes, mask=within, other=0.0)
        if MOMENT == BLOCK_MOMENT:
            v = tl.load(moments, mask=within, other=0.0)
        m = lerp(_products(index, levels, magnitude, WIDTH, BLOCKS), g, weight, NEAR)
        if not EXACT:
            m = tl.where(inside, m, 0.0)
        largest = tl.max(_by_block(magnitude_bits(m), WIDTH, BLOCKS), AXIS).to(tl.float32, bitcast=True)
        if MOMENT == BLOCK_MOMENT:
            mean = block_mean(tl.sum(_by_block(square(g, GRADIENT), WIDTH, BLOCKS), AXIS), period, GRADIENT)
        index = _quantised(m, largest, levels, cells, WIDTH, BLOCKS, STEPS)
        tl.store(indices + local, index.to(tl.uint8), mask=inside)
        tl.store(magnitudes, largest, mask=within)
        if MOMENT == BLOCK_MOMENT:
            v = averaged(v, mean, tl.load(floats + BETA2), tl.load(floats + REST2))
            tl.store(moments, v, mask=within)
            stepsize = stepsize_of(v, tl.load(floats + INVERSE2), inverse1, eps)
            change = _changes(index, levels, largest, stepsize, lr, WIDTH, BLOCKS)
        else:
            steps = segments * period
            stepsize = _factored_stepsize(
                matrix, local, inside, steps, within, eps, inverse1, WIDTH, BLOCKS, MOMENT, ALIGNED
            )
            matrix = _moved_on(matrix, BLOCKS * period)
            change = _products(index, levels, largest, WIDTH, BLOCKS) * stepsize * lr
        tl.store(parameters + local, applied(p, change, decay, PARAMETER), mask=inside)
        block += BLOCKS
        gradients += BLOCKS * period
        indices += BLOCKS * period
        parameters += BLOCKS * period


@triton.jit
def _segments_of(words, group, ALIGNED: tl.constexpr, TILES: tl.constexpr):
    """How many segments this program takes, the first one's block and part of it, and a segment's and block's length.

    Segments of ALONG_ROWS are all of one length; of others the last of a block may be shorter.
    """
    length = (tl.load(words + SPLIT) & 0xFFFFFFFF).to(tl.int32)
    per_block = (tl.load(words + SPLIT) >> 32).to(tl.int32)
    period = tl.load(words + PERIOD)
    first = group * TILES
    many = tl.minimum(tl.load(words + COUNT).to(tl.int32) * per_block - first, TILES)
    block = first // per_block
    if ALIGNED == 16:
        length = tl.multiple_of(length, 16)
        period = tl.multiple_of(period, 16)
    return many, block, first - block * per_block, per_block, length, period


@triton.jit(do_not_specialize=["row", "start"])
def long_partials(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    cells,
    scratch,
    GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr,
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
    many, block, part, per_block, length, period = _segments_of(words, group, ALIGNED, TILES)
    lanes = tl.arange(0, WIDTH)
    INDEX_ALIGNED: tl.constexpr = ALIGNED if ALIGNED < 16 else 128 // GRADIENT.primitive_bitwidth
    gradients = address(words + GRADIENTS, GRADIENT, ALIGNED)
    indices = address(words + INDICES, tl.uint8, INDEX_ALIGNED)
    weight = tl.load(floats + WEIGHT)
    slots = scratch + tl.load(words + PARTIALS) + (block.to(tl.int64) * per_block + part) * 2
    for _ in range(many):
        done = part.to(tl.int64) * length
        begin = block.to(tl.int64) * period + done
        inside = lanes < tl.minimum(period - done, length).to(tl.int32)
        if EXACT:
            inside = tl.full([WIDTH], True, tl.int1)
        g = tl.load(gradients + begin + lanes, mask=inside, other=0).to(tl.float32)
        index = tl.load(indices + begin + lanes, mask=inside, other=0).to(tl.int32)
        magnitude = tl.load(address(words + MAGNITUDES, tl.float32, 1) + block)
        m = lerp(_products(index, levels, magnitude, WIDTH, 1), g, weight, NEAR)
        if not EXACT:
            m = tl.where(inside, m, 0.0)
        tl.store(slots, tl.max(magnitude_bits(m), 0).to(tl.float32, bitcast=True))
        if MOMENT == BLOCK_MOMENT:
            tl.store(slots + 1, tl.sum(square(g, GRADIENT), 0))
        slots += 2
        part += 1
        if part == per_block:
            part = 0
            block += 1


@triton.jit(do_not_specialize=["row", "start"])
def long_blocks(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    cells,
    scratch,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of each long block: its magnitude and second moment, from its segments; the old magnitude is kept in scratch."""
    piece, block = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    per_block = tl.load(words + BLOCK_SLOTS).to(tl.int32)
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
    cells,
    scratch,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr,
    MOMENT: tl.constexpr,
    EXACT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    NEAR: tl.constexpr,
    TILES: tl.constexpr,
):
    """Step segments of long blocks, whose magnitudes and second moments `long_blocks` has left in the scratch."""
    piece, group = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    many, block, part, per_block, length, period = _segments_of(words, group, ALIGNED, TILES)
    lanes = tl.arange(0, WIDTH)
    INDEX_ALIGNED: tl.constexpr = ALIGNED if ALIGNED < 16 else 128 // GRADIENT.primitive_bitwidth
    gradients = address(words + GRADIENTS, GRADIENT, ALIGNED)
    indices = address(words + INDICES, tl.uint8, INDEX_ALIGNED)
    parameters = address(words, PARAMETER, ALIGNED)
    results = scratch + tl.load(words + RESULTS)
    if MOMENT != BLOCK_MOMENT:
        begin = block.to(tl.int64) * period + part.to(tl.int64) * length
        matrix = _matrix(words, floats, scratch, begin, ALIGNED)
    weight, decay, lr = tl.load(floats + WEIGHT), tl.load(floats + DECAY), tl.load(floats + LR)
    eps, inverse1 = tl.load(floats + EPS), tl.load(floats + INVERSE1)
    for _ in range(many):
        done = part.to(tl.int64) * length
        begin = block.to(tl.int64) * period + done
        filled = tl.minimum(period - done, length).to(tl.int32)
        inside = lanes < filled
        if EXACT:
            inside = tl.full([WIDTH], True, tl.int1)
        g = tl.load(gradients + begin + lanes, mask=inside, other=0).to(tl.float32)
        index = tl.load(indices + begin + lanes, mask=inside, other=0).to(tl.int32)
        p = tl.load(parameters + begin + lanes, mask=inside, other=0).to(tl.float32)
        magnitude = tl.load(results + block * 4)
        largest = tl.load(results + block * 4 + 1)
        m = lerp(_products(index, levels, magnitude, WIDTH, 1), g, weight, NEAR)
        index = _quantised(m, largest, levels, cells, WIDTH, 1, STEPS)
        tl.store(indices + begin + lanes, index.to(tl.uint8), mask=inside)
        if MOMENT == BLOCK_MOMENT:
            change = _changes(index, levels, largest, tl.load(results + block * 4 + 2), lr, WIDTH, 1)
        else:
            stepsize = _factored_stepsize(matrix, lanes, inside, 0, None, eps, inverse1, WIDTH, 1, MOMENT, ALIGNED)
            matrix = _moved_on(matrix, filled)
            change = _products(index, levels, largest, WIDTH, 1) * stepsize * lr
        new = applied(p, change, decay, PARAMETER)
        tl.store(parameters + begin + lanes, new, mask=inside)
        part += 1
        if part == per_block:
            part = 0
            block += 1


@triton.jit(do_not_specialize=["row", "start"])
def step_single(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    cells,
    scratch,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    MOMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    NEAR: tl.constexpr,
    TILES: tl.constexpr,
):
    """Step BLOCKS blocks of one element."""
    piece, group = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    count = tl.load(words + COUNT)
    if ALIGNED == 16:
        count = tl.multiple_of(count, 16)
    tiles = tl.cdiv(count, BLOCKS).to(tl.int32)
    local = tl.arange(0, BLOCKS)
    INDEX_ALIGNED: tl.constexpr = ALIGNED if ALIGNED < 16 else 128 // GRADIENT.primitive_bitwidth
    for step in range(tl.minimum(tiles - group * TILES, TILES)):
        begin = (group * TILES + step).to(tl.int64) * BLOCKS
        inside = begin + local < count
        gradients = address(words + GRADIENTS, GRADIENT, ALIGNED) + begin
        indices = address(words + INDICES, tl.uint8, INDEX_ALIGNED) + begin
        parameters = address(words, PARAMETER, ALIGNED) + begin
        magnitudes = address(words + MAGNITUDES, tl.float32, 4) + begin
        g = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
        index = tl.load(indices + local, mask=inside, other=0).to(tl.uint32)
        magnitude = tl.load(magnitudes + local, mask=inside, other=0.0)
        m = lerp(tl.load(levels + index) * magnitude, g, tl.load(floats + WEIGHT), NEAR)
        largest = tl.abs(m)
        x = tl.where(m > 0.0, 1.0, tl.where(m < 0.0, -1.0, 0.0))
        index = nearest(x, levels, cells, STEPS)
        tl.store(indices + local, index.to(tl.uint8), mask=inside)
        tl.store(magnitudes + local, largest, mask=inside)
        if MOMENT == BLOCK_MOMENT:
            moments = address(words + MOMENTS, tl.float32, 4) + begin
            v = tl.load(moments + local, mask=inside, other=0.0)
            v = averaged(v, square(g, GRADIENT), tl.load(floats + BETA2), tl.load(floats + REST2))
            tl.store(moments + local, v, mask=inside)
            half = half_inverse(-tl.maximum(v, 1.2e-38), tl.load(floats + INVERSE2), tl.load(floats + EPS))
            stepsize = half * (2.0 * tl.load(floats + INVERSE1))
        else:
            matrix = _matrix(words, floats, scratch, begin, ALIGNED)
            eps, inverse1 = tl.load(floats + EPS), tl.load(floats + INVERSE1)
            stepsize = _factored_stepsize(
                matrix, local, inside, local, inside, eps, inverse1, BLOCKS, 1, ANYWHERE, ALIGNED
            )
        p = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
        change = tl.load(levels + index.to(tl.uint32)) * largest * stepsize * tl.load(floats + LR)
        tl.store(parameters + local, applied(p, change, tl.load(floats + DECAY), PARAMETER), mask=inside)

"""The row and column averages of g^2 and the mean of the row averages, in three launches.

Sums are taken in two stages, in an order that depends on the matrix's shape alone. A launch serves many matrices; each
has a row of 20 words in the table. Programs of a first stage take a strip of rows and a group of columns.

The first stage also leaves the largest |m| of each of its tiles, where blocks consist of whole ones and all of them are
there: then the update need not read the gradient once more. The sums are the same with and without.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from gefen_offload.optim.fused.arithmetic import (
    ROW,
    address,
    averaged,
    find_piece,
    lerp,
    magnitude_bits,
    products,
)

# Words of a row, then float32 half words.
ROWS_AT, COLUMNS_AT, GRADIENTS, ROWS, COLS, STRIP, ROW_PARTIALS, COLUMN_PARTIALS, ROW_SUMS, MEAN, FRESH = (
    tl.constexpr(word) for word in range(11)
)
INDICES, MAGNITUDES, BLOCK_ROWS, PARTIALS = (tl.constexpr(word) for word in range(11, 15))
WEIGHT, BETA2, REST2 = tl.constexpr(32), tl.constexpr(33), tl.constexpr(34)

TINY = tl.constexpr(1.1754943508222875e-38)
ROW_TILE = tl.constexpr(512)  # rows that a program of the second stage finishes
COLUMN_TILE = tl.constexpr(128)  # columns that a program of the third launch finishes
STACK = tl.constexpr(32)  # partial sums of a column added side by side


@triton.jit(do_not_specialize=["row", "start"])
def square_partials(
    words,
    floats,
    starts,
    row,
    start,
    levels,
    scratch,
    GRADIENT: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NEAR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums of g^2 along the rows and down the columns of a strip of rows and a group of WIDTH columns.

    EXACT: the matrix consists of whole tiles. MOMENTUM: the tiles' largest |m| as well, where the row has BLOCK_ROWS, a
    multiple of HEIGHT.
    """
    piece, tile = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    rows = tl.load(words + ROWS)
    cols = tl.load(words + COLS)
    if ALIGNED == 16:
        cols = tl.multiple_of(cols, 16)
    height = tl.load(words + STRIP)
    groups = tl.cdiv(cols, WIDTH)
    strip = tile // groups
    group = tile - strip * groups
    col = group * WIDTH + tl.arange(0, WIDTH)
    top = strip * height
    end = tl.minimum(top + height, rows)
    lanes = tl.arange(0, HEIGHT)
    local = lanes.to(tl.int64)[:, None] * cols + col[None, :]
    INDEX_ALIGNED: tl.constexpr = ALIGNED if ALIGNED < 16 else 128 // GRADIENT.primitive_bitwidth
    gradients = address(words + GRADIENTS, GRADIENT, ALIGNED)
    indices = address(words + INDICES, tl.uint8, INDEX_ALIGNED)
    magnitudes = address(words + MAGNITUDES, tl.float32, 1)
    block_rows = tl.load(words + BLOCK_ROWS)
    partials = scratch + tl.load(words + PARTIALS) + group * 2
    row_partials = scratch + tl.load(words + ROW_PARTIALS) + group * rows
    weight = tl.load(floats + WEIGHT)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for first in tl.range(top, end, HEIGHT, num_stages=STAGES):
        at = first + lanes
        inside = (at < end)[:, None] & (col < cols)[None, :]
        if EXACT:
            inside = tl.full([HEIGHT, WIDTH], True, tl.int1)
        g = tl.load(gradients + first * cols + local, mask=inside, other=0.0).to(tl.float32)
        if MOMENTUM and block_rows > 0:
            index = tl.load(indices + first * cols + local, mask=inside, other=0).to(tl.int32)
            magnitude = tl.load(magnitudes + first // block_rows)
            old = products(tl.reshape(index, (HEIGHT * WIDTH,)), levels, magnitude, 1.0, 1.0)
            m = lerp(tl.reshape(old, (HEIGHT, WIDTH)), g, weight, NEAR)
            largest = tl.max(tl.max(tl.where(inside, magnitude_bits(m), 0), 1), 0)
            tl.store(partials + first // HEIGHT * groups * 2, largest.to(tl.float32, bitcast=True))
        squared = g * g
        total += squared
        tl.store(row_partials + at, tl.sum(squared, 1), mask=at < end)
    column_partials = scratch + tl.load(words + COLUMN_PARTIALS) + strip * cols
    tl.store(column_partials + col, tl.sum(total, 0), mask=col < cols)


@triton.jit(do_not_specialize=["row", "start"])
def finish_rows(words, floats, starts, row, start, scratch):
    """The row averages (of a fresh matrix; else they are there), and the sums of 512 of them each."""
    piece, tile = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    rows = tl.load(words + ROWS)
    cols = tl.load(words + COLS)
    at = tile.to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    inside = at < rows
    averages = address(words + ROWS_AT, tl.float32, 1) + at
    r = tl.load(averages, mask=inside, other=0.0)
    fresh = tl.load(words + FRESH)
    if fresh > 0:
        partials = scratch + tl.load(words + ROW_PARTIALS) + at
        total = tl.zeros([ROW_TILE], tl.float32)
        for group in range(fresh):
            total += tl.load(partials + group * rows, mask=inside, other=0.0)
        r = averaged(r, total * tl.div_rn(1.0, cols.to(tl.float32)), tl.load(floats + BETA2), tl.load(floats + REST2))
        tl.store(averages, r, mask=inside)
    tl.store(scratch + tl.load(words + ROW_SUMS) + tile, tl.sum(tl.where(inside, r, 0.0), 0))


@triton.jit(do_not_specialize=["row", "start"])
def finish_columns(words, floats, starts, row, start, scratch):
    """The column averages of a fresh matrix; the first program of each matrix takes the mean of the row averages."""
    piece, tile = find_piece(starts + start)
    words += (row + piece) * ROW
    floats += (row + piece) * (2 * ROW)
    rows = tl.load(words + ROWS)
    cols = tl.load(words + COLS)
    if tile == 0:
        lanes = tl.arange(0, ROW_TILE)
        sums = scratch + tl.load(words + ROW_SUMS)
        count = (rows + ROW_TILE - 1) // ROW_TILE
        total = tl.zeros([ROW_TILE], tl.float32)
        for done in range(0, count, ROW_TILE):
            total += tl.load(sums + done + lanes, mask=done + lanes < count, other=0.0)
        whole = tl.sum(total, 0) * tl.div_rn(1.0, rows.to(tl.float32))
        whole = tl.where(whole < TINY, TINY, whole)  # keeps a NaN
        tl.store(scratch + tl.load(words + MEAN), whole)
    else:
        at = (tile - 1).to(tl.int64) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        inside = at < cols
        strips = (rows + tl.load(words + STRIP) - 1) // tl.load(words + STRIP)
        partials = scratch + tl.load(words + COLUMN_PARTIALS) + at
        stack = tl.arange(0, STACK)
        added = tl.zeros([STACK, COLUMN_TILE], tl.float32)
        for done in range(0, strips, STACK):
            strip = done + stack
            added += tl.load(
                partials[None, :] + strip[:, None] * cols, mask=(strip < strips)[:, None] & inside[None, :], other=0.0
            )
        averages = address(words + COLUMNS_AT, tl.float32, 1) + at
        c = tl.load(averages, mask=inside, other=0.0)
        mean = tl.sum(added, 0) * tl.div_rn(1.0, rows.to(tl.float32))
        c = averaged(c, mean, tl.load(floats + BETA2), tl.load(floats + REST2))
        tl.store(averages, c, mask=inside)

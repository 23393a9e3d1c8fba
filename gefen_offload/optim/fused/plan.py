"""How a piece is divided among programs: it depends on the parameter's shape and period alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

TILE = 2048  # elements of a program, where a block is not longer
FACTOR_TILE = 4096  # elements that a program squares at once, for row and column sums
FACTOR_STAGES = {False: 2, True: 1}  # tiles under way there: with the largest |m| one takes all registers
LONGEST_SHORT = 8192  # the longest block that one program holds in registers
ELEMENTS_PER_WARP = 512
TILES = 4  # of a program, one after the other
EVEN = 16  # tiles of a block whose length is a multiple of it begin at one: loads are as wide as the block allows
SHORTEST_ALONG = 256  # segments of long blocks are cut to fit in matrix rows if they stay this long

BLOCK_MOMENT, ALONG_ROWS, ANYWHERE = 0, 1, 2


@dataclass(frozen=True)
class BlockPlan:
    """Tiles of `blocks` blocks of at most `width` elements; a long block is `parts` tiles of at most `length`."""

    width: int
    blocks: int
    moment: int
    length: int
    parts: int

    @property
    def long(self) -> bool:
        """Whether blocks are longer than a program can hold."""
        return self.parts > 0

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return max(1, self.width * self.blocks // ELEMENTS_PER_WARP)


@dataclass(frozen=True)
class FactorPlan:
    """Programs of the first stage take `strip` rows and `width` columns, `height` rows at a time."""

    height: int
    width: int
    strip: int
    strips: int
    groups: int

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 4

    def exact(self, rows: int, cols: int) -> bool:
        """Whether the matrix consists of whole tiles."""
        return rows % self.height == 0 and cols % self.width == 0

    def block_tiles(self, period: int, cols: int) -> int:
        """The tiles of a block, if blocks consist of whole ones: programs take `height` x `width` at once; else 0."""
        return period // (cols * self.height) * self.groups if period % (cols * self.height) == 0 else 0


@lru_cache(maxsize=4096)
def plan_blocks(period: int, cols: int) -> BlockPlan:
    """The plan of a period; `cols` is the matrix's width, or 0 for the block second moment."""
    if period <= LONGEST_SHORT:
        width = _power_above(period)
        moment = BLOCK_MOMENT if not cols else ANYWHERE if cols % period else ALONG_ROWS
        return BlockPlan(width, max(1, TILE // width), moment, period, 0)
    if cols:
        length = _largest_divisor(math.gcd(period, cols), TILE, EVEN if period % EVEN == 0 else 1)
        if length >= SHORTEST_ALONG:
            return BlockPlan(_power_above(length), 1, ALONG_ROWS, length, period // length)
    parts = -(-period // TILE)
    length = -(-period // (parts * EVEN)) * EVEN
    parts = -(-period // length)
    return BlockPlan(_power_above(length), 1, ANYWHERE if cols else BLOCK_MOMENT, length, parts)


@lru_cache(maxsize=4096)
def plan_factors(rows: int, cols: int) -> FactorPlan:
    """The plan of a matrix's row and column sums."""
    width = min(256, max(16, _power_above(cols)))
    height = FACTOR_TILE // width
    strip = 16 * height
    while -(-rows // strip) > 256:
        strip *= 2
    return FactorPlan(height, width, strip, -(-rows // strip), -(-cols // width))


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _largest_divisor(n: int, most: int, multiple: int) -> int:
    """The largest divisor of n up to `most` that is a multiple of `multiple`; 0 if there is none."""
    divisors = (d for k in range(1, math.isqrt(n) + 1) if n % k == 0 for d in (k, n // k))
    return max((d for d in divisors if d <= most and d % multiple == 0), default=0)

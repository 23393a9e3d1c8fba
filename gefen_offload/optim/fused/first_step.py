"""What a first step reads every gradient for: the codebook's histogram, and the errors that choose a period."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from gefen_offload.optim.codebook import BINS
from gefen_offload.optim.fused import first_kernels
from gefen_offload.optim.fused.describe import DTYPES
from gefen_offload.optim.fused.launch import Kernel, Table
from gefen_offload.optim.fused.plan import LONGEST_SHORT, TILE, plan_blocks
from gefen_offload.optim.period import divisor_errors, lattice_of

PIECES = 256
TILES = 128  # of a program that counts
KEPT = 16  # sums of a program of `pair_sums`
MOST_LEVELS = 12
ODD_CHUNK = 2**20  # elements held as float64 where a block is too long for a program

_WORDS = struct.Struct("<20q")
_NEVER = 0x7FFFFFFF

_segment_largest = Kernel(first_kernels.segment_largest)
_bin_counts = Kernel(first_kernels.bin_counts)
_pair_sums = Kernel(first_kernels.pair_sums)


class _CountKind(NamedTuple):
    """What the gradients of one counting launch have in common."""

    dtype: torch.dtype
    width: int
    blocks: int
    long: bool
    aligned: int
    warps: int


class FirstStep:
    """The kernels of a first step on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = torch.empty(0, device=device)

    # --- the histogram ---

    def histogram(self, gradients: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Counts, int64 (4096,), of all of the flat gradients with their periods: `block_histogram`, summed."""
        with torch.cuda.device_of(self._anchor):  # type: ignore[no-untyped-call, unused-ignore]
            return self._histogram(gradients)

    def _histogram(self, gradients: Sequence[tuple[Tensor, int]]) -> Tensor:
        counts = torch.zeros(BINS, dtype=torch.int64, device=self._device)
        kinds: dict[_CountKind, list[tuple[bytes, int, int]]] = {}
        held = []
        for gradient, period in gradients:
            gradient = gradient.contiguous()
            plan = plan_blocks(period, 0)
            blocks, parts = gradient.numel() // period, max(1, plan.parts)
            largest = torch.zeros(blocks if plan.long else 0, dtype=torch.int32, device=self._device)
            held += [gradient, largest]
            row = _row(gradient.data_ptr(), blocks, period, plan.length | parts << 32, largest.data_ptr())
            aligned = 16 if gradient.data_ptr() % 16 == 0 and period % 16 == 0 else 1
            tiles = -(-blocks * parts // plan.blocks)
            kind = _CountKind(gradient.dtype, plan.width, plan.blocks, plan.long, aligned, plan.warps)
            kinds.setdefault(kind, []).append((row, tiles, -(-tiles // TILES)))
        for kind, pieces in kinds.items():
            for first in range(0, len(pieces), PIECES):
                self._count(kind, pieces[first : first + PIECES], counts)
        del held
        return counts

    def _count(self, kind: _CountKind, pieces: Sequence[tuple[bytes, int, int]], counts: Tensor) -> None:
        tiles, groups = [piece[1] for piece in pieces], [piece[2] for piece in pieces]
        table, starts = self._upload([piece[0] for piece in pieces], tiles, groups)
        buffers = (*table.buffers, counts)
        shape = (DTYPES[kind.dtype], kind.width, kind.blocks)
        if kind.long:
            _segment_largest(sum(tiles), buffers, (0, starts[0]), (*shape, kind.aligned), kind.warps)
        _bin_counts(sum(groups), buffers, (0, starts[1]), (*shape, kind.long, kind.aligned, TILES), kind.warps)

    def _upload(self, rows: Sequence[bytes], *programs: Sequence[int]) -> tuple[Table, list[int]]:
        starts = array("i")
        begins = []
        for counts in programs:
            begins.append(len(rows) * 40 + len(starts))
            sums = list(accumulate(counts, initial=0))[:-1]
            starts.extend(sums + [_NEVER] * (PIECES - len(sums)))
        return Table(self._device, b"".join(rows), starts.tobytes()), begins

    # --- the period ---

    def divisor_errors(self, gradient: Tensor) -> list[float]:
        """`period.divisor_errors` of a flat gradient, with sums in another fixed order."""
        n = gradient.numel()
        lattice = lattice_of(n)
        odd = [d for d in lattice.divisors if d % 2]
        if odd[-1] > ODD_CHUNK:
            return divisor_errors(gradient)
        with torch.cuda.device_of(self._anchor):  # type: ignore[no-untyped-call, unused-ignore]
            return self._errors(gradient.contiguous(), odd)

    def _errors(self, gradient: Tensor, odd: Sequence[int]) -> list[float]:
        n = gradient.numel()
        lattice = lattice_of(n)
        sums: list[Tensor] = []
        at: dict[
            int, tuple[int, int, int]
        ] = {}  # of a divisor: which tensor of `sums`, which sum in it, in units of what
        for base in odd:
            self._chain(gradient, base, sums, at)
        values = torch.cat(sums).tolist() if sums else []
        squares = {1: 0.0}  # of each divisor: the sum of the squared deviations from its blocks' means
        for d, (tensor, level, base) in at.items():
            squares[d] = values[KEPT * tensor + level] * base + (squares[base] if level else 0.0)
        return [math.sqrt(squares[d] / n) for d in lattice.divisors]

    def _chain(self, gradient: Tensor, base: int, sums: list[Tensor], at: dict[int, tuple[int, int, int]]) -> None:
        """Sums for the odd divisor `base` and its products with powers of two."""
        n = gradient.numel()
        doublings = _twos(n // base)
        if base == 1 and not doublings:
            return
        divisor, source, period = base, gradient, base
        if base > LONGEST_SHORT:
            source, deviations = _long_means(gradient, base)
            sums.append(torch.cat([deviations.view(1), deviations.new_zeros(KEPT - 1)]))
            at[base] = (len(sums) - 1, 0, 1)
            period = 1
        while doublings or (divisor == base and period > 1):
            width = 1 << (period - 1).bit_length()
            blocks = max(1, TILE // width)
            levels = min(doublings, MOST_LEVELS, blocks.bit_length() - 1)
            doublings -= levels
            units = n // divisor
            source, total = self._pairs(source, units, period, (width, blocks, levels, doublings > 0))
            sums.append(total)
            if period > 1:
                at[base] = (len(sums) - 1, 0, 1)
            at.update({divisor << level: (len(sums) - 1, level, divisor) for level in range(1, levels + 1)})
            divisor, period = divisor << levels, 1

    def _pairs(
        self, source: Tensor, units: int, period: int, shape: tuple[int, int, int, bool]
    ) -> tuple[Tensor, Tensor]:
        """One launch of `pair_sums`: the means it keeps, and its sums over all programs."""
        width, blocks, levels, keep = shape
        programs = -(-units // blocks)
        means = torch.empty(units >> levels if keep else 0, dtype=torch.float64, device=self._device)
        sums = torch.zeros((programs, KEPT), dtype=torch.float64, device=self._device)
        row = _row(source.data_ptr(), units, period, 0, 0, means.data_ptr(), sums.data_ptr())
        table, starts = self._upload([row], [programs])
        aligned = 16 if source.data_ptr() % 16 == 0 and period == 1 else 1
        dtype = tl.float64 if source.dtype is torch.float64 else DTYPES[source.dtype]
        constants = (dtype, width, blocks, levels, keep, aligned)
        _pair_sums(programs, (*table.buffers, sums), (0, starts[0]), constants, 8)
        return means, sums.sum(0)


def _row(*words: int) -> bytes:
    return _WORDS.pack(*words, *[0] * (20 - len(words)))


def _twos(n: int) -> int:
    return (n & -n).bit_length() - 1


def _long_means(gradient: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The means of blocks too long for a program, float64, and the sum of the squared deviations from them."""
    means, deviations = [], []
    for rows in torch.split(gradient.view(-1, length), max(1, ODD_CHUNK // length)):
        y = rows.float().square().double()
        mean = y.mean(1, keepdim=True)
        means.append(mean.view(-1))
        deviations.append((y - mean).square_().sum())
    return torch.cat(means), torch.stack(deviations).sum()

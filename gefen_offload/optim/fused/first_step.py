"""What a first step reads every gradient for: the codebook's histogram, and the errors that choose a period."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gefen_offload.optim.codebook import BINS, block_pieces
from gefen_offload.optim.fused.first_kernels import bin_counts, pair_sums
from gefen_offload.optim.period import divisor_errors, lattice_of

COUNTED = 2**22  # elements counted by one launch
COUNTED_TILE = 1024  # of a program
COPIES = 64  # of the counters
BLOCKS = 2048  # of a program of `pair_sums`
DOUBLINGS = 8  # of its blocks' length
LONGEST_LOOP = 512  # the longest block that a thread of `pair_sums` reads alone
ODD_CHUNK = 2**20  # elements held as float64 where a block is longer


class FirstStep:
    """The kernels of a first step on one device."""

    def __init__(self, device: torch.device) -> None:
        self._anchor = torch.empty(0, device=device)

    def queue_errors(self, gradients: Sequence[Tensor]) -> Callable[[], list[list[float]]]:
        """Have the device find `period.divisor_errors` of flat gradients, with sums in another fixed order.

        What is returned waits for the device, once, and gives the errors.
        """
        with torch.cuda.device_of(self._anchor):  # type: ignore[no-untyped-call, unused-ignore]
            queued = [_Errors(gradient.contiguous()) for gradient in gradients]
        return lambda: _read(queued)

    def queue_counts(self, gradients: Sequence[tuple[Tensor, int]]) -> Callable[[], Tensor]:
        """Have the device find `codebook.block_histogram`, summed over flat gradients with their periods.

        What is returned waits for the device and gives the counts on the host.
        """
        with torch.cuda.device_of(self._anchor):  # type: ignore[no-untyped-call, unused-ignore]
            # in int32, which holds what one copy gets of 2**37 elements
            counts = torch.zeros((COPIES, BINS), dtype=torch.int32, device=self._anchor.device)
            for gradient, period in gradients:
                _count(gradient.contiguous(), period, counts)
            total = counts.sum(0)
        return total.cpu


# --- the histogram --------------------------------------------------------------------------------------------------


def _count(gradient: Tensor, period: int, counts: Tensor) -> None:
    for rows, largest in block_pieces(gradient, period, COUNTED):
        grid = (-(-rows.numel() // COUNTED_TILE),)
        bin_counts[grid](rows, largest, counts, rows.numel(), period, COUNTED_TILE, COPIES, num_warps=4)


# --- the period -----------------------------------------------------------------------------------------------------


class _Errors:
    """The sums for one gradient, queued on its device, and what becomes of them once they are read.

    [Note: the chains] Every divisor is an odd one times a power of two. An odd divisor's sum of squared deviations is
    taken from the gradient; doubling a block's length d adds d / 2 times the sum of the squared differences between
    the means of its halves (see period.py), and leaves half as many means.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self._lattice = lattice_of(gradient.numel())
        self._added: dict[int, tuple[int, float]] = {}  # of a divisor: which of the sums it adds, and how many times
        self.sums: list[Tensor] = []
        odd = [divisor for divisor in self._lattice.divisors if divisor % 2]
        self._plain = odd[-1] > ODD_CHUNK
        for base in odd if not self._plain else ():
            self._chain(base)

    @property
    def count(self) -> int:
        """How many sums there are."""
        return sum(len(sums) for sums in self.sums)

    def errors(self, sums: Sequence[float]) -> list[float]:
        """`err(d)` for every divisor d."""
        if self._plain:
            return divisor_errors(self._gradient)
        squares = {1: 0.0}  # of each divisor: the sum of the squared deviations from its blocks' means
        for divisor in self._lattice.divisors[1:]:
            position, factor = self._added[divisor]
            squares[divisor] = sums[position] * factor + (0.0 if divisor % 2 else squares[divisor // 2])
        return [math.sqrt(total / self._lattice.numel) for total in squares.values()]

    def _chain(self, base: int) -> None:
        """Sums for the odd divisor `base` and its products with powers of two."""
        source, period, divisor, units = self._gradient, base, base, self._lattice.numel // base
        if base > LONGEST_LOOP:
            source, deviations = _long_means(source, base)
            self._add({base: (0, 1.0)}, deviations.view(1))
            period = 1
        while period > 1 or units % 2 == 0:
            levels = min(_twos(units), DOUBLINGS)
            source, sums = _pairs(source, units, period)
            added = {divisor << level: (level, (divisor << level) / 4) for level in range(1, levels + 1)}
            self._add(added | ({base: (0, 1.0)} if period > 1 else {}), sums)
            divisor, units, period = divisor << levels, units >> levels, 1

    def _add(self, added: dict[int, tuple[int, float]], sums: Tensor) -> None:
        self._added |= {divisor: (self.count + at, factor) for divisor, (at, factor) in added.items()}
        self.sums.append(sums)


def _read(queued: Sequence[_Errors]) -> list[list[float]]:
    sums = [sums for item in queued for sums in item.sums]
    values = torch.cat(sums).tolist() if sums else []
    errors = []
    for item in queued:
        errors.append(item.errors(values[: item.count]))
        values = values[item.count :]
    return errors


def _pairs(source: Tensor, units: int, period: int) -> tuple[Tensor, Tensor]:
    """One launch of `pair_sums`: the means that it keeps, and its sums over all programs."""
    programs = -(-units // BLOCKS)
    kept = torch.empty(programs * (BLOCKS >> DOUBLINGS), dtype=torch.float64, device=source.device)
    sums = torch.zeros((DOUBLINGS + 1, programs), dtype=torch.float64, device=source.device)
    pair_sums[(programs,)](source, sums, kept, units, period, BLOCKS, DOUBLINGS, num_warps=8)
    return kept, sums.sum(1)


def _twos(n: int) -> int:
    return (n & -n).bit_length() - 1


def _long_means(gradient: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The means of blocks too long for a thread, float64, and the sum of the squared deviations from them."""
    means, deviations = [], []
    for rows in torch.split(gradient.view(-1, length), max(1, ODD_CHUNK // length)):
        y = rows.float().square().double()
        mean = y.mean(1, keepdim=True)
        means.append(mean.view(-1))
        deviations.append((y - mean).square_().sum())
    return torch.cat(means), torch.stack(deviations).sum()

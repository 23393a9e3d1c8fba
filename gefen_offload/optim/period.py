"""The period: how long the blocks of a parameter are, found from its first gradient.

With y the squared gradient (float32, widened to float64), `err(d)` is the root of the mean, over the blocks of length
d, of the population variance of y inside a block. Only divisors d of the element count n are looked at.

[Note: the lattice] A block of length d = q * e is q blocks of length e side by side, so its sum of squared deviations
is that of the q blocks plus e times the squared deviations of their q means. Every divisor d > 1 gets its parent
e = d / (its least prime factor), and `increment(d) = e * sum (mean of the e-block - mean of the d-block)^2` is added
to the parent's sum. No difference of large numbers is taken, and the levels below the first shrink by the primes of n,
so the cost is about one pass per distinct prime factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

SHORTEST_PERIOD = 8
LONGEST_FALLBACK = 2048
CHUNK = 2**20  # elements of the gradient held as float64 at once
STORED = 2**16  # block means kept per divisor when the gradient is longer than one chunk

_FIRST_SCORE = 1e-12
_TIE = 1e-9


# --- maths ----------------------------------------------------------------------------------------------------------


def choose_period(errors: Sequence[float], shape: torch.Size) -> int:
    """The block length for a parameter of `shape`, of n elements, from `errors[i] = err(divisors_of(n)[i])`.

    Scores are the differences of neighbouring errors, and 1e-12 for the first; the least wins, and among scores within
    1e-9 of the largest error the smallest divisor wins. Errors that are not all finite decide nothing: the period then
    comes from the shape, as it does when no divisor of at least 8 wins.
    """
    n = shape.numel()
    if n < SHORTEST_PERIOD:
        return 1
    divisors = divisors_of(n)
    if len(errors) != len(divisors):
        raise ValueError(f"{n} elements have {len(divisors)} divisors below {n}, but {len(errors)} errors were given")
    period = _least_score(divisors, errors) if all(map(math.isfinite, errors)) else 1
    return period if period >= SHORTEST_PERIOD else _period_of_shape(shape)


def divisor_errors(gradient: Tensor) -> list[float]:
    """`err(d)` for every d of `divisors_of(n)`, in float64, on the gradient's device, in memory bounded by `CHUNK`."""
    return divisor_errors_of_rows(gradient.reshape(1, -1))[0]


def divisor_errors_of_rows(gradients: Tensor) -> list[list[float]]:
    """`divisor_errors` of each row of (k, n): the same bits, in fewer operations where rows are short."""
    lattice = lattice_of(gradients.shape[1])
    errors = []
    for rows in torch.split(gradients.detach(), max(1, CHUNK // lattice.numel)):
        increments = _increments(rows, lattice).t().tolist()
        errors += [errors_from_increments(lattice, row) for row in increments]
    return errors


def errors_from_increments(lattice: DivisorLattice, increments: Sequence[float]) -> list[float]:
    """`err(d)` from the increments of [Note: the lattice], both in the order of `lattice.divisors` (the first is 0)."""
    within: dict[int, float] = {}
    for divisor, increment in zip(lattice.divisors, increments, strict=True):
        within[divisor] = 0.0 if divisor == 1 else within[lattice.parent(divisor)] + increment
    return [math.sqrt(total / lattice.numel) for total in within.values()]


def _least_score(divisors: Sequence[int], errors: Sequence[float]) -> int:
    scores = [_FIRST_SCORE, *(b - a for a, b in pairwise(errors))]
    limit = min(scores) + _TIE * max(errors)
    return next(d for d, score in zip(divisors, scores, strict=True) if score <= limit)


def _period_of_shape(shape: torch.Size) -> int:
    n = shape.numel()
    last = shape[-1] if len(shape) >= 2 else 1
    short = max(d for d in (*divisors_of(n), n) if d <= LONGEST_FALLBACK)
    longest = max(last, short)
    return longest if longest >= SHORTEST_PERIOD else 1


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DivisorLattice:
    """The proper divisors of `numel` in ascending order, and the least prime factor of each (1 for 1)."""

    numel: int
    divisors: tuple[int, ...]
    least_primes: dict[int, int]

    def parent(self, divisor: int) -> int:
        """The largest proper divisor of `divisor`: the level its block means are made from."""
        return divisor // self.least_primes[divisor]

    def children(self, divisor: int) -> list[int]:
        """The divisors whose parent is `divisor`."""
        return self._children.get(divisor, [])

    @property
    def _children(self) -> dict[int, list[int]]:
        return _children_of(self.numel)


@lru_cache(maxsize=4096)
def lattice_of(n: int) -> DivisorLattice:
    """The divisor lattice of n >= 1; n = 1 counts 1 as its divisor."""
    divisors = {1: 1}
    for prime, power in sorted(_factors(n).items(), reverse=True):
        for divisor in list(divisors):
            divisors.update({divisor * prime**k: prime for k in range(1, power + 1)})
    ordered = tuple(sorted(d for d in divisors if d < n)) or (1,)
    return DivisorLattice(n, ordered, {d: divisors[d] for d in ordered})


def divisors_of(n: int) -> tuple[int, ...]:
    """The divisors of n that may be its period, ascending: 1 included, n excluded unless it is 1."""
    return lattice_of(n).divisors


@lru_cache(maxsize=4096)
def _children_of(n: int) -> dict[int, list[int]]:
    lattice = lattice_of(n)
    children: dict[int, list[int]] = {}
    for divisor in lattice.divisors[1:]:
        children.setdefault(lattice.parent(divisor), []).append(divisor)
    return children


def _factors(n: int) -> dict[int, int]:
    factors: dict[int, int] = {}
    prime = 2
    while prime * prime <= n:
        while n % prime == 0:
            factors[prime] = factors.get(prime, 0) + 1
            n //= prime
        prime += 1
    if n > 1:
        factors[n] = factors.get(n, 0) + 1
    return factors


# --- the increments -------------------------------------------------------------------------------------------------


def _increments(rows: Tensor, lattice: DivisorLattice) -> Tensor:
    """(divisors, rows): of several rows that fit in a chunk together, or of one that may be longer."""
    sums = _Increments(lattice, len(rows), rows.device)
    if lattice.numel <= CHUNK:
        sums.add_below(1, _squares(rows.reshape(-1)))
    else:
        _stream(rows.view(-1), lattice, sums)
    return sums.values


class _Increments:
    """The increment of every divisor for each row, gathered on the gradients' device."""

    def __init__(self, lattice: DivisorLattice, rows: int, device: torch.device) -> None:
        self._lattice = lattice
        self._index = {d: i for i, d in enumerate(lattice.divisors)}
        self._rows = rows
        self.values = torch.zeros((len(lattice.divisors), rows), dtype=torch.float64, device=device)

    def add(self, divisor: int, increment: Tensor) -> None:
        self.values[self._index[divisor]] += increment

    def add_below(self, divisor: int, means: Tensor) -> None:
        """Add every descendant of `divisor`, whose block means, all of them, row after row, are `means`."""
        for child in self._lattice.children(divisor):
            merged, increment = _merge(means, divisor, child, self._rows)
            self.add(child, increment)
            self.add_below(child, merged)


def _stream(gradient: Tensor, lattice: DivisorLattice, sums: _Increments) -> None:
    """Add every increment of a gradient longer than one chunk.

    A divisor with few blocks keeps its means, and its descendants follow from them; those with many are met anew in
    each pass. A pass takes a set of divisors whose common multiple fits in a chunk. A block longer than a chunk is
    merged from pieces.
    """
    n = lattice.numel
    streamed = [d for d in lattice.divisors[1:] if not _is_stored(lattice.parent(d), n)]
    for divisor in streamed:
        if divisor > CHUNK:
            means, increment = _merge_pieces(gradient, lattice.parent(divisor), divisor)
            sums.add(divisor, increment)
            sums.add_below(divisor, means)
    for alignment, members in _passes(d for d in streamed if d <= CHUNK):
        stored = _stream_pass(gradient, lattice, sums, alignment, members)
        for divisor, parts in stored.items():
            sums.add_below(divisor, torch.cat(parts))


def _stream_pass(
    gradient: Tensor, lattice: DivisorLattice, sums: _Increments, alignment: int, members: set[int]
) -> dict[int, list[Tensor]]:
    """Read the gradient once, add the increments of `members`, and return the means of those that are stored."""
    passed = _with_ancestors(members, lattice)
    stored: dict[int, list[Tensor]] = {d: [] for d in sorted(members) if _is_stored(d, lattice.numel)}

    def descend(divisor: int, means: Tensor) -> None:
        for child in lattice.children(divisor):
            if child in passed:
                merged, increment = _merge(means, divisor, child)
                if child in members:
                    sums.add(child, increment)
                if child in stored:
                    stored[child].append(merged)
                else:
                    descend(child, merged)

    for chunk in torch.split(gradient, CHUNK // alignment * alignment):
        descend(1, _squares(chunk))
    return stored


def _passes(divisors: Iterable[int]) -> list[tuple[int, set[int]]]:
    """Sets of divisors, each with a common multiple of at most `CHUNK`, longest divisors first."""
    passes: list[tuple[int, set[int]]] = []
    for divisor in sorted(divisors, reverse=True):
        for i, (multiple, members) in enumerate(passes):
            if math.lcm(multiple, divisor) <= CHUNK:
                passes[i] = (math.lcm(multiple, divisor), members | {divisor})
                break
        else:
            passes.append((divisor, {divisor}))
    return passes


def _with_ancestors(divisors: set[int], lattice: DivisorLattice) -> set[int]:
    closed = set(divisors)
    for divisor in divisors:
        while divisor > 1:
            closed.add(divisor)
            divisor = lattice.parent(divisor)
    return closed


def _is_stored(divisor: int, n: int) -> bool:
    return n // divisor <= STORED or divisor > CHUNK


def _squares(gradient: Tensor) -> Tensor:
    return gradient.to(torch.float32).square().to(torch.float64)


def _merge(means: Tensor, divisor: int, child: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    """The means of the blocks of length `child`, and its increment in each row, from those of length `divisor`."""
    groups = means.view(-1, child // divisor)
    merged = _row_means(groups)
    return merged, (groups - merged[:, None]).square_().view(rows, -1).sum(1) * divisor


def _row_means(groups: Tensor) -> Tensor:
    """Row means; of two or three columns by adding columns, which is several times faster on the CPU."""
    width = groups.shape[1]
    if width >= 4:
        return groups.mean(1)
    total = groups[:, 0] + groups[:, 1]
    return (total if width == 2 else total.add_(groups[:, 2])).div_(width)


def _merge_pieces(gradient: Tensor, divisor: int, child: int) -> tuple[Tensor, Tensor]:
    """As `_merge`, from the gradient itself, for blocks longer than a chunk: their pieces are merged in order."""
    merged = [_mean_and_squares(block, divisor) for block in torch.split(gradient, child)]
    return torch.stack([mean for mean, _ in merged]), torch.stack([squares for _, squares in merged]).sum() * divisor


def _mean_and_squares(block: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    """The mean of the means of sub-blocks of length `divisor`, and the sum of their squared deviations from it."""
    count, mean, squares = 0, *torch.zeros(2, dtype=torch.float64, device=block.device)
    for piece in torch.split(block, CHUNK // divisor * divisor):
        means = _squares(piece).view(-1, divisor).mean(1)
        added, piece_mean = means.numel(), means.mean()
        difference = piece_mean - mean
        squares = squares + (means - piece_mean).square_().sum() + difference**2 * (count * added / (count + added))
        count += added
        mean = mean + difference * (added / count)
    return mean, squares

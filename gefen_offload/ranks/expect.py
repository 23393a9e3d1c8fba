"""Expecting a failure: the test passes only if the run failed, and in the way that was said."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from gefen_offload.ranks.outcome import Outcome, RankFailure, signal_name


@dataclass
class Expected:
    """Filled when the block ends: the failure and its first cause."""

    failure: RankFailure | None = None
    first: Outcome | None = None
    mistakes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def expect_failure(
    *,
    rank: int | None = None,
    stage: str | None = None,
    exception: str | type[BaseException] | None = None,
    message: str | None = None,
    signal: int | None = None,
    exit_code: int | None = None,
    within: float | None = None,
) -> Iterator[Expected]:
    """The block must raise :class:`RankFailure` whose first cause agrees with everything that is given.

    `exception` is a class, or its name with or without module, that the rank's exception is an instance of; `message`
    is contained in its text; `within` bounds the seconds from the first failure to the verdict.
    """
    __tracebackhide__ = True
    expected = Expected()
    try:
        yield expected
    except RankFailure as failure:
        expected.failure, expected.first = failure, failure.first
        took = time.monotonic() - (failure.first.ended / 1e9 if failure.first else 0.0)
        if failure.unfired:
            raise
        first = failure.first
        if first is None:
            raise
        _check(expected, rank is None or first.rank == rank, f"rank {first.rank} failed first, not rank {rank}")
        _check(expected, stage is None or first.stage == stage, f"it was in stage {first.stage!r}, not {stage!r}")
        _check(expected, _raised(first, exception), f"it did not raise {exception}")
        told = first.failure.message if first.failure else ""
        _check(expected, message is None or message in told, f"its message {told!r} has no {message!r}")
        wanted = None if signal is None else -abs(int(signal))
        _check(expected, wanted is None or first.code == wanted, f"it did not get {signal_name(wanted)}")
        _check(expected, exit_code is None or first.code == exit_code, f"its code is {first.code}, not {exit_code}")
        _check(expected, within is None or took <= within, f"the verdict took {took:.2f} s, not {within} s")
        if expected.mistakes:
            raise AssertionError(f"failed otherwise than expected: {'; '.join(expected.mistakes)}\n{failure}") from None
    else:
        raise AssertionError("expected a failure of the ranks, and they passed")


def _check(expected: Expected, right: bool, mistake: str) -> None:
    if not right:
        expected.mistakes.append(mistake)


def _raised(outcome: Outcome, exception: str | type[BaseException] | None) -> bool:
    """Whether the rank's exception is one of that class, by name: the object itself stayed in the rank."""
    if exception is None:
        return True
    if outcome.failure is None:
        return False
    name = exception if isinstance(exception, str) else f"{exception.__module__}.{exception.__qualname__}"
    return any(base == name or base.rpartition(".")[2] == name for base in outcome.failure.bases)

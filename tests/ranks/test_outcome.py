"""The verdict on N outcomes."""

from __future__ import annotations

import pytest

from gefen_offload.ranks.outcome import Failure, Kind, Outcome, complete, judge


def outcome(rank: int, kind: Kind = Kind.PASSED, ended: int = 0, error: str = "", **more) -> Outcome:
    failure = Failure("RuntimeError", ("builtins.RuntimeError",), error, "") if error else None
    return Outcome(rank, kind, "body", ended=ended, failure=failure, **more)


def test_all_passed():
    """N passes are a pass."""
    assert judge([outcome(0), outcome(1)], 2).kind is Kind.PASSED


def test_missing_outcome():
    """A rank that handed over nothing fails the group, whatever the others say."""
    verdict = judge([outcome(0)], 2)
    assert verdict.kind is Kind.EXITED
    assert verdict.first.rank == 1


def test_second_outcome():
    """Two outcomes of one rank are a failure, also if both passed."""
    verdict = judge([outcome(0), outcome(1, pid=7), outcome(1, pid=8)], 2)
    assert verdict.kind is Kind.EXTRA
    assert "7, 8" in verdict.first.reason


def test_first_by_time():
    """The first cause is the earliest failure, not that of the lowest rank."""
    verdict = judge([outcome(0, Kind.RAISED, 20, "b"), outcome(1, Kind.RAISED, 10, "a")], 2)
    assert verdict.first.rank == 1
    assert [o.rank for o in verdict.secondary] == [0]


@pytest.mark.parametrize(
    "echo",
    [
        "Connection closed by peer [127.0.0.1]:1",
        "Connection reset by peer",
        "NCCL remote process exited",
        "Broken pipe",
    ],
)
def test_echo_before_the_cause(echo):
    """A peer's connection error seen before the death that caused it is secondary all the same."""
    verdict = judge([outcome(0, Kind.RAISED, 5, echo), outcome(1, Kind.KILLED, 10, code=-9)], 2)
    assert verdict.first.rank == 1
    assert verdict.kind is Kind.KILLED


@pytest.mark.parametrize("kind", [Kind.HUNG, Kind.BLOCKED], ids=["hung", "blocked"])
@pytest.mark.parametrize("waiting", ["gave-up", "hung"])
def test_the_rank_that_others_wait_for(kind, waiting):
    """A rank that never entered the collective in which another waits, or gave up waiting, is the first cause."""
    inside = {"collectives": 2, "collective": "all_reduce (number 2, not left)"}
    peer = outcome(0, Kind.RAISED, 5, "Timed out waiting 3200ms for recv operation", **inside)
    if waiting == "hung":
        peer = outcome(0, Kind.HUNG, 5, **inside)
    verdict = judge([peer, outcome(1, kind, 10, collectives=1, collective="all_reduce (number 1, left)")], 2)
    assert verdict.first.rank == 1
    assert [o.rank for o in verdict.secondary] == [0]


def test_a_death_comes_before_a_rank_that_is_late():
    """Where a rank died, one that had not yet come as far as its peers is no cause."""
    outcomes = [
        outcome(0, Kind.BLOCKED, 30, collectives=2, collective="all_reduce (number 2, not left)"),
        outcome(1, Kind.KILLED, 10, code=-9, collectives=2, collective="all_reduce (number 2, not left)"),
        outcome(2, Kind.BLOCKED, 30, collectives=1, collective="all_reduce (number 1, left)"),
    ]
    assert judge(outcomes, 3).first.rank == 1


def test_only_echoes():
    """If there are only connection errors the first of them is the cause."""
    verdict = judge([outcome(r, Kind.RAISED, 5 - r, "Connection reset by peer") for r in (0, 1)], 2)
    assert verdict.first.rank == 1


def test_an_assertion_about_a_connection_is_a_cause():
    """An assertion whose text speaks of a broken pipe is no echo."""
    failure = Failure("AssertionError", ("builtins.AssertionError",), "broken pipe", "")
    assert not failure.is_connection


def test_worst_rank():
    """The kind of the verdict is that of the worst rank."""
    kinds = [Kind.RAISED, Kind.HUNG, Kind.PASSED]
    assert judge([outcome(r, k, r) for r, k in enumerate(kinds)], 3).kind is Kind.HUNG


def test_skips():
    """Skipped only if all skip for one reason."""
    same = [outcome(r, Kind.SKIPPED, reason="no disk") for r in (0, 1)]
    assert (judge(same, 2).kind, judge(same, 2).reason) == (Kind.SKIPPED, "no disk")
    mixed = judge([same[0], outcome(1)], 2)
    assert mixed.kind is Kind.RAISED
    assert "do not agree" in mixed.reason
    assert judge([same[0], outcome(1, Kind.SKIPPED, reason="other")], 2).kind is Kind.RAISED


def test_a_failure_beats_a_skip():
    """A skip beside a failure does not hide it."""
    assert judge([outcome(0, Kind.SKIPPED, reason="x"), outcome(1, Kind.RAISED, 1, "y")], 2).kind is Kind.RAISED


def test_complete_is_in_order():
    """The completed list has each rank once, in order."""
    assert [o.rank for o in complete([outcome(2), outcome(0)], 3)] == [0, 1, 2]

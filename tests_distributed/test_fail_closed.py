"""What offload does not support is refused on every rank: a reason, nothing changed, nobody left waiting."""

from __future__ import annotations

import pytest

from gefen_offload.ranks import identical
from support import situations
from support.situations import attempt

REFUSED = [
    (situations.fsdp2, "dtensor"),
    (situations.fsdp2_cpu_offload, "dtensor"),
    (situations.fsdp1, "flat-parameter"),
    (situations.tensor_parallel, "dtensor"),
    (situations.zero_redundancy, "rank-local"),
]
REFUSED_ON_CPU = [row for row in REFUSED if row[1] != "rank-local"]
LAST_RANK_ONLY = [(situations.sharded_alone, "dtensor"), (situations.aliased, "aliased")]


def name(value):
    return value if isinstance(value, str) else value.__name__.replace("_", "-")


def check_refused(answers, code):
    """Every rank refused with this code, gave advice, and holds what it held."""
    for answer in answers:
        assert answer["code"] == code, answer["message"]
        assert len(answer["message"]) > 40
        assert not answer["active"]
        identical(answer["before"], answer["after"]).check()


@pytest.mark.gpu2
@pytest.mark.parametrize(("situation", "code"), REFUSED, ids=name)
def test_refused_on_every_rank(ranks, situation, code):
    """On NCCL, each unsupported engine is refused with its own code."""
    check_refused(ranks.run(attempt, situation).values, code)


@pytest.mark.gloo2
@pytest.mark.parametrize(("situation", "code"), REFUSED_ON_CPU, ids=name)
def test_structure_is_refused_before_the_device(ranks, situation, code):
    """On CPU ranks the structural code is still the one reported, not that the parameter is on the CPU."""
    check_refused(ranks.run(attempt, situation).values, code)


@pytest.mark.gpu2
def test_replicas_that_differ_are_refused(ranks):
    """One ulp of difference in one element on one rank is seen by every rank."""
    check_refused(ranks.run(attempt, situations.different_weights).values, "rank-local")


@pytest.mark.gpu2
def test_equal_replicas_are_accepted(ranks):
    """The clean twin of every refusal above: plain DDP activates on every rank."""
    for answer in ranks.run(attempt, situations.ddp).values:
        assert answer["code"] is None
        assert answer["active"]


@pytest.mark.gpu2
@pytest.mark.parametrize(("situation", "code"), LAST_RANK_ONLY, ids=name)
def test_one_rank_alone_refuses_and_its_peers_follow(ranks, situation, code):
    """Only the last rank is in the situation: it raises its code, the others raise at once and name it."""
    answers = ranks.run(attempt_on_last, situation).values
    assert answers[-1]["code"] == code
    for answer in answers[:-1]:
        assert answer["code"] is not None
        assert code in answer["message"]
        assert not answer["active"]
        identical(answer["before"], answer["after"]).check()


def attempt_on_last(context, situation):
    """Worker: the situation on the last rank, plain replicas elsewhere."""
    return attempt(context, situations.only_last_rank(situation))

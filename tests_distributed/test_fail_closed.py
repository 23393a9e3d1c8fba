"""What offload does not support is refused on every rank: a reason, nothing changed, nobody left waiting."""

from __future__ import annotations

import pytest

from gefen_offload.ranks import identical
from support import situations
from support.situations import attempt, attempt_streamed

REFUSED = [
    (situations.fsdp2, "dtensor"),
    (situations.fsdp2_cpu_offload, "dtensor"),
    (situations.fsdp1, "flat-parameter"),
    (situations.tensor_parallel, "dtensor"),
    (situations.zero_redundancy, "rank-local"),
    (situations.muon, "optimizer"),
    (situations.hybrid, "optimizer"),
    (situations.capturable, "capturable"),
    (situations.on_the_host, "cpu-parameter"),
]
STREAMED = [row for row in REFUSED if row[1] != "cpu-parameter"]
REFUSED_ON_CPU = [row for row in REFUSED if row[1] not in ("rank-local", "capturable")]
LAST_RANK_ONLY = [
    (situations.sharded_alone, "dtensor"),
    (situations.aliased, "aliased"),
    (situations.subclass, "subclass"),
    (situations.flat, "flat-parameter"),
    (situations.other_groups, "ownership"),
    (situations.custom_state, "custom-state"),
    (situations.capturable, "capturable"),
    (situations.muon, "optimizer"),
    (situations.poisoned, "poisoned"),
    (situations.on_the_host, "cpu-parameter"),
]
LAST_RANK_STREAMED = [row for row in LAST_RANK_ONLY if row[1] != "cpu-parameter"]


def name(value):
    return value if isinstance(value, str) else value.__name__.replace("_", "-")


def check_refused(answers, code):
    """Every rank refused with this code, gave advice, and holds what it held."""
    for answer in answers:
        assert answer["code"] == code, answer["message"]
        check_unharmed(answer)


def check_unharmed(answer):
    """The refusal came in seconds, with advice, and changed nothing."""
    assert answer["seconds"] < 5
    assert len(answer["message"]) > 40
    assert not answer["active"]
    identical(answer["before"], answer["after"]).check()


def check_followed(answers, code):
    """The last rank refused with this code, and its peers name it."""
    assert answers[-1]["code"] == code, answers[-1]["message"]
    for answer in answers[:-1]:
        assert answer["code"] is not None
        assert f"rank {len(answers) - 1} of" in answer["message"]
        assert f"({code})" in answer["message"]
    for answer in answers:
        check_unharmed(answer)


@pytest.mark.gpu2
@pytest.mark.parametrize(("situation", "code"), REFUSED, ids=name)
def test_refused_on_every_rank(ranks, situation, code):
    """On NCCL, each unsupported engine is refused with its own code."""
    check_refused(ranks.run(attempt, situation).values, code)


@pytest.mark.gpu4
@pytest.mark.parametrize(("situation", "code"), REFUSED, ids=name)
def test_refused_on_four_ranks(ranks, situation, code):
    """The same on four GPUs."""
    check_refused(ranks.run(attempt, situation).values, code)


@pytest.mark.gloo2
@pytest.mark.parametrize(("situation", "code"), REFUSED_ON_CPU, ids=name)
def test_structure_is_refused_before_the_device(ranks, situation, code):
    """On CPU ranks the structural code is still the one reported, not that the parameter is on the CPU."""
    check_refused(ranks.run(attempt, situation).values, code)


@pytest.mark.gloo2
@pytest.mark.parametrize(("situation", "code"), STREAMED, ids=name)
def test_refused_where_it_could_be_streamed(ranks, situation, code):
    """On CPU ranks whose parameters stand for an accelerator's, it is the engine that every rank reports."""
    check_refused(ranks.run(attempt_streamed, situation).values, code)


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
    check_followed(ranks.run(attempt_on_last, situation).values, code)


@pytest.mark.gpu4
@pytest.mark.parametrize(("situation", "code"), LAST_RANK_ONLY, ids=name)
def test_one_of_four_refuses_and_its_peers_follow(ranks, situation, code):
    """The same on four GPUs: three peers name the rank."""
    check_followed(ranks.run(attempt_on_last, situation).values, code)


@pytest.mark.gloo2
@pytest.mark.parametrize(("situation", "code"), LAST_RANK_STREAMED, ids=name)
def test_one_cpu_rank_alone_refuses_and_its_peer_follows(ranks, situation, code):
    """The same on CPU ranks, through the simulated accelerator."""
    check_followed(ranks.run(attempt_on_last, situation).values, code)


def attempt_on_last(context, situation):
    """Worker: the situation on the last rank, plain replicas elsewhere."""
    return attempt_streamed(context, situations.only_last_rank(situation))

"""Ranks compare their parameters through a store: all activate, or none, and none is left waiting."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from gefen_offload import OffloadPolicy, OffloadReason, OffloadUnsupportedError
from gefen_offload.offload.replicas import Ranks, agreement, fingerprint
from gefen_offload.ranks import identical
from support import situations
from support.simulated import SimulatedAccelerator, simulated

SECONDS = 20.0


def parameters(seed=0):
    """A few parameters of several dtypes."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in [(6, 4), (5,), (), (0, 3)]]
    return [(f"p{i}", nn.Parameter(v.to(d))) for i, (v, d) in enumerate(zip(values, DTYPES, strict=True))]


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def together(*ranks, seconds=SECONDS, rounds=1):
    """Each of `ranks` is a function called inside its own rank's agreement; returns what each rank raised, by round."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    raised = [[None] * len(ranks) for _ in range(rounds)]

    def run(rank):
        for number in range(rounds):
            try:
                with agreement(Ranks(store, tuple(range(len(ranks))), rank), seconds, "offload_state_()") as pact:
                    pact.confirm(ranks[rank]())
            except Exception as error:
                raised[number][rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks)) if ranks[rank] is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 10)
        assert not thread.is_alive()
    return raised if rounds > 1 else raised[0]


def same():
    return fingerprint(parameters())


def refusing():
    raise OffloadUnsupportedError(OffloadReason.ALIASED, "two of a kind")


def failing():
    raise MemoryError("no host memory")


def test_equal_replicas_agree():
    """Three ranks with the same bits go on, again and again."""
    assert together(same, same, same, rounds=4) == [[None] * 3] * 4


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda named: named[0][1].data.view(-1)[3].mul_(1 + 2**-23), id="one-ulp"),
        pytest.param(lambda named: named[1][1].data.neg_(), id="signs"),
        pytest.param(lambda named: named[0][1].data.copy_(named[0][1].data.flip(0)), id="order"),
        pytest.param(lambda named: named.pop(), id="fewer"),
        pytest.param(lambda named: named.insert(0, ("q", nn.Parameter(torch.zeros(2)))), id="other-names"),
        pytest.param(lambda named: named.__setitem__(1, ("q", named[1][1])), id="another-name"),
        pytest.param(lambda named: named.__setitem__(0, ("p0", named[0][1].view(4, 6))), id="another-shape"),
    ],
)
def test_any_difference_is_refused_by_all(change):
    """Names, shapes and single bits count; every rank raises, with the same code and advice."""

    def differing():
        named = parameters()
        change(named)
        return fingerprint(named)

    for error in together(same, differing, same):
        assert error is None or error.reason is OffloadReason.RANK_LOCAL
    errors = together(same, differing)
    assert all(error.reason is OffloadReason.RANK_LOCAL for error in errors)
    assert all("DistributedDataParallel" in str(error) for error in errors)


@pytest.mark.parametrize(("culprit", "code"), [(refusing, "aliased"), (failing, "MemoryError")])
def test_a_refusing_rank_is_named_by_its_peers(culprit, code):
    """The rank raises its own error, its peers raise at once and name rank and code."""
    errors = together(same, same, culprit)
    assert isinstance(errors[2], MemoryError if culprit is failing else OffloadUnsupportedError)
    for error in errors[:2]:
        assert isinstance(error, OffloadUnsupportedError)
        assert "rank 2" in str(error)
        assert code in str(error)


def test_a_rank_that_does_not_come_is_named():
    """After the deadline the waiting rank says which ranks are missing."""
    errors = together(same, None, seconds=0.3)
    assert errors[0].reason is OffloadReason.RANK_LOCAL
    assert "ranks [1]" in str(errors[0])


def test_who_comes_after_the_deadline_is_told():
    """The rank that gave up left word, so that a late one does not activate alone."""
    store = HashStore()
    with pytest.raises(OffloadUnsupportedError), agreement(Ranks(store, (0, 1), 0), 0.2, "offload_state_()") as pact:
        pact.confirm(same())
    late = agreement(Ranks(store, (0, 1), 1), SECONDS, "offload_state_()")
    with pytest.raises(OffloadUnsupportedError, match="rank 0") as caught, late as pact:
        pact.confirm(same())
    assert "did not reach" in str(caught.value)


def test_alone_nothing_is_compared():
    """Without other ranks there is no agreement to wait for."""
    with agreement(None, SECONDS, "offload_state_()") as pact:
        assert not pact.needed
        pact.confirm(same())


def test_a_fingerprint_is_of_the_bits():
    """Non-contiguous parameters of the same values have the same fingerprint; a NaN's payload counts."""
    value = torch.randn(6, 4)
    other = value.t().contiguous().t()
    assert fingerprint([("p", value)]) == fingerprint([("p", other)])
    quiet = torch.tensor([float("nan")])
    payload = quiet.view(torch.int32).add(1).view(torch.float32)
    assert fingerprint([("p", quiet)]) != fingerprint([("p", payload)])


# --- real engines, on ranks ---


def attempt_simulated(context, situation, **policy):
    """Worker: activation on CPU parameters that stand for an accelerator's."""
    with simulated(SimulatedAccelerator()):
        return situations.attempt(context, situation)


def check_refused(answers, code):
    """Every rank refused with this code, gave advice, and holds what it held."""
    for answer in answers:
        assert answer["code"] == code, answer["message"]
        assert len(answer["message"]) > 40
        assert not answer["active"]
        identical(answer["before"], answer["after"]).check()


@pytest.mark.gloo2
@pytest.mark.parametrize(
    ("situation", "code"),
    [
        (situations.fsdp2, "dtensor"),
        (situations.tensor_parallel, "dtensor"),
        (situations.fsdp1, "flat-parameter"),
        (situations.zero_redundancy, "rank-local"),
        (situations.different_weights, "rank-local"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.replace("_", "-"),
)
def test_sharded_engines_are_refused_on_every_rank(ranks, situation, code):
    """With parameters that could be offloaded, it is still the engine's structure that every rank reports."""
    check_refused(ranks.run(attempt_simulated, situation).values, code)


@pytest.mark.gloo2
def test_equal_ranks_activate(ranks):
    """The clean twin: plain DDP is accepted on every rank."""
    assert all(answer["active"] for answer in ranks.run(attempt_simulated, situations.ddp).values)


@pytest.mark.gloo2
def test_one_refusing_rank_stops_all(ranks):
    """Only the last rank is in trouble: it raises its code, the other names it, and nobody waits."""
    first, last = ranks.run(one_in_trouble).values
    assert last["code"] == "dtensor"
    assert first["code"] is not None
    assert "rank 1" in first["message"]
    assert "dtensor" in first["message"]
    check_refused([first], first["code"])


def one_in_trouble(context):
    """Worker: the last rank's parameters are DTensors."""
    return attempt_simulated(context, situations.only_last_rank(situations.sharded_alone))


@pytest.mark.gloo2
@pytest.mark.parametrize("action", ["load", "group"])
def test_loads_and_groups_are_compared_too(ranks, action):
    """A rank that drifted, or adds another group, is refused at load and add_param_group; nothing has changed."""
    for answer in ranks.run(drift, action).values:
        assert answer["code"] == "rank-local", answer
        identical(answer["before"], answer["after"]).check()


def drift(context, action):
    """Worker: activation on equal ranks, then an action after one rank has changed."""
    with simulated(SimulatedAccelerator()):
        _, optimizer = situations.ddp(context)
        optimizer.offload_state_(policy=OffloadPolicy(verify_seconds=30))
        saved = optimizer.state_dict()
        if action == "load" and context.rank == 1:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1)
        before = situations.frozen(optimizer)
        try:
            if action == "load":
                optimizer.load_state_dict(saved)
            else:
                optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.full((3,), float(context.rank))))]})
        except OffloadUnsupportedError as error:
            return {"code": error.reason.value, "before": before, "after": situations.frozen(optimizer)}
        return {"code": None}


def spoilt_entry(optimizer, saved):
    del saved["state"][0]["m_magnitude"]
    optimizer.load_state_dict(saved)


def failing_hook(optimizer, saved):
    optimizer.register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    optimizer.load_state_dict(saved)


def group_without_parameters(optimizer, saved):
    optimizer.add_param_group({"lr": 0.1})


ON_ONE_RANK = {
    spoilt_entry: (lambda optimizer, saved: optimizer.load_state_dict(saved), "ValueError"),
    failing_hook: (lambda optimizer, saved: optimizer.load_state_dict(saved), "ZeroDivisionError"),
    group_without_parameters: (
        lambda optimizer, saved: optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.ones(3)))]}),
        "ValueError",
    ),
}


@pytest.mark.gloo2
@pytest.mark.parametrize("trouble", ON_ONE_RANK, ids=lambda trouble: trouble.__name__.replace("_", "-"))
def test_what_one_rank_alone_refuses_all_refuse_at_once(ranks, trouble):
    """A checkpoint, hook or group that only the last rank cannot take: its peer names it within seconds, unchanged."""
    first, last = ranks.run(refused_by_last, trouble).values
    for answer in (first, last):
        assert answer["seconds"] < 5
        assert answer["active"]
        identical(answer["before"], answer["after"]).check()
    assert last["error"] == ON_ONE_RANK[trouble][1]
    assert first["error"] == "OffloadUnsupportedError"
    assert f"rank 1 of [0, 1] refused {first['what']} ({last['error']})" in first["message"]
    assert last["message"] in first["message"]


def refused_by_last(context, trouble):
    """Worker: a load or a new group that is sound on every rank but the last."""
    with simulated(SimulatedAccelerator()):
        _, optimizer = situations.trained_ddp(context)
        optimizer.offload_state_()
        saved, before = optimizer.state_dict(), situations.frozen(optimizer)
        operation = trouble if context.rank == context.world - 1 else ON_ONE_RANK[trouble][0]
        begun = time.monotonic()
        try:
            operation(optimizer, saved)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - begun}
        else:
            answer = {"error": None, "message": "", "seconds": 0.0}
        what = "add_param_group()" if trouble is group_without_parameters else "load_state_dict()"
        after, active = situations.frozen(optimizer), optimizer.state_offload_active
        return {**answer, "what": what, "before": before, "after": after, "active": active}


@pytest.mark.gloo2
def test_verification_can_be_narrowed_or_skipped(ranks):
    """Ranks that are meant to differ activate in a group of their own, or without the comparison."""
    assert ranks.run(differ_on_purpose).values == [(True, True)] * 2


def differ_on_purpose(context):
    """Worker: different weights, verified in a group of one, then not verified."""
    import torch.distributed as dist

    groups = [dist.new_group([rank]) for rank in range(context.world)]
    alone, other = groups[context.rank], groups[1 - context.rank]
    with simulated(SimulatedAccelerator()):
        _, narrowed = situations.different_weights(context)
        with pytest.raises(ValueError, match="is not in the process_group"):
            narrowed.offload_state_(process_group=other)
        narrowed.offload_state_(process_group=alone)
        _, skipped = situations.different_weights(context)
        skipped.offload_state_(policy=OffloadPolicy(verify_replicas=False))
    dist.destroy_process_group(alone)
    return narrowed.state_offload_active, skipped.state_offload_active

"""A rank fails, dies or loses its peer: the others say so in seconds, the file is intact, and the run can go on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gefen_offload.ranks import expect_failure, faults, identical
from support.struck import (
    CASE,
    MEMORY,
    flip_a_parameter_bit,
    negate_a_gradient,
    train_streamed,
    travel,
    travel_apart,
)
from support.training import Case

WITHIN = 5.0  # seconds from the first failure to the verdict
DEFERRED = replace(CASE, policy=replace(CASE.policy, deferred=True))


def name(row):
    return row.id if hasattr(row, "id") else row.__name__.replace("_", "-")


@pytest.fixture
def path(tmp_path):
    """Where the run saves, every second step."""
    return str(tmp_path / "run.pt")


@pytest.fixture(scope="module")
def known():
    """What the run leaves that nothing happens to, for each tier and case."""
    return {}


@pytest.fixture
def whole(ranks, known, tmp_path):
    """That run's journals, one a rank."""

    def of(case):
        key = (ranks.gpus, case.policy.deferred)
        if key not in known:
            known[key] = ranks.run(travel, case, str(tmp_path / "whole.pt")).values
        return known[key]

    return of


def saved_step(path):
    """The step of the file; 0 if there is none."""
    return torch.load(path, map_location="cpu", weights_only=True)["step"] if Path(path).exists() else 0


def check_rest(values, whole, first):
    """A run that began at `first` has the losses, and at the end the bits, of the whole run."""
    for one, other in zip(whole, values, strict=True):
        assert (one.first, other.first) == (0, first)
        assert {step: loss for step, loss in one.losses.items() if step >= first} == other.losses
        identical(one.last, other.last).check()


# --- faults that end the run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strike:
    """A fault that ends the run, how the rank that it hits ends, and the step of the file that is left.

    Not `on_gpus`: what another row shows there as well, for every row costs a pool of ranks.
    """

    id: str
    fault: faults.Fault
    ending: dict[str, Any]
    saved: int
    case: Case = CASE
    recover: bool = False
    on_gpus: bool = True


KILLED = {"signal": SIGKILL}
POISONED = {"exception": "OffloadPoisonedError", "message": "InjectedError: injected"}
STRIKES = [
    Strike("killed-before-the-first-step", faults.kill(1, "backward 0"), KILLED, 0, on_gpus=False),
    Strike("killed-between-backward-and-step", faults.kill(1, "backward 2"), KILLED, 2),
    Strike("killed-during-copyback", faults.kill(1, faults.mark("copy out 2", nth=2)), KILLED, 2),
    Strike("killed-during-deferred-copyback", faults.kill(0, "backward 3"), KILLED, 2, DEFERRED),
    Strike("killed-while-saving", faults.kill(0, "half written 4"), KILLED, 2),
    Strike("killed-before-the-rename", faults.kill(0, "written 4"), KILLED, 2, on_gpus=False),
    Strike("killed-before-an-all-reduce", faults.kill(1, faults.collective("all_reduce", 3)), KILLED, 2, recover=True),
    Strike("gone-without-a-word", faults.leave(1, "backward 4", code=0), {"exit_code": 0}, 4, on_gpus=False),
    Strike("raises-between-backward-and-step", faults.throw(1, "backward 4"), {"exception": "InjectedError"}, 4),
    Strike("copyback-fails", faults.throw(1, faults.mark("copy out 2", nth=2)), POISONED, 2),
]


def strike(ranks, path, whole, row):
    """The run ends as the row says, the file is the one before, and a new run from it ends like the whole one."""
    with expect_failure(rank=row.fault.rank, within=WITHIN, **row.ending) as expected:
        ranks.options(faults=[row.fault]).run(travel, row.case, path, row.recover)
    assert all(outcome.bad for outcome in expected.failure.outcomes)
    assert f"secondary: rank {1 - row.fault.rank}" in str(expected.failure)
    assert saved_step(path) == row.saved
    check_rest(ranks.run(travel, row.case, path).values, whole(row.case), row.saved)


@pytest.mark.gloo2
@pytest.mark.parametrize("row", STRIKES, ids=name)
def test_struck_on_the_cpu(ranks, path, whole, row):
    """Two CPU ranks, streaming through the simulated accelerator: one is struck, the other is not left waiting."""
    strike(ranks, path, whole, row)


@pytest.mark.gpu2
@pytest.mark.parametrize("row", [row for row in STRIKES if row.on_gpus], ids=name)
def test_struck_on_gpus(ranks, path, whole, row):
    """The same on two GPUs, where the other rank waits in an NCCL collective."""
    strike(ranks, path, whole, row)


def die_while_loading(ranks, path, whole):
    """A rank dies on its way to the comparison of replicas, for which its peer waits."""
    ranks.run(travel, CASE, path)
    with expect_failure(rank=1, signal=SIGKILL, within=WITHIN):
        ranks.options(faults=[faults.kill(1, "loading")]).run(travel, CASE, path)
    assert saved_step(path) == CASE.steps - 1
    check_rest(ranks.run(travel, CASE, path).values, whole(CASE), CASE.steps - 1)


@pytest.mark.gloo2
def test_killed_while_loading_on_the_cpu(ranks, path, whole):
    """The rank that waits in the store is ended within seconds too, and the same file loads in new processes."""
    die_while_loading(ranks, path, whole)


@pytest.mark.gpu2
def test_killed_while_loading_on_gpus(ranks, path, whole):
    """The rank that waits in the store is ended within seconds too, and the same file loads in new processes."""
    die_while_loading(ranks, path, whole)


# --- faults that the run survives -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mishap:
    """A fault on rank 1, and the failures that this rank sees: step, exception, and whether it is poisoned."""

    id: str
    fault: faults.Fault
    failures: list[tuple[int, str, bool]]
    case: Case = CASE


LATER = [(3, "OffloadPoisonedError", True)]
MISHAPS = [
    Mishap("late", faults.delay(1, "backward 3", 0.4), []),
    Mishap("no-memory-at-the-first-window", faults.throw(1, "copy in 3", MEMORY), [(3, "OutOfMemoryError", False)]),
    Mishap("no-memory-at-a-later-window", faults.throw(1, faults.mark("copy in 3", 6), MEMORY), LATER),
    Mishap("copyback-fails", faults.throw(1, faults.mark("copy out 3", 2)), LATER),
    Mishap("copyback-fails-deferred", faults.throw(1, faults.mark("copy out 3", 2)), LATER, DEFERRED),
]


def survive(ranks, path, whole, row):
    """The rank sees its failure, its peer none; together they go on, and end like the whole run."""
    values = ranks.options(faults=[row.fault]).run(travel, row.case, path, recover=True).values
    assert [journal.failures for journal in values] == [[], row.failures]
    check_rest(values, whole(row.case), 0)


@pytest.mark.gloo2
@pytest.mark.parametrize("row", MISHAPS, ids=name)
def test_survived_on_the_cpu(ranks, path, whole, row):
    """What left everything unchanged is tried again; after a poisoned step all ranks go back to the file."""
    survive(ranks, path, whole, row)


@pytest.mark.gpu2
@pytest.mark.parametrize("row", MISHAPS, ids=name)
def test_survived_on_gpus(ranks, path, whole, row):
    """The same on two GPUs."""
    survive(ranks, path, whole, row)


# --- bits that are wrong --------------------------------------------------------------------------------------------

CORRUPTIONS = [negate_a_gradient, flip_a_parameter_bit]


def part(ranks, path, whole, corrupt):
    """Load, added group and activation are refused on both ranks; then the file makes them replicas again."""
    values = ranks.run(travel_apart, CASE, path, corrupt, 3).values
    for journal in values:
        assert journal.failures == [(3, "rank-local", False)] * 3
    check_rest(values, whole(CASE), 0)


@pytest.mark.gloo2
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=name)
def test_replicas_that_part_on_the_cpu(ranks, path, whole, corrupt):
    """One wrong element on one rank is seen by everything that compares replicas, on both ranks, within seconds."""
    part(ranks, path, whole, corrupt)


@pytest.mark.gpu2
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=name)
def test_replicas_that_part_on_gpus(ranks, path, whole, corrupt):
    """One wrong element on one rank is seen by everything that compares replicas, on both ranks, within seconds."""
    part(ranks, path, whole, corrupt)


HOOKED = replace(CASE, hook=allreduce_hook, steps=5)
FLIPS = [faults.corrupt(1, faults.collective("all_reduce", 3), element) for element in range(16)]


def corrupt_before_all_reduce(ranks):
    """The sum is wrong on every rank alike: no replica differs, but the trace does, from that step's gradients on."""
    clean = ranks.run(train_streamed, HOOKED).values
    wrong = ranks.options(faults=FLIPS).run(train_streamed, HOOKED).values
    for shots in zip(*wrong, strict=True):
        identical(*({k: v for k, v in shot.items() if k != "loss"} for shot in shots)).check()
    identical(clean[0][:2], wrong[0][:2]).check()
    identical(clean[0][2]["loss"], wrong[0][2]["loss"]).check()
    assert not identical(clean[0][2]["gradients"], wrong[0][2]["gradients"])


@pytest.mark.gloo2
def test_a_gradient_corrupted_before_the_all_reduce_on_the_cpu(ranks):
    """Flipped bits on one rank reach all: only the comparison with a clean run finds them, in the step they came."""
    corrupt_before_all_reduce(ranks)


@pytest.mark.gpu2
def test_a_gradient_corrupted_before_the_all_reduce_on_gpus(ranks):
    """Flipped bits on one rank reach all: only the comparison with a clean run finds them, in the step they came."""
    corrupt_before_all_reduce(ranks)

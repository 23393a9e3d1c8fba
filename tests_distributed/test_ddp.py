"""Data-parallel training: offloaded against resident, to the bit, at every step, on every rank."""

from __future__ import annotations

import pytest

from gefen_offload.ranks import identical
from support.cases import CASES, with_path
from support.training import Case, train, train_both, train_both_simulated

ON_GLOO = [case for case in CASES if not case.uneven and case.hook is None]  # torch offers that hook on NCCL only
PATHS = [with_path(case, fused) for case in CASES for fused in (True, False)]


WRAPPED = ("plain-ddp", "no-sync-accumulation", "static-graph", "unused-branch", "bucket-view", "late-group")
TWICE = [case for case in PATHS if case.id.startswith(("plain-ddp", "bfloat16-groups", "small-windows-d", "clip"))]


def name(case: Case) -> str:
    return case.id


def replicas(trace):
    """What must be the same on every rank: all but the rank's own loss."""
    return [{key: value for key, value in shot.items() if key != "loss"} for shot in trace]


def without_residency(trace):
    """What must not depend on where the state lives."""
    return [{key: value for key, value in shot.items() if key != "residency"} for shot in trace]


def check_pairs(values, case):
    """Every rank's two runs agree, and the replicas of each agree."""
    for rank, (resident, offloaded) in enumerate(values):
        assert len(resident) == len(offloaded) == case.steps - (2 * rank if case.uneven else 0)
        identical(without_residency(resident), without_residency(offloaded)).check()
    if not case.uneven:
        for _, offloaded in values[1:]:
            identical(replicas(values[0][1]), replicas(offloaded)).check()


def check_residency(values, case):
    """The resident run kept its state on the GPU, the offloaded one on the CPU after every step that was offloaded."""
    for resident, offloaded in values:
        for step, shot in enumerate(offloaded):
            restored = any(first <= step < then for first, then in zip(case.restore, case.activate, strict=True))
            assert shot["residency"] in ([], ["cuda"] if restored else ["cpu"])
        assert offloaded[-1]["residency"] == ["cpu"]
        assert resident[-1]["residency"] == ["cuda"]


@pytest.mark.gpu2
@pytest.mark.parametrize("case", PATHS, ids=name)
def test_offloaded_equals_resident(ranks, case):
    """On two GPUs an offloaded run has the resident run's gradients, parameters, state, codebook and losses."""
    values = ranks.run(train_both, case).values
    check_pairs(values, case)
    check_residency(values, case)


@pytest.mark.gpu1
@pytest.mark.parametrize("case", [c for c in PATHS if c.id.rpartition("-")[0] in WRAPPED], ids=name)
def test_offloaded_equals_resident_on_one_gpu(ranks, case):
    """The same at world 1, where DDP still hooks and buckets the gradients: the rows that differ in what DDP does."""
    values = ranks.run(train_both, case).values
    check_pairs(values, case)
    check_residency(values, case)


@pytest.mark.gpu4
@pytest.mark.parametrize("case", PATHS, ids=name)
def test_offloaded_equals_resident_on_four_gpus(ranks, case):
    """The same at world 4."""
    values = ranks.run(train_both, case).values
    check_pairs(values, case)
    check_residency(values, case)


@pytest.mark.gpu8
@pytest.mark.parametrize("case", PATHS[:8], ids=name)
def test_offloaded_equals_resident_on_eight_gpus(ranks, case):
    """The same at world 8, for the rows that do not shrink a rank's work to nothing."""
    values = ranks.run(train_both, case).values
    check_pairs(values, case)
    check_residency(values, case)


@pytest.mark.gloo2
@pytest.mark.parametrize("case", ON_GLOO, ids=name)
def test_streamed_equals_resident_on_the_cpu(ranks, case):
    """Two CPU replicas train, stay equal, and repeat themselves to the bit through the simulated accelerator."""
    values = ranks.run(train_both_simulated, case).values
    check_pairs(values, case)
    trained = values[0][0]
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert trained[-1]["global_step"] == case.steps - (case.scaler_overflow_at is not None)


@pytest.mark.gloo2
@pytest.mark.parametrize("case", CASES[:2], ids=name)
def test_a_run_repeats_itself(ranks, case):
    """The same run twice, the same bits."""
    first, again = ranks.run(train, case, False).values[0], ranks.run(train, case, False).values[0]
    identical(first, again).check()


@pytest.mark.gpu2
@pytest.mark.parametrize("case", TWICE, ids=name)
def test_a_run_repeats_itself_on_gpus(ranks, case):
    """The same offloaded run twice, the same bits on each rank."""
    for first, again in zip(ranks.run(train, case, True).values, ranks.run(train, case, True).values, strict=True):
        identical(first, again).check()


def pooled_and_fresh(ranks, worker, *args):
    """Ranks that have run other tests and ranks that have not: the same bits."""
    pooled = ranks.run(worker, *args).values
    fresh = ranks.options(fresh=True).run(worker, *args).values
    identical(pooled, fresh).check()


@pytest.mark.gloo2
def test_new_processes_repeat_it_on_the_cpu(ranks):
    """What ran before in a process leaves no trace in a run."""
    pooled_and_fresh(ranks, train_both_simulated, CASES[0])


@pytest.mark.gpu2
def test_new_processes_repeat_it_on_gpus(ranks):
    """What ran before in a process leaves no trace in a run."""
    pooled_and_fresh(ranks, train_both, CASES[0])


@pytest.mark.gloo4
def test_replicas_stay_equal_on_four_ranks(ranks):
    """Four resident CPU replicas hold the same bits after every step."""
    values = ranks.run(train, CASES[0], False).values
    for other in values[1:]:
        identical(replicas(values[0]), replicas(other)).check()

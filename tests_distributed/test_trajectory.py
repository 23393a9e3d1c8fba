"""End to end: a small GPT on real text, its loss curve resident against offloaded, and across a checkpoint."""

from __future__ import annotations

import pytest

from gefen_offload.ranks import identical
from support.gpt import GPTShape
from support.training import Case, Run, Stretch, curve

LONG = Case("gpt-200", GPTShape(width=96, layers=3, heads=4, length=64), schedule=True, clip=1.0, steps=200)
SHORT = Case("gpt-30", schedule=True, clip=1.0, steps=30)
BAND = 0.02  # nats per byte between world 1 and world 2: the all-reduce adds two halves in another order


def losses(result):
    """The run's one curve: the mean over ranks is the same list on every rank."""
    curves = [value[0] for value in result.values]
    assert all(c == curves[0] for c in curves)
    return curves[0]


def resident_against_offloaded(ranks, record_property):
    resident = ranks.run(curve, Stretch(LONG, offload=False))
    offloaded = ranks.run(curve, Stretch(LONG, offload=True))
    record_property("trajectory", {"resident": losses(resident), "offloaded": losses(offloaded)})
    assert losses(resident) == losses(offloaded)
    assert losses(offloaded)[-1] < losses(offloaded)[0] - 2.0
    for (_, before), (_, after) in zip(resident.values, offloaded.values, strict=True):
        assert after.pop("residency") == ["cpu"]
        assert before.pop("residency") == ["cuda"]
        identical(before, after).check()


@pytest.mark.gpu1
def test_loss_curve_on_one_gpu(ranks, record_property):
    """200 steps on one GPU: the same losses to the bit, and they fall by more than two nats."""
    resident_against_offloaded(ranks, record_property)


@pytest.mark.gpu2
def test_loss_curve_on_two_gpus(ranks, record_property):
    """200 data-parallel steps on two GPUs: the same losses to the bit."""
    resident_against_offloaded(ranks, record_property)


def resumed(ranks, tmp_path, long, saved_offloaded, live_offloaded):
    """The whole run, and the run that stopped halfway and went on from its file: last snapshots."""
    path, half = str(tmp_path / "half.pt"), long.steps // 2
    whole = ranks.run(curve, Stretch(long, saved_offloaded, save=path, save_at=half))
    rest = ranks.run(curve, Stretch(long, live_offloaded, resume=path))
    assert losses(rest) == losses(whole)[half:]
    for (_, one), (_, other) in zip(whole.values, rest.values, strict=True):
        one.pop("residency"), other.pop("residency")
        identical(one, other).check()


@pytest.mark.gpu2
@pytest.mark.parametrize("saved", [False, True], ids=["saved-resident", "saved-offloaded"])
@pytest.mark.parametrize("live", [False, True], ids=["live-resident", "live-offloaded"])
def test_resume_on_two_gpus(ranks, tmp_path, saved, live):
    """A checkpoint of either residency continues in either, on two GPUs, as if nothing had happened."""
    resumed(ranks, tmp_path, SHORT, saved, live)


@pytest.mark.gpu1
@pytest.mark.parametrize("saved", [False, True], ids=["saved-resident", "saved-offloaded"])
@pytest.mark.parametrize("live", [False, True], ids=["live-resident", "live-offloaded"])
def test_resume_on_one_gpu(ranks, tmp_path, saved, live):
    """A checkpoint of either residency continues in either, on one GPU, as if nothing had happened."""
    resumed(ranks, tmp_path, SHORT, saved, live)


@pytest.mark.gloo2
def test_resume_on_the_cpu(ranks, tmp_path):
    """A resident run on two CPU ranks continues from its file as if nothing had happened."""
    resumed(ranks, tmp_path, SHORT, False, False)


@pytest.mark.gloo2
def test_world_two_follows_world_one(ranks):
    """Two ranks with one micro-batch read what one rank reads with two: the curves agree within the band."""
    two = losses(ranks.run(curve, Stretch(SHORT, offload=False)))
    alone = ranks.run(alone_on_rank_zero, Case(**{**vars(SHORT), "accumulate": 2})).values[0]
    assert len(two) == len(alone) == SHORT.steps
    assert max(abs(a - b) for a, b in zip(two, alone, strict=True)) < BAND
    assert two[0] == pytest.approx(alone[0], abs=1e-6)


def alone_on_rank_zero(context, case):
    """Worker: the case as the only rank of world 1; every rank does the same, so averaging changes no gradient."""
    run = Run(case, 0, 1, context.device, offload=False)
    return [run.update(step).item() for step in range(case.steps)]

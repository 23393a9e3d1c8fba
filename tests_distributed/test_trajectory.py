"""End to end: a small GPT on real text, its loss curve resident against offloaded, and across a checkpoint."""

from __future__ import annotations

from dataclasses import replace

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


def fused_from_plain(ranks, tmp_path):
    """A plain resident run's file, continued by the fused kernels: offloaded as resident, to the bit."""
    path, half = str(tmp_path / "half.pt"), SHORT.steps // 2
    plain, fused = (replace(SHORT, optimizer={"fused": fused}) for fused in (False, True))
    ranks.run(curve, Stretch(plain, False, save=path, save_at=half))
    resident, offloaded = (ranks.run(curve, Stretch(fused, live, resume=path)) for live in (False, True))
    assert losses(resident) == losses(offloaded)
    for (_, one), (_, other) in zip(resident.values, offloaded.values, strict=True):
        one.pop("residency"), other.pop("residency")
        identical(one, other).check()


@pytest.mark.gpu2
def test_fused_continues_plain_on_two_gpus(ranks, tmp_path):
    """The paths read each other's checkpoints, and after that offload still changes no bit."""
    fused_from_plain(ranks, tmp_path)


def two_and_one(ranks, offload):
    """Two ranks with one micro-batch read what one rank reads with two: the curves agree within the band."""
    two = losses(ranks.run(curve, Stretch(SHORT, offload)))
    alone = ranks.run(alone_on_rank_zero, replace(SHORT, accumulate=2), offload).values[0]
    assert len(two) == len(alone) == SHORT.steps
    check_band(two, alone)
    assert two[0] == pytest.approx(alone[0], abs=1e-6)


def check_band(one, other):
    """The curves are as close as another order of adding lets them be."""
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < BAND


def alone_on_rank_zero(context, case, offload, resume=None):
    """Worker: the case as the only rank of world 1; every rank does the same, so averaging changes no gradient."""
    run = Run(case, 0, 1, context.device, offload)
    first = run.load(resume) if resume else 0
    return [run.update(step).item() for step in range(first, case.steps)]


@pytest.mark.gloo2
def test_world_two_follows_world_one(ranks):
    """The same global batch on one and on two CPU ranks."""
    two_and_one(ranks, offload=False)


@pytest.mark.gpu2
@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
def test_world_two_follows_world_one_on_gpus(ranks, offload):
    """The same global batch on one and on two GPUs."""
    two_and_one(ranks, offload)


def another_world(ranks, tmp_path, offload):
    """A file of two ranks continues on one with the same global batch: the rest of the curve stays within the band."""
    path, half = str(tmp_path / "half.pt"), SHORT.steps // 2
    two = losses(ranks.run(curve, Stretch(SHORT, offload, save=path, save_at=half)))
    rest = ranks.run(alone_on_rank_zero, replace(SHORT, accumulate=2), offload, path).values[0]
    check_band(two[half:], rest)
    assert two[half] == pytest.approx(rest[0], abs=1e-6)


@pytest.mark.gloo2
def test_another_world_size_continues_on_the_cpu(ranks, tmp_path):
    """World 2's checkpoint is no different from world 1's: every rank holds all of the state."""
    another_world(ranks, tmp_path, offload=False)


@pytest.mark.gpu2
@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
def test_another_world_size_continues_on_gpus(ranks, tmp_path, offload):
    """World 2's checkpoint is no different from world 1's: every rank holds all of the state."""
    another_world(ranks, tmp_path, offload)

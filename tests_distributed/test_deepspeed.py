"""DeepSpeed ZeRO 1 to 3: with offload off it trains and resumes; with offload it is refused."""

from __future__ import annotations

import pytest

from support.zero import STEPS, TAIL, refusals, train_and_resume, without_wrapper

STAGES = [pytest.param(stage, id=f"zero{stage}") for stage in (1, 2, 3)]


@pytest.fixture
def zero_ranks(ranks):
    """Ranks of this test alone: DeepSpeed patches the process that imports it."""
    return ranks.options(fresh=True, timeout=240)


def final(losses):
    """The mean of the last losses: one batch's loss differs more from the next than the optimizers do."""
    return sum(losses[-TAIL:]) / TAIL


def check_training(zero_ranks, folder, stage):
    """The final loss is within 1% of the run without ZeRO, and the resumed half repeats the first to the bit."""
    plain = zero_ranks.run(without_wrapper).values
    for alone, (whole, again) in zip(plain, zero_ranks.run(train_and_resume, stage, folder).values, strict=True):
        assert len(whole) == STEPS
        assert final(whole) == pytest.approx(final(alone), rel=0.01)
        assert final(whole) < whole[0] - 2.0
        assert again == whole[STEPS // 2 :]


def check_refusals(zero_ranks, stage):
    """Offload is refused with `ownership` and stays off; GefenMuon says that it needs matrices and ZeRO has none."""
    for code, message, active, muon in zero_ranks.run(refusals, stage).values:
        assert code == "ownership", message
        assert not active
        assert "2-D" in muon
        assert "ZeRO" in muon


@pytest.mark.gloo2
@pytest.mark.parametrize("stage", STAGES)
def test_trains_and_resumes_on_the_cpu(zero_ranks, tmp_path, stage):
    """On two CPU ranks Gefen trains under ZeRO as it does without it."""
    check_training(zero_ranks, str(tmp_path), stage)


@pytest.mark.gpu2
@pytest.mark.parametrize("stage", STAGES)
def test_trains_and_resumes_on_gpus(zero_ranks, tmp_path, stage):
    """On two GPUs Gefen trains under ZeRO as it does without it."""
    check_training(zero_ranks, str(tmp_path), stage)


@pytest.mark.gloo2
@pytest.mark.parametrize("stage", STAGES)
def test_refusals_on_the_cpu(zero_ranks, stage):
    """ZeRO replaces the parameter groups: offload says so before it says that they are on the CPU."""
    check_refusals(zero_ranks, stage)


@pytest.mark.gpu2
@pytest.mark.parametrize("stage", STAGES)
def test_refusals_on_gpus(zero_ranks, stage):
    """ZeRO replaces the parameter groups: offload and GefenMuon say so."""
    check_refusals(zero_ranks, stage)

"""DeepSpeed ZeRO 1 to 3: with offload off it trains and resumes; with offload it is refused."""

from __future__ import annotations

import pytest

from support.zero import STEPS, TAIL, train_and_resume, without_wrapper

# DeepSpeed keeps its process group and the group's sockets for as long as its process lives, which is this test.
pytestmark = pytest.mark.filterwarnings("ignore:.*left behind:pytest.PytestWarning")
STAGES = [pytest.param(stage, id=f"zero{stage}") for stage in (1, 2, 3)]


@pytest.fixture
def zero_ranks(ranks):
    """Ranks of this test alone: DeepSpeed patches the process that imports it."""
    return ranks.options(fresh=True, timeout=240)


def final(losses):
    """The mean of the last losses: one batch's loss differs more from the next than the optimizers do."""
    return sum(losses[-TAIL:]) / TAIL


def check(zero_ranks, folder, stage):
    """The final loss is within 1% of the run without ZeRO, the resumed half repeats the first, offload is refused."""
    plain = zero_ranks.run(without_wrapper).values
    for alone, seen in zip(plain, zero_ranks.run(train_and_resume, stage, folder).values, strict=True):
        assert len(seen.whole) == STEPS
        assert final(seen.whole) == pytest.approx(final(alone), rel=0.01)
        assert final(seen.whole) < seen.whole[0] - 2.0
        assert seen.again == seen.whole[STEPS // 2 :]
        assert seen.code == "ownership", seen.message
        assert not seen.active
        assert "2-D" in seen.muon
        assert "ZeRO" in seen.muon


@pytest.mark.gloo2
@pytest.mark.parametrize("stage", STAGES)
def test_trains_and_resumes_on_the_cpu(zero_ranks, tmp_path, stage):
    """Gefen trains under ZeRO as without it; offload says `ownership` before the device, GefenMuon that it sees 1-D."""
    check(zero_ranks, str(tmp_path), stage)


@pytest.mark.gpu2
@pytest.mark.parametrize("stage", STAGES)
def test_trains_and_resumes_on_gpus(zero_ranks, tmp_path, stage):
    """The same on two GPUs."""
    check(zero_ranks, str(tmp_path), stage)

"""DeepSpeed ZeRO 1 to 3: with offload off it trains and resumes; with offload it is refused."""

from __future__ import annotations

import pytest

from support.zero import STEPS, TAIL, train_with_each

# DeepSpeed keeps its process group and the group's sockets for as long as its process lives, which is this test.
pytestmark = pytest.mark.filterwarnings("ignore:.*left behind:pytest.PytestWarning")
STAGES = (1, 2, 3)


@pytest.fixture
def zero_ranks(ranks):
    """Ranks of this test alone: DeepSpeed patches the process that imports it."""
    return ranks.options(fresh=True, timeout=240)


def final(losses):
    """The mean of the last losses: one batch's loss differs more from the next than the optimizers do."""
    return sum(losses[-TAIL:]) / TAIL


def check(zero_ranks, folder):
    """The final loss is within 1% of the run without ZeRO, the resumed half repeats the first, offload is refused."""
    for plain, stages in zero_ranks.run(train_with_each, STAGES, folder).values:
        for stage, seen in zip(STAGES, stages, strict=True):
            assert len(seen.whole) == STEPS, stage
            assert final(seen.whole) == pytest.approx(final(plain), rel=0.01), stage
            assert final(seen.whole) < seen.whole[0] - 2.0, stage
            assert seen.again == seen.whole[STEPS // 2 :], stage
            assert seen.code == "ownership", (stage, seen.message)
            assert not seen.active, stage
            assert "2-D" in seen.muon, stage
            assert "ZeRO" in seen.muon, stage


@pytest.mark.gloo2
def test_trains_and_resumes_on_the_cpu(zero_ranks, tmp_path):
    """Gefen trains under ZeRO as without it; offload says `ownership` before the device, GefenMuon that it sees 1-D."""
    check(zero_ranks, str(tmp_path))


@pytest.mark.gpu2
def test_trains_and_resumes_on_gpus(zero_ranks, tmp_path):
    """The same on two GPUs."""
    check(zero_ranks, str(tmp_path))

"""Which tiers run side by side, and on how many processes."""

from __future__ import annotations

import threading

import pytest

from gefen_offload.gate import run, schedule
from gefen_offload.gate.schedule import Turn

TIERS = ("cpu", "gloo2", "gloo4", "gpu1", "gpu2", "gpu4")


def test_two_lanes_where_there_is_room():
    """A box with GPUs runs the tiers that need none beside those that do, on half of its cores."""
    plain, accelerated = schedule.lanes(TIERS, cores=32, gpus=4)
    assert plain == (Turn("cpu", 16, threads=1), Turn("gloo2", 4), Turn("gloo4", 2))
    assert accelerated == (Turn("gpu1", 4), Turn("gpu2", 2), Turn("gpu4", 1))


def test_one_lane_where_there_is_none():
    """With few cores, tiers follow one another: nothing runs beside tests that have deadlines."""
    (lane,) = schedule.lanes(TIERS[:5], cores=4, gpus=2)
    assert [turn.tier for turn in lane] == list(TIERS[:5])
    assert lane[0] == Turn("cpu", 4, threads=1)


@pytest.mark.parametrize("cores", [1, 2, 8, 64])
def test_a_machine_without_gpus_has_one_lane(cores):
    """Without GPUs all cores go to the one tier that runs."""
    (lane,) = schedule.lanes(TIERS[:3], cores, gpus=0)
    assert lane[0].workers == cores


def test_without_xdist_every_tier_is_one_process():
    """An interpreter without pytest-xdist still runs the lanes side by side, each tier in one process."""
    lanes = schedule.lanes(TIERS, cores=32, gpus=4, spread=False)
    assert [turn.workers for lane in lanes for turn in lane] == [1] * 6
    assert len(lanes) == 2


def test_nothing_due_is_no_lane():
    """No tier, no lane."""
    assert schedule.lanes((), cores=8, gpus=2) == ()


def test_lanes_really_run_at_the_same_time():
    """Two lanes meet at a barrier that one alone would never pass."""
    meet = threading.Barrier(2, timeout=20)

    def lane(turns):
        meet.wait()
        return list(turns)

    assert run.side_by_side((("a",), ("b", "c")), lane, threading.Event()) == ["a", "b", "c"]


@pytest.mark.parametrize("order", [1, -1], ids=["first", "second"])
def test_a_lane_that_breaks_ends_the_other(order):
    """An error in one lane reaches the caller at once, and the other lane is told to stop."""
    stopping, told = threading.Event(), []

    def lane(turns):
        if turns == ("broken",):
            raise OSError("no space left")
        told.append(stopping.wait(20))
        return []

    with pytest.raises(OSError, match="no space left"):
        run.side_by_side((("broken",), ("other",))[::order], lane, stopping)
    assert told == [True]

"""Mistakes planted in the engine's ordering are each seen: the simulated accelerator is not blind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gefen_offload import OffloadPolicy
from gefen_offload.offload import windows
from gefen_offload.offload.engine import Engine
from gefen_offload.offload.turns import take_turns
from gefen_offload.ranks import identical
from support.simulated import COMPUTE, Sabotage, Schedule, SimulatedAccelerator, simulated
from support.streamed import Row, run

pytestmark = pytest.mark.filterwarnings("ignore:the optimizer state of .* is not finite")

CPU = torch.device("cpu")
INWARD, OUTWARD = 0, 1  # the engine makes them in this order
ROW = Row("race", steps=4, policy=OffloadPolicy(staging_bytes=300))


def offloaded(sabotage=None, row=ROW, schedule=Schedule.LATE):
    """The offloaded run under this sabotage."""
    accelerator = SimulatedAccelerator(schedule)
    accelerator.sabotage = sabotage or Sabotage()
    with simulated(accelerator):
        return run(row, CPU, offload=True)


@pytest.fixture(scope="module")
def resident():
    """The run without offload."""
    return run(ROW, CPU, offload=False)


@pytest.mark.parametrize("schedule", list(Schedule), ids=lambda schedule: schedule.value)
def test_without_sabotage_nothing_differs(resident, schedule):
    """The clean twin of every race below."""
    identical(resident, offloaded(schedule=schedule)).check()


@pytest.mark.parametrize(
    ("waiting", "recording"),
    [
        pytest.param(COMPUTE, INWARD, id="update-before-copy-in"),
        pytest.param(OUTWARD, COMPUTE, id="copy-out-before-update"),
        pytest.param(INWARD, OUTWARD, id="copy-in-before-copy-out"),
    ],
)
def test_a_missing_wait_is_seen(resident, waiting, recording):
    """Each of the three waits between the streams matters."""
    assert not identical(resident, offloaded(Sabotage(lost_waits={(waiting, recording)})))


def test_memory_reused_too_early_is_seen(resident, monkeypatch):
    """A window that waits for the one before the last in its bytes overwrites what is still in use: 0xFF is read."""

    def early(turn):
        return replace(turn, stretches=tuple(replace(s, after=max(-1, s.after - 1)) for s in turn.stretches))

    monkeypatch.setattr(windows, "take_turns", lambda *arguments: list(map(early, take_turns(*arguments))))
    assert not identical(resident, offloaded())


@pytest.mark.parametrize("inward", [True, False], ids=["copy-in", "copy-out"])
def test_a_copy_on_the_wrong_stream_is_seen(resident, inward):
    """A copy that is queued on the other direction's stream escapes the events that order it."""
    sabotage = Sabotage(
        redirect=lambda copy: (OUTWARD if inward else INWARD) if copy.inward is inward and copy.number > 20 else None
    )
    assert not identical(resident, offloaded(sabotage))


def test_a_dropped_copy_back_is_seen(resident):
    """A single window's update that never reaches the host changes what the next step starts from."""
    lost = []

    def lose(copy):
        if not lost and not copy.inward and copy.number > 20:
            lost.append(copy.number)
        return copy.number in lost

    assert not identical(resident, offloaded(Sabotage(lost_copies=lose)))
    assert lost


def test_reading_before_the_last_copy_back_is_seen(resident, monkeypatch):
    """Without waiting for deferred write-back, the state that is read is the one before the step."""
    row = Row("race", steps=4, policy=OffloadPolicy(staging_bytes=300, deferred=True))
    identical(resident, offloaded(row=row)).check()
    monkeypatch.setattr(Engine, "settle", lambda engine: None)
    assert not identical(resident, offloaded(row=row))

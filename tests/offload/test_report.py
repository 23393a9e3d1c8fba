"""The plan before, and the report after, are plain frozen values that fit on a screen."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

from gefen_offload import Gefen, OffloadPolicy
from support.simulated import Fault, SimulatedAccelerator, simulated
from support.streamed import Row, Training

CPU = torch.device("cpu")
ROW = Row("report", policy=OffloadPolicy(staging_bytes=700))


@pytest.fixture
def accelerator():
    """The simulated accelerator, in place for the whole test."""
    with simulated(SimulatedAccelerator()) as accelerator:
        yield accelerator


def test_a_plan_before_the_first_step_is_an_estimate(monkeypatch):
    """About a byte an element, times the ranks of the node; nothing is measured without a link."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    optimizer = Gefen([("weight", nn.Parameter(torch.randn(1000, 1000)))])
    plan = optimizer.state_offload_plan()
    assert plan.estimated
    assert plan.elements == 10**6
    assert 10**6 <= plan.state_bytes < 1.05 * 10**6
    assert plan.node_host_bytes == 4 * plan.state_bytes
    assert plan.seconds_per_step is None
    assert "estimated" in str(plan)


def test_a_plan_after_a_step_is_exact():
    """The bytes of the state that there is."""
    training = Training(ROW, CPU)
    training.step(0, False)
    tensors = [t for s in training.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    plan = training.optimizer.state_offload_plan(OffloadPolicy(staging_bytes=100, pinned=False))
    assert plan.state_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert plan.freed_bytes == plan.state_bytes - 300
    assert plan.pinned_bytes == 0


def test_a_report_says_what_was_moved(accelerator):
    """Bytes and seconds for each direction, windows, staging, pinned memory; and it waits for what is under way."""
    training = Training(replace(ROW, policy=replace(ROW.policy, deferred=True)), CPU)
    for step in range(3):
        training.step(step, True)
    report = training.optimizer.state_offload_report()
    assert not training.optimizer._offload.engine.pending
    assert report.active
    assert report.steps == 3
    assert report.windows >= 6
    assert report.to_device.rate > 0
    assert report.to_host.seconds > 0
    assert report.pinned_reserved >= report.pinned_asked > 0
    assert report.pageable == 0
    assert 4 < len(str(report).splitlines()) < 25
    with pytest.raises(FrozenInstanceError):
        report.steps = 4


def test_pageable_memory_is_reported(accelerator):
    """Without pinning the report says so."""
    training = Training(replace(ROW, policy=replace(ROW.policy, pinned=False)), CPU)
    training.step(0, True)
    report = training.optimizer.state_offload_report()
    assert report.pinned_asked == 0
    assert report.pageable > 0
    assert "pageable" in str(report)


def test_a_report_while_off_says_so(accelerator):
    """Off, or off and poisoned."""
    training = Training(ROW, CPU)
    training.step(0, True)
    accelerator.fault = Fault(accelerator.copies + 5, on_arrival=True)
    with pytest.raises(RuntimeError):
        training.step(1, True)
    training.optimizer.restore_state_()
    report = training.optimizer.state_offload_report()
    assert not report.active
    assert str(report).startswith("offload is off; poisoned")
    assert str(Training(ROW, CPU).optimizer.state_offload_report()) == "offload is off"


@pytest.mark.parametrize("wrong", [{"staging_bytes": 0}, {"staging_bytes": 1.5}, {"verify_seconds": 0}], ids=str)
def test_a_policy_checks_its_numbers(wrong):
    """A number out of range is named."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OffloadPolicy(**wrong)


def test_the_attributes_follow(accelerator):
    """`state_offload_active`, `_device` and `_poisoned` tell where the state is."""
    optimizer = Training(ROW, CPU).optimizer
    assert (optimizer.state_offload_active, optimizer.state_offload_device) == (False, None)
    optimizer.offload_state_()
    assert (optimizer.state_offload_active, optimizer.state_offload_device) == (True, torch.device("cpu"))
    assert not optimizer.state_offload_poisoned
    with pytest.raises(RuntimeError, match="restore_state_"):
        optimizer.move_state_()
    optimizer.restore_state_()
    optimizer.restore_state_()
    assert not optimizer.state_offload_active
    with pytest.raises(ValueError, match="meta"):
        optimizer.move_state_("meta")

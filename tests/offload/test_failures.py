"""Whichever copy fails, a transition leaves everything as it was, and a step either does so too or poisons."""

from __future__ import annotations

import copy

import pytest
import torch

from gefen_offload import OffloadPolicy
from gefen_offload.offload.errors import OffloadPoisonedError
from gefen_offload.ranks import identical
from support.simulated import Fault, InjectedError, SimulatedAccelerator, simulated
from support.streamed import SHAPES, Row, run
from support.witness import Witness, bits, trained

CPU = torch.device("cpu")
ROW = Row("failures", steps=6, groups=True, policy=OffloadPolicy(staging_bytes=500))
MOMENT = pytest.mark.parametrize("on_arrival", [False, True], ids=["queued", "on-its-way"])


@pytest.fixture
def accelerator():
    """The simulated accelerator, in place for the whole test."""
    with simulated(SimulatedAccelerator()) as accelerator:
        yield accelerator


def copies_of(accelerator, operation):
    """How many copies an operation takes."""
    before = accelerator.copies
    operation()
    return accelerator.copies - before


def fails(operation):
    """Whether the operation raises the injected error; the error, which holds what it saw, is gone afterwards."""
    try:
        operation()
    except InjectedError:
        return True
    return False


def fail_each_copy(accelerator, optimizer, operation, count, on_arrival):
    """The operation fails at each of its copies, one a state tensor at least, in turn, and changes nothing."""
    assert count >= 3 * (len(SHAPES) - 1)
    witness = Witness(optimizer, accelerator)
    for index in range(count):
        accelerator.fault = Fault(accelerator.copies + index, on_arrival)
        assert fails(operation), f"copy {index} of {count} did not fail"
        witness.check()
    accelerator.fault = None


def finish_like_resident(training, first, offload):
    """The rest of the run equals the resident run."""
    seen = [training.step(step, offload) for step in range(first, ROW.steps)]
    end = {"state": training.optimizer.state_dict()}
    identical(run(ROW, CPU, offload=False)[first:], [*seen, end]).check()


@MOMENT
def test_activation(accelerator, on_arrival):
    """Every copy to the host can fail; then activation works, and the run goes on as the resident one."""
    training = trained(ROW, CPU, 2, offload=False)
    activate = lambda: training.optimizer.offload_state_(policy=ROW.policy)  # noqa: E731
    count = copies_of(accelerator, activate)
    training.optimizer.restore_state_()
    fail_each_copy(accelerator, training.optimizer, activate, count, on_arrival)
    activate()
    finish_like_resident(training, 2, offload=True)


@MOMENT
def test_restoration(accelerator, on_arrival):
    """Every copy back can fail; the state is still offloaded then."""
    training = trained(ROW, CPU, 2, offload=True)
    count = copies_of(accelerator, training.optimizer.restore_state_)
    training.optimizer.offload_state_(policy=ROW.policy)
    fail_each_copy(accelerator, training.optimizer, training.optimizer.restore_state_, count, on_arrival)
    training.optimizer.restore_state_()
    finish_like_resident(training, 2, offload=False)


@MOMENT
def test_move(accelerator, on_arrival):
    """Every copy of a move can fail, the shared codebook's too; the state is still where it was."""
    training = trained(ROW, CPU, 2, offload=False)
    optimizer = training.optimizer

    def strand():
        accelerator.stranded = {
            id(t) for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
        }
        accelerator.stranded |= {id(t) for t in optimizer._shared_tensors().values()}

    strand()
    count = copies_of(accelerator, optimizer.move_state_)
    assert count >= 3 * (len(SHAPES) - 1) + 1
    strand()
    fail_each_copy(accelerator, optimizer, optimizer.move_state_, count, on_arrival)
    optimizer.move_state_()
    finish_like_resident(training, 2, offload=False)


@MOMENT
def test_load(accelerator, on_arrival):
    """Every copy of a checkpoint can fail; the live state, groups and codebook stay."""
    saved = trained(ROW, CPU, 2, offload=False).optimizer.state_dict()
    training = trained(ROW, CPU, 3, offload=True)
    load = lambda: training.optimizer.load_state_dict(saved)  # noqa: E731
    live = copy.deepcopy(training.optimizer.state_dict())
    count = copies_of(accelerator, load)
    training.optimizer.load_state_dict(live)
    fail_each_copy(accelerator, training.optimizer, load, count, on_arrival)


@pytest.mark.parametrize("operation", ["offload", "restore", "load"])
def test_memory_that_runs_out(accelerator, operation):
    """Whichever allocation of a transition fails, nothing has changed."""
    training = trained(ROW, CPU, 2, offload=operation != "offload")
    optimizer = training.optimizer
    saved = copy.deepcopy(optimizer.state_dict())
    run_it = {
        "offload": lambda: optimizer.offload_state_(policy=ROW.policy),
        "restore": optimizer.restore_state_,
        "load": lambda: optimizer.load_state_dict(saved),
    }[operation]
    witness = Witness(optimizer, accelerator)
    for index in range(200):
        accelerator.allocation_fails_at = accelerator.allocations + index
        if not fails(run_it):
            break
        witness.check()
    assert 0 < index < 199


@MOMENT
@pytest.mark.parametrize("deferred", [False, True], ids=["waiting", "deferred"])
def test_step(accelerator, on_arrival, deferred):
    """A copy that fails before the first update changes nothing; a later one poisons until a checkpoint is loaded."""
    row = Row("failures", steps=6, policy=OffloadPolicy(staging_bytes=500, deferred=deferred))
    training = trained(row, CPU, 2, offload=True)
    optimizer = training.optimizer
    good, values = copy.deepcopy(optimizer.state_dict()), bits(optimizer)["parameters"]
    count = copies_of(accelerator, lambda: (training.step(2, True), optimizer.state_dict()))
    outcomes = []
    for index in range(count):
        with torch.no_grad():
            for parameter, value in zip(training.named.values(), values, strict=True):
                parameter.copy_(value)
        accelerator.fault = None
        optimizer.load_state_dict(good)
        before = bits(optimizer)
        accelerator.fault = Fault(accelerator.copies + index, on_arrival)
        outcomes.append(fail_step(training, before))
    assert outcomes.index("poisoned") >= 1
    assert set(outcomes[outcomes.index("poisoned") :]) == {"poisoned"}


def fail_step(training, before):
    """One failing step: what came of it, checked."""
    optimizer = training.optimizer
    with pytest.raises((OffloadPoisonedError, InjectedError)) as caught:
        (training.step(2, True), optimizer.state_dict())
    if isinstance(caught.value, InjectedError):
        assert not optimizer.state_offload_poisoned
        identical(before["parameters"], bits(optimizer)["parameters"]).check()
        identical(before["state"], bits(optimizer)["state"]).check()
        return "unchanged"
    assert "copy" in str(caught.value.__cause__)
    assert any(name in str(caught.value) for name in training.named)
    assert optimizer.state_offload_poisoned
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(OffloadPoisonedError, match="load a known-good checkpoint"):
            refused()
    return "poisoned"

"""When state and parameters may no longer match, the optimizer says so until a known-good checkpoint is loaded."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from gefen_offload import OffloadPolicy, OffloadReason, OffloadUnsupportedError
from gefen_offload.offload import engine
from gefen_offload.offload.errors import OffloadPoisonedError
from gefen_offload.ranks import identical
from support.simulated import Fault, InjectedError, SimulatedAccelerator, simulated
from support.streamed import Row, Training, run
from support.witness import Witness, bits

CPU = torch.device("cpu")
FAILURE = RuntimeError("the kernel failed")
POLICY = OffloadPolicy(staging_bytes=500)


@pytest.fixture
def accelerator():
    """The simulated accelerator, in place for the whole test."""
    with simulated(SimulatedAccelerator()) as accelerator:
        yield accelerator


def start(policy=POLICY, **options):
    """An offloaded optimizer after one step, and its checkpoint then."""
    training = Training(Row("poison", policy=policy, **options), CPU)
    training.step(0, True)
    return training, copy.deepcopy(training.optimizer.state_dict())


def poison(training, error=FAILURE, window=2):
    """A step whose update fails in a window."""
    optimizer, calls, update = training.optimizer, [], training.optimizer._update

    def fail(staged):
        calls.append(len(staged))
        if len(calls) == window:
            raise error
        update(staged)

    optimizer._update = fail
    try:
        training.step(1, True)
    finally:
        del optimizer._update


@pytest.mark.parametrize("deferred", [False, True], ids=["waiting", "deferred"])
def test_an_interruption_before_the_count_poisons(accelerator, monkeypatch, deferred):
    """Between the last launch and the step counters state and parameters do not match; a load mends that."""
    training, saved = start(OffloadPolicy(staging_bytes=500, deferred=deferred))
    optimizer = training.optimizer

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_count", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.step(1, True)
    assert optimizer.state_offload_poisoned
    for operation in (optimizer.step, optimizer.state_dict):
        with pytest.raises(OffloadPoisonedError, match="after parameters had changed, before it was counted"):
            operation()
    optimizer.load_state_dict(saved)
    assert not optimizer.state_offload_poisoned
    training.step(1, True)
    assert not optimizer.state_offload_poisoned


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_failing_update_poisons(accelerator, window):
    """Whichever window fails, `step` and `state_dict` raise, naming a parameter of it and the cause."""
    training, _ = start()
    with pytest.raises(OffloadPoisonedError, match="RuntimeError: the kernel failed") as caught:
        poison(training, window=window)
    assert any(name in str(caught.value) for name in training.named)
    assert training.optimizer.state_offload_poisoned
    for operation in (training.optimizer.step, training.optimizer.state_dict):
        with pytest.raises(OffloadUnsupportedError) as caught:
            operation()
        assert caught.value.reason is OffloadReason.POISONED
    assert "the kernel failed" in training.optimizer.state_offload_report().poisoned


def test_an_interruption_poisons_and_stays_itself(accelerator):
    """Ctrl-C between two windows leaves state and parameters apart; the interruption itself goes on."""
    training, _ = start()
    with pytest.raises(KeyboardInterrupt):
        poison(training, KeyboardInterrupt())
    assert training.optimizer.state_offload_poisoned


def test_a_second_interruption_does_not_hide_the_poison(accelerator, monkeypatch):
    """Ctrl-C again while the engine waits for what is in flight: parameters have changed all the same."""

    def interrupted(*streams):
        raise KeyboardInterrupt("again")

    training, _ = start()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            poison(training, KeyboardInterrupt("once"))
    assert training.optimizer.state_offload_poisoned


def fail_on_sparse(training, accelerator):
    parameter = training.named["wide"]
    parameter.grad = torch.zeros(12, 40).to_sparse()
    training.optimizer.step()


def fail_in_closure(training, accelerator):
    training.optimizer.step(lambda: 1 / 0)


def fail_on_memory(training, accelerator):
    training.optimizer._offload.engine.staging = type(training.optimizer._offload.engine.staging)()
    training.optimizer._offload.engine.forget_plans()
    accelerator.allocation_fails_at = accelerator.allocations
    training.step(1, True)


def fail_on_first_copy(training, accelerator):
    accelerator.fault = Fault(accelerator.copies)
    training.step(1, True)


@pytest.mark.parametrize("failure", [fail_on_sparse, fail_in_closure, fail_on_memory, fail_on_first_copy])
def test_a_failure_before_the_first_mutation_does_not_poison(accelerator, failure):
    """Nothing has changed, and the run goes on as if the failed step had not been tried."""
    training, _ = start()
    before = bits(training.optimizer)
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        failure(training, accelerator)
    accelerator.fault = None
    identical(before, bits(training.optimizer)).check()
    again = [training.step(step, True) for step in range(1, 4)]
    identical(run(training.row, CPU, offload=False)[1:4], again).check()


@pytest.mark.parametrize("restored", [False, True], ids=["offloaded", "restored"])
def test_a_committed_load_clears_it(accelerator, restored):
    """A good checkpoint ends the poison, offload on or off, and the run goes on from there."""
    training, good = start()
    values = [p.detach().clone() for p in training.named.values()]
    with pytest.raises(OffloadPoisonedError):
        poison(training)
    if restored:
        training.optimizer.restore_state_()
        assert training.optimizer.state_offload_poisoned
        for operation in (training.optimizer.step, training.optimizer.state_dict, training.optimizer.offload_state_):
            with pytest.raises(OffloadPoisonedError):
                operation()
    training.optimizer.load_state_dict(good)
    with torch.no_grad():
        for parameter, value in zip(training.named.values(), values, strict=True):
            parameter.copy_(value)
    assert not training.optimizer.state_offload_poisoned
    again = [training.step(step, not restored) for step in range(1, 4)]
    identical(run(training.row, CPU, offload=False)[1:4], again).check()


def test_a_failed_load_does_not_clear_it(accelerator):
    """A checkpoint that is refused leaves the poison."""
    training, good = start()
    with pytest.raises(OffloadPoisonedError):
        poison(training)
    witness = Witness(training.optimizer, accelerator)
    del good["state"][0]["m_codebook"]
    with pytest.raises(ValueError, match="m_codebook"):
        training.optimizer.load_state_dict(good)
    witness.check()


def test_a_failure_before_the_first_mutation_is_raised_as_it_is(accelerator):
    """Nothing is wrapped around it, and nothing keeps its frames, with their gradients, after it was handled."""
    training, _ = start()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(InjectedError) as caught:
            fail_on_memory(training, accelerator)
        assert caught.value.__context__ is None
        gone = weakref.ref(caught.value)
        del caught
        assert gone() is None
    finally:
        gc.enable()


READERS = {
    "step": lambda training: training.step(2, True),
    "state_dict": lambda training: training.optimizer.state_dict(),
    "restore": lambda training: training.optimizer.restore_state_(),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_deferred_failure_is_found_by_the_next_reader(accelerator, reader):
    """A copy back that fails after `step` returned poisons when somebody first asks."""
    training, _ = start(OffloadPolicy(staging_bytes=2**20, deferred=True))
    accelerator.fault = Fault(accelerator.copies + 1, on_arrival=True)
    training.step(1, True)
    with pytest.raises(OffloadPoisonedError, match="failed on its way"):
        READERS[reader](training)
    assert training.optimizer.state_offload_poisoned


@pytest.mark.parametrize("reader", ["report", "load"])
def test_a_deferred_failure_does_not_stop_what_can_live_with_it(accelerator, reader):
    """A report tells it; a load replaces what it spoilt."""
    training, good = start(OffloadPolicy(staging_bytes=2**20, deferred=True))
    accelerator.fault = Fault(accelerator.copies + 1, on_arrival=True)
    training.step(1, True)
    if reader == "report":
        assert "failed on its way" in training.optimizer.state_offload_report().poisoned
    else:
        training.optimizer.load_state_dict(good)
        assert not training.optimizer.state_offload_poisoned
        identical(good, training.optimizer.state_dict()).check()

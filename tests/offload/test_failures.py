"""Whichever copy fails, a transition leaves everything as it was, and a step either does so too or poisons."""

from __future__ import annotations

import copy

import pytest
import torch

from gefen_offload import OffloadPolicy
from gefen_offload.offload.errors import OffloadPoisonedError
from gefen_offload.ranks import identical
from support.failing import FailingCuda
from support.simulated import Fault, InjectedError, SimulatedAccelerator, simulated
from support.solved import solving_once
from support.streamed import SHAPES, Row, on_cpu, run
from support.witness import Witness, bits, trained

CPU = torch.device("cpu")
ROW = Row("failures", steps=6, groups=True, policy=OffloadPolicy(staging_bytes=500))
TRANSITIONS = pytest.mark.parametrize("transition", ["activation", "restoration", "move", "load"])
ALLOCATING = pytest.mark.parametrize("transition", ["activation", "restoration", "load"])
MOMENT = pytest.mark.parametrize("on_arrival", [False, True], ids=["queued", "on-its-way"])
DEFERRED = pytest.mark.parametrize("deferred", [False, True], ids=["waiting", "deferred"])


# --- the tests, on the simulated accelerator and on a GPU -------------------------------------------------------------


@TRANSITIONS
@MOMENT
def test_copies(transition, on_arrival):
    """Every copy of a transition can fail, and nothing has changed; then it works, and the run goes on as it should."""
    with simulated(SimulatedAccelerator()) as accelerator:
        Transition(accelerator, CPU, transition).fail_each_copy(on_arrival)


@ALLOCATING
def test_memory_that_runs_out(transition):
    """Whichever allocation of a transition fails, nothing has changed."""
    with simulated(SimulatedAccelerator()) as accelerator:
        Transition(accelerator, CPU, transition).fail_each_allocation()


@MOMENT
@DEFERRED
def test_step(on_arrival, deferred):
    """A copy that fails before the first update changes nothing; a later one poisons until a checkpoint is loaded."""
    with simulated(SimulatedAccelerator()) as accelerator:
        outcomes = fail_each_copy_of_a_step(accelerator, CPU, on_arrival, deferred)
    first = outcomes.index("poisoned")
    assert first >= 1
    assert set(outcomes[first:]) == {"poisoned"}


@pytest.mark.gpu1
@TRANSITIONS
@MOMENT
def test_copies_on_a_gpu(ranks, transition, on_arrival):
    """The same on CUDA."""
    ranks.run(copies_on_a_gpu, transition, on_arrival)


@pytest.mark.gpu1
@ALLOCATING
def test_memory_that_runs_out_on_a_gpu(ranks, transition):
    """The same on CUDA."""
    ranks.run(allocations_on_a_gpu, transition)


@pytest.mark.gpu1
@MOMENT
@DEFERRED
def test_step_on_a_gpu(ranks, on_arrival, deferred):
    """The same on CUDA, where the host learns of a copy that failed on its way when the step has been queued."""
    outcomes = ranks.run(step_on_a_gpu, on_arrival, deferred).values[0]
    first = outcomes.index("poisoned")
    assert first == 0 if on_arrival else first >= 1
    assert set(outcomes[first:]) == {"poisoned"}


# --- in a rank --------------------------------------------------------------------------------------------------------


def copies_on_a_gpu(context, transition, on_arrival):
    """Worker."""
    with solving_once(), simulated(FailingCuda(context.device)) as accelerator:
        Transition(accelerator, context.device, transition).fail_each_copy(on_arrival)


def allocations_on_a_gpu(context, transition):
    """Worker."""
    with solving_once(), simulated(FailingCuda(context.device)) as accelerator:
        Transition(accelerator, context.device, transition).fail_each_allocation()


def step_on_a_gpu(context, on_arrival, deferred):
    """Worker."""
    with solving_once(), simulated(FailingCuda(context.device)) as accelerator:
        return fail_each_copy_of_a_step(accelerator, context.device, on_arrival, deferred)


# --- transitions ------------------------------------------------------------------------------------------------------


class Transition:
    """One of the four transitions, on an optimizer that has taken two steps; `take` can be repeated after `ready`."""

    def __init__(self, accelerator, device, name):
        self.accelerator, self.device, self.name = accelerator, device, name
        self.starts_offloaded = name in ("restoration", "load")
        self.ends_offloaded = name in ("activation", "load")
        self.training = trained(ROW, device, 2, offload=self.starts_offloaded)
        self.optimizer = self.training.optimizer
        self.saved, self.values = copy.deepcopy(self.optimizer.state_dict()), bits(self.optimizer)["parameters"]
        if name == "load":
            self.training.step(2, True)  # what is live differs from what is loaded
        self.take = {
            "activation": lambda: self.optimizer.offload_state_(policy=ROW.policy),
            "restoration": self.optimizer.restore_state_,
            "move": self.optimizer.move_state_,
            "load": lambda: self.optimizer.load_state_dict(self.saved),
        }[name]

    def ready(self):
        """Bring the optimizer to where the transition starts."""
        if self.name == "activation":
            self.optimizer.restore_state_()
        elif self.name == "restoration" and not self.optimizer.state_offload_active:
            self.optimizer.offload_state_(policy=ROW.policy)
        elif self.name == "move":
            strand(self.accelerator, self.optimizer)

    def fail_each_copy(self, on_arrival):
        """The transition fails at each of its copies in turn, one a state tensor at least, and changes nothing."""
        self.ready()
        before = self.accelerator.copies
        self.take()
        count = self.accelerator.copies - before
        assert count >= 3 * (len(SHAPES) - 1) + (self.name == "move")  # the shared codebook moves too
        self.ready()
        witness = Witness(self.optimizer, self.accelerator)
        for index in range(count):
            self.accelerator.fault = Fault(self.accelerator.copies + index, on_arrival)
            assert fails(self.take), f"copy {index} of {count} did not fail"
            witness.check()
        self.accelerator.fault = None
        self.take()
        self.finish_like_resident()

    def fail_each_allocation(self):
        """The transition fails at each of its allocations in turn, until it has none left, and changes nothing."""
        self.ready()
        witness = Witness(self.optimizer, self.accelerator)
        for index in range(200):
            self.accelerator.allocation_fails_at = self.accelerator.allocations + index
            if not fails(self.take):
                break
            witness.check()
        assert 0 < index < 199
        self.accelerator.allocation_fails_at = None
        self.finish_like_resident()

    def finish_like_resident(self):
        """The rest of the run equals the resident run."""
        assert self.optimizer.state_offload_active is self.ends_offloaded
        rewind(self.optimizer, self.saved, self.values)
        seen = [self.training.step(step, False) for step in range(2, ROW.steps)]
        end = on_cpu(self.optimizer.state_dict())
        identical(run(ROW, self.device, offload=False)[2:], [*seen, {"state": end}]).check()


def strand(accelerator, optimizer):
    """What a foreign mover does: every state tensor, the shared ones too, is not beside its parameter."""
    shared = optimizer._shared_tensors()
    if isinstance(accelerator, SimulatedAccelerator):
        accelerator.stranded = {id(t) for t in [*tensors_of(optimizer), *shared.values()]}
        return
    for entry in optimizer.state.values():
        entry.update({name: value.cpu() for name, value in entry.items() if isinstance(value, torch.Tensor)})
    optimizer._set_shared_tensors({name: tensor.cpu() for name, tensor in shared.items()})


def tensors_of(optimizer):
    """Every per-parameter tensor."""
    return [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]


def fails(operation):
    """Whether the operation raises the injected error; the error, which holds what it saw, is gone afterwards."""
    try:
        operation()
    except InjectedError:
        return True
    return False


# --- steps ------------------------------------------------------------------------------------------------------------


def fail_each_copy_of_a_step(accelerator, device, on_arrival, deferred):
    """What came of a step that fails at each of its copies in turn."""
    row = Row("failures", steps=6, policy=OffloadPolicy(staging_bytes=500, deferred=deferred))
    training = trained(row, device, 2, offload=True)
    optimizer = training.optimizer
    good, values = copy.deepcopy(optimizer.state_dict()), bits(optimizer)["parameters"]
    copies = accelerator.copies
    training.step(2, True), optimizer.state_dict()
    outcomes = []
    for index in range(accelerator.copies - copies):
        accelerator.fault = None
        rewind(optimizer, good, values)
        before = bits(optimizer)
        accelerator.fault = Fault(accelerator.copies + index, on_arrival)
        outcomes.append(fail_step(training, before))
    accelerator.fault = None
    rewind(optimizer, good, values)
    identical(
        run(row, device, offload=False)[2:-1], [training.step(step, True) for step in range(2, row.steps)]
    ).check()
    return outcomes


def rewind(optimizer, good, values):
    """The optimizer and its parameters as they were when `good` was saved."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(good)


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

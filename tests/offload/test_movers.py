"""What other code does to the state while offload is on is noticed before the next step changes anything."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict

import pytest
import torch

from gefen_offload import OffloadUnsupportedError
from gefen_offload.offload.anchors import anchor
from gefen_offload.offload.errors import OffloadCopyError
from gefen_offload.ranks import identical
from support.simulated import SimulatedAccelerator, simulated
from support.streamed import Row, Training, run
from support.witness import Witness

CPU = torch.device("cpu")
ROW = Row("movers", steps=5)


@pytest.fixture
def accelerator():
    """The simulated accelerator, in place for the whole test."""
    with simulated(SimulatedAccelerator()) as accelerator:
        yield accelerator


@pytest.fixture
def training(accelerator):
    """An offloaded optimizer after two steps."""
    training = Training(ROW, CPU)
    for step in range(2):
        training.step(step, True)
    return training


def new_dicts(optimizer):
    """As Lightning's optimizer_to_device: every entry is replaced by a dict of moved tensors."""
    for parameter, entry in list(optimizer.state.items()):
        optimizer.state[parameter] = {k: v.clone() if torch.is_tensor(v) else v for k, v in entry.items()}


def new_tensors(optimizer):
    """As trainers' loaders: every tensor is replaced in its dict."""
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if torch.is_tensor(value):
                entry[key] = value.clone()


def new_data(optimizer):
    """As older code: the tensors stay, their data is swapped."""
    for entry in optimizer.state.values():
        for value in entry.values():
            if torch.is_tensor(value):
                value.data = value.data.clone()


def new_state(optimizer):
    """The whole state is replaced."""
    state = defaultdict(dict)
    state.update({p: {k: copy.copy(v) for k, v in entry.items()} for p, entry in optimizer.state.items()})
    optimizer.state = state
    new_tensors(optimizer)


MOVERS = pytest.mark.parametrize("mover", [new_dicts, new_tensors, new_data, new_state])


def check_noticed(accelerator, training, mover):
    """The next step refuses with advice, and changes nothing."""
    mover(training.optimizer)
    witness = Witness(training.optimizer, accelerator)
    with pytest.raises(OffloadUnsupportedError, match=r"restore_state_\(\)") as caught:
        training.step(2, True)
    assert caught.value.reason.value == "moved"
    witness.check()


@MOVERS
def test_a_mover_is_noticed(accelerator, training, mover):
    """However state is moved, the next step refuses."""
    check_noticed(accelerator, training, mover)


@MOVERS
def test_a_mover_is_noticed_while_the_old_tensors_live(accelerator, training, mover):
    """Also while somebody still holds what was replaced."""
    held = [list(entry.values()) for entry in training.optimizer.state.values()]
    check_noticed(accelerator, training, mover)
    del held


@MOVERS
def test_restoration_adopts_what_was_moved(training, mover):
    """As the message says, restore_state_() takes the state as it is, and the run goes on."""
    mover(training.optimizer)
    training.optimizer.restore_state_()
    seen = [training.step(step, False) for step in range(2, ROW.steps)]
    identical(run(ROW, CPU, offload=False)[2:-1], seen).check()


def test_a_load_ends_it_too(training):
    """A checkpoint replaces moved state."""
    saved = training.optimizer.state_dict()
    new_tensors(training.optimizer)
    training.optimizer.load_state_dict(saved)
    seen = [training.step(step, True) for step in range(2, ROW.steps)]
    identical(run(ROW, CPU, offload=False)[2:-1], seen).check()


def test_state_that_was_only_regrouped_is_accepted(training):
    """New dicts around the same tensors are no move."""
    optimizer = training.optimizer
    for parameter, entry in list(optimizer.state.items()):
        optimizer.state[parameter] = dict(entry)
    seen = [training.step(step, True) for step in range(2, ROW.steps)]
    identical(run(ROW, CPU, offload=False)[2:-1], seen).check()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_a_copy_is_refused_while_offloaded(training, copied):
    """A copy would believe that it is resident: it is refused, with advice, and works after restoration."""
    with pytest.raises(OffloadCopyError, match=r"restore_state_\(\)"):
        copied(training.optimizer)
    training.optimizer.restore_state_()
    copied(training.optimizer)


def test_a_commit_replaces_and_never_rewrites(training):
    """Whoever holds the state from before a transition still sees what it was: the commit is one assignment."""
    optimizer = training.optimizer
    for transition in (optimizer.restore_state_, optimizer.offload_state_):
        held = optimizer.state
        seen = {parameter: dict(entry) for parameter, entry in held.items()}
        transition()
        assert optimizer.state is not held
        assert all(held[p][k] is v for p, entry in seen.items() for k, v in entry.items())


def test_a_restored_copy_can_be_offloaded(training):
    """A deep copy of a resident optimizer is an optimizer of its own, which offload accepts."""
    training.optimizer.restore_state_()
    other = copy.deepcopy(training.optimizer)
    assert not other.state_offload_active
    other.offload_state_()
    assert other.state_offload_active
    assert not training.optimizer.state_offload_active


def test_a_state_tensor_that_is_gone_is_noticed():
    """Also where an entry that is no tensor came in its place, so that there are as many as before."""
    parameter = torch.nn.Parameter(torch.ones(3))
    state = {parameter: {"m": torch.ones(3)}}
    seen = anchor([{"params": [parameter]}], state)
    assert seen.holds([parameter], state)
    del state[parameter]["m"]
    state[parameter]["note"] = 1
    assert not seen.holds([parameter], state)

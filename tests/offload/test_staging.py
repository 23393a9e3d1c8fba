"""Staged copies are checked before anything is committed."""

from __future__ import annotations

import pytest
import torch

from gefen_offload.offload.accelerator import PlainDevice, accelerator_for, transfer
from gefen_offload.offload.slab import HostMemory, HostStore
from gefen_offload.offload.staging import StagingError, replaced, stage_on_device, stage_on_host, validate
from support.simulated import Fault, InjectedError, SimulatedAccelerator

SOURCE = {"m": torch.arange(6, dtype=torch.uint8).view(3, 2), "v": torch.randn(3, 1), "none": torch.zeros(0, 4)}


def good():
    """A copy of SOURCE that is what it should be."""
    return {name: tensor.clone() for name, tensor in SOURCE.items()}


def test_a_good_copy_passes():
    """The clean twin of the rows below; zero-element tensors have no address to check."""
    validate([good()], [SOURCE])


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        pytest.param(lambda c: c.update(v=c["v"].double()), "float64", id="dtype"),
        pytest.param(lambda c: c.update(v=c["v"].view(1, 3)), r"\(1, 3\)", id="shape"),
        pytest.param(lambda c: c.update(v=c["v"].requires_grad_()), "gradient", id="gradient"),
        pytest.param(lambda c: c.update(m=torch.zeros(2, 3, dtype=torch.uint8).t()), "contiguous", id="strides"),
        pytest.param(lambda c: c.update(v=torch.zeros(9)[:3].view(3, 1)), "storage", id="part-of-a-storage"),
        pytest.param(lambda c: c.update(v=SOURCE["v"]), "shares", id="the-source-itself"),
        pytest.param(lambda c: c.update(v=c["v"].view(-1).view(torch.float32).view(3, 1)), None, id="view-of-all"),
    ],
)
def test_a_bad_copy_is_named(spoil, word):
    """Device, dtype, shape, layout, gradients and aliases are looked at, for each copy."""
    copy = good()
    spoil(copy)
    if word is None:
        validate([copy], [SOURCE])
        return
    with pytest.raises(StagingError, match=word):
        validate([copy], [SOURCE])


def test_two_copies_may_not_be_one():
    """Copies that share storage with each other are refused."""
    source = {"a": torch.randn(3), "b": torch.randn(3)}
    same = torch.zeros(3)
    with pytest.raises(StagingError, match="shares"):
        validate([{"a": same, "b": same}], [source])


def test_copies_on_the_host_lie_in_one_slab():
    """One allocation for everything, bits and dtypes kept."""
    store = HostStore(HostMemory)
    copies = stage_on_host([SOURCE, SOURCE], SimulatedAccelerator(), store)
    assert len(store.slabs) == 1
    for copy in copies:
        for name, tensor in copy.items():
            assert torch.equal(tensor, SOURCE[name])
            assert tensor.dtype is SOURCE[name].dtype


def test_a_plain_device_copies_at_once():
    """Where there are no streams, state still moves."""
    device = accelerator_for(torch.device("cpu"))
    assert isinstance(device, PlainDevice)
    (copy,) = stage_on_device([SOURCE], device)
    assert all(torch.equal(copy[name], SOURCE[name]) for name in SOURCE)
    assert not device.is_compute(copy["v"])
    assert device.beside(copy["v"], copy["m"])


def test_a_transfer_leaves_nothing_in_flight():
    """A transfer that fails waits for the copies before the failure, whose memory is about to be freed."""
    accelerator = SimulatedAccelerator(fault=Fault(1))
    pairs = [(torch.zeros(2), torch.ones(2)) for _ in range(3)]
    with pytest.raises(InjectedError):
        transfer(accelerator, pairs)
    assert ("done", 0) in accelerator.order
    assert accelerator._unfinished() == []


def test_replacing_keeps_everything_else():
    """Plain entries and untouched parameters are the same objects, in a new state."""
    one, two = torch.zeros(1), torch.zeros(2)
    state = {one: {"step": 3, "m": torch.ones(1)}, two: {"step": 4}}
    new = replaced(state, {one: {"m": torch.full((1,), 2.0)}})
    assert new is not state
    assert new[one]["step"] == 3
    assert new[one]["m"].item() == 2
    assert new[two] is state[two]
    assert state[one]["m"].item() == 1

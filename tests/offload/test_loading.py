"""A checkpoint loads straight to the host while offload is on, and what is saved there is the caller's own."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from gefen_offload.ranks import identical
from support.simulated import SimulatedAccelerator, simulated
from support.solved import solving_once
from support.streamed import Row, Training, on_cpu, run
from support.witness import Witness

CPU = torch.device("cpu")
ROW = Row("loading", torch.bfloat16, steps=8)


@pytest.fixture
def accelerator():
    """The simulated accelerator, in place for the whole test."""
    with simulated(SimulatedAccelerator()) as accelerator:
        yield accelerator


def halfway(offload, device=CPU):
    """A training after four steps, and its checkpoint."""
    training = Training(ROW, device)
    for step in range(4):
        training.step(step, offload)
    return training, training.optimizer.state_dict()


def tensors(value):
    """Every tensor in nested containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def live(optimizer):
    """Every tensor of the live state."""
    return tensors(list(optimizer.state.values())) + list(optimizer._shared_tensors().values())


PAIRS = [
    pytest.mark.parametrize("to", [False, True], ids=["to-resident", "to-offloaded"]),
    pytest.mark.parametrize("source", [False, True], ids=["from-resident", "from-offloaded"]),
    pytest.mark.parametrize("mapped", [False, True], ids=["memory", "mmap"]),
]


@PAIRS[0]
@PAIRS[1]
@PAIRS[2]
def test_a_run_continues_from_either_side(accelerator, tmp_path, source, to, mapped):
    """Saved resident or offloaded, loaded resident or offloaded, from memory or a mapped file: the same run."""
    continue_elsewhere(CPU, source, to, tmp_path / "checkpoint.pt" if mapped else None)


@pytest.mark.gpu1
@PAIRS[0]
@PAIRS[1]
@PAIRS[2]
def test_a_run_continues_from_either_side_on_a_gpu(ranks, tmp_path, source, to, mapped):
    """The same on CUDA."""
    ranks.run(continue_on_a_gpu, source, to, tmp_path / "checkpoint.pt" if mapped else None)


def continue_on_a_gpu(context, *how):
    """Worker."""
    with solving_once():
        continue_elsewhere(context.device, *how)


def continue_elsewhere(device, source, to, path):
    """Save a run halfway, load it into another optimizer, and compare the rest with the run that was not saved."""
    training, saved = halfway(source, device)
    if path is not None:
        torch.save(saved, path)
        saved = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    other = Training(replace(ROW, activate=(0,)), device)
    if to:
        other.optimizer.offload_state_(policy=ROW.policy)
    other.optimizer.load_state_dict(saved)
    with torch.no_grad():
        for mine, theirs in zip(other.named.values(), training.named.values(), strict=True):
            mine.copy_(theirs)
    seen = [other.step(step, False) for step in range(4, ROW.steps)]
    assert other.optimizer.state_offload_active is to
    identical(run(ROW, device, offload=False)[4:-1], seen).check()


def test_nothing_live_is_the_checkpoints(accelerator):
    """After a load no live tensor shares memory with the caller's checkpoint, which the run does not change."""
    _, saved = halfway(False)
    saved = on_cpu(saved)
    before = on_cpu(saved)
    other = Training(ROW, CPU)
    other.optimizer.offload_state_()
    other.optimizer.load_state_dict(saved)
    theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors(saved) if tensor.numel()}
    assert not theirs & {t.untyped_storage().data_ptr() for t in live(other.optimizer) if t.numel()}
    other.step(4, False)
    identical(before, saved).check()


def test_a_load_goes_to_host_memory_only(accelerator, monkeypatch):
    """No device memory is taken, every tensor keeps its saved dtype on the host, the codebook is on the device."""
    first, saved = halfway(True)
    other = Training(ROW, CPU)
    other.optimizer.offload_state_()
    device, _ = accelerator.held
    taken = []
    empty = accelerator.empty
    monkeypatch.setattr(accelerator, "empty", lambda *args: taken.append(args) or empty(*args))
    other.optimizer.load_state_dict(saved)
    assert taken == []
    assert accelerator.held[0] == device
    store = other.optimizer._offload.store
    for state in other.optimizer.state.values():
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                assert store.find(tensor) is not None, name
                assert tensor.dtype in (torch.uint8, torch.float32)
    assert not any(accelerator._on_host(tensor) for tensor in other.optimizer._shared_tensors().values())
    assert first.optimizer.state_offload_active


def test_replaced_host_memory_is_freed(accelerator):
    """Loads do not pile up: after each the host holds one state."""
    training, saved = halfway(True)
    held = accelerator.held
    for _ in range(3):
        training.optimizer.load_state_dict(saved)
        assert accelerator.held == held


def test_what_is_saved_does_not_change(accelerator):
    """While offloaded, state_dict returns copies that later steps cannot change, and does not move the state."""
    training, saved = halfway(True)
    before = on_cpu(saved)
    mine = {tensor.untyped_storage().data_ptr() for tensor in live(training.optimizer) if tensor.numel()}
    assert not mine & {t.untyped_storage().data_ptr() for t in tensors(saved) if t.numel()}
    assert mine == {t.untyped_storage().data_ptr() for t in live(training.optimizer) if t.numel()}
    training.step(4, False)
    identical(before, saved).check()


def spoil(checkpoint, how):
    """The checkpoint with one entry spoilt."""
    entry = checkpoint["state"][0]
    if how == "missing":
        del entry["m_magnitude"]
    elif how == "extra":
        entry["momentum"] = torch.zeros(2)
    elif how == "truncated":
        entry["m_codebook"] = entry["m_codebook"][:-1]
    elif how == "dtype":
        entry["m_magnitude"] = entry["m_magnitude"].to(torch.bfloat16)
    elif how == "not-finite":
        entry["m_magnitude"][0] = float("nan")
    return checkpoint


@pytest.mark.parametrize("how", ["missing", "extra", "truncated", "dtype", "not-finite"])
def test_a_bad_checkpoint_changes_nothing(accelerator, how):
    """It is refused by the entry's name, before anything live is touched."""
    training, saved = halfway(True)
    witness = Witness(training.optimizer, accelerator)
    with pytest.raises(ValueError, match=r"m_codebook|m_magnitude|momentum"):
        training.optimizer.load_state_dict(spoil(copy.deepcopy(saved), how))
    witness.check()


def test_activation_after_a_cpu_load_brings_the_codebook_back(accelerator):
    """Loaded while inactive from a CPU-mapped checkpoint, the codebook goes to the device in the same commit."""
    training, _ = halfway(False)
    (codebook,) = training.optimizer._shared_tensors().values()
    accelerator.stranded = {id(codebook)}
    training.optimizer.offload_state_()
    (moved,) = training.optimizer._shared_tensors().values()
    assert moved is not codebook
    assert torch.equal(moved, codebook)
    training.step(4, False)

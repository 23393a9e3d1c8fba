"""Our own checkpoints: resuming exactly, modes, copies, pickles, hooks, torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gefen_offload import Gefen
from support.steps import DTYPES, differing, dtype_id, named, parameters, set_gradients, snapshot

SHAPES = ((16, 12), (24,), (), (2, 3, 4))


def trained(dtype=torch.float32, steps=3, **options):
    """Parameters and an optimizer that has taken some steps."""
    tensors = parameters(dtype, SHAPES)
    optimizer = Gefen(named(tensors), lr=0.1, **options)
    train(tensors, optimizer, range(steps))
    return tensors, optimizer


def train(tensors, optimizer, steps):
    for step in steps:
        set_gradients(tensors, step)
        optimizer.step()


def twin(tensors, **options):
    """A new optimizer of copies of these parameters."""
    copies = [nn.Parameter(tensor.detach().clone()) for tensor in tensors]
    return copies, Gefen(named(copies), lr=0.1, **options)


def written(state_dict, **options):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    "options", [{}, {"codebook_refresh_every": 2}, {"capturable": True}], ids=["plain", "refresh", "capturable"]
)
def test_resuming_is_exact(dtype, options):
    """Loaded from a file, an optimizer goes on to the bit as the one that was never saved."""
    tensors, optimizer = trained(dtype, **options)
    copies, resumed = twin(tensors, **options)
    resumed.load_state_dict(written(optimizer.state_dict()))
    train(tensors, optimizer, range(3, 8))
    train(copies, resumed, range(3, 8))
    assert differing(tensors, copies) is None
    assert differing(optimizer.state_dict(), resumed.state_dict()) is None


def test_a_memory_mapped_checkpoint(tmp_path):
    """A checkpoint opened with mmap=True loads, and nothing of it is live afterwards: the file may change."""
    tensors, optimizer = trained()
    path = tmp_path / "checkpoint.pt"
    torch.save(optimizer.state_dict(), path)
    _, resumed = twin(tensors)
    resumed.load_state_dict(torch.load(path, mmap=True, weights_only=True))
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert differing(optimizer.state_dict(), resumed.state_dict()) is None


def test_nothing_live_aliases_the_checkpoint():
    """Writing to a checkpoint after it was loaded changes no state, option or codebook."""
    tensors, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    checkpoint = snapshot(optimizer.state_dict())
    _, resumed = twin(tensors)
    resumed.load_state_dict(checkpoint)
    before = snapshot(resumed.state_dict())
    _overwrite(checkpoint)
    assert differing(before, resumed.state_dict()) is None


def _overwrite(value):
    if isinstance(value, torch.Tensor):
        value.fill_(7)
    elif isinstance(value, dict):
        for item in value.values():
            _overwrite(item)
    elif isinstance(value, list):
        for item in value:
            _overwrite(item)
        value.clear()


def test_a_resident_state_dict_holds_the_live_tensors():
    """As in torch, the tensors are references, and the containers and counters are not."""
    tensors, optimizer = trained()
    checkpoint = optimizer.state_dict()
    assert checkpoint["state"][0]["m_codebook"] is optimizer.state[tensors[0]]["m_codebook"]
    train(tensors, optimizer, range(3, 4))
    assert checkpoint["state"][0]["step"] == 3
    assert checkpoint["gefen_global_step"] == 3


@pytest.mark.parametrize("first", [True, False], ids=["factored-to-block", "block-to-factored"])
def test_a_change_of_mode_starts_the_second_moment_at_its_own_age(first):
    """Resumed in the other mode, momentum and step go on, and the new second moment is corrected for its own age."""
    one = {"period_one_substrings": ("p",)}  # so that an optimizer that starts later has the same blocks
    tensors, optimizer = trained(factored_v_2d=first, **one)
    copies, resumed = twin(tensors, factored_v_2d=not first, **one)
    resumed.load_state_dict(written(optimizer.state_dict()))
    fresh = parameters(shapes=SHAPES[:1])
    alone = Gefen(named(fresh), factored_v_2d=not first, **one)
    for step in range(3, 5):
        set_gradients(copies, step)
        fresh[0].grad = copies[0].grad
        resumed.step()
        alone.step()
    state = resumed.state[copies[0]]
    ages = {"factored_step": 3 if first else 2, "vmean_step": 2 if first else 3}
    assert {name: state[name] for name in ages} == ages
    assert state["step"] == 5
    for name in ["vmean"] if first else ["v_row", "v_col"]:
        assert differing(state[name], alone.state[fresh[0]][name]) is None


@pytest.mark.parametrize("mode", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "options", [{}, {"capturable": True}, {"codebook_refresh_every": 2}], ids=["plain", "capturable", "refresh"]
)
def test_copies_step_on_identically(mode, options):
    """A deep copy and a pickle of model and optimizer together go on to the bit as the original."""
    tensors, optimizer = trained(**options)
    pair = (tensors, optimizer)
    copies, other = copy.deepcopy(pair) if mode == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert copies[0] is other.param_groups[0]["params"][0]
    for t, c in zip(tensors, copies, strict=True):
        assert t.data_ptr() != c.data_ptr()
    train(tensors, optimizer, range(3, 8))
    train(copies, other, range(3, 8))
    assert differing(tensors, copies) is None
    assert differing(optimizer.state_dict(), other.state_dict()) is None


def test_a_pickle_in_a_new_process(tmp_path):
    """A process that has constructed no optimizer can unpickle one and step it."""
    path = tmp_path / "optimizer.pickle"
    path.write_bytes(pickle.dumps(trained()))
    program = f"""
import pickle, torch
tensors, optimizer = pickle.load(open({str(path)!r}, "rb"))
for tensor in tensors:
    tensor.grad = torch.ones_like(tensor)
optimizer.step()
print(optimizer.state[tensors[0]]["step"])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "4\n"


def test_hooks_run():
    """torch's hooks around state_dict, load_state_dict and step are called and may replace what they are given."""
    tensors, optimizer = trained()
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, saved: calls.append("saved") or {**saved, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, given: calls.append("load") or dict(given))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    assert optimizer.state_dict()["extra"] == 1
    optimizer.load_state_dict(optimizer.state_dict())
    train(tensors, optimizer, [3])
    assert calls == ["save", "saved", "save", "saved", "load", "loaded", "stepped"]


@pytest.mark.parametrize("options", [{}, {"full_state_dict": True, "cpu_offload": True}], ids=["sharded", "full"])
def test_distributed_checkpoint_state_dicts(options):
    """torch.distributed.checkpoint's get and set, which drop top-level entries, resume to the bit."""
    model, other = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)), nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    optimizer, resumed = (Gefen(m.named_parameters(), lr=0.1) for m in (model, other))
    tensors, copies = list(model.parameters()), list(other.parameters())
    train(tensors, optimizer, range(3))
    other.load_state_dict(model.state_dict())
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    assert set(saved) == {"state", "param_groups"}
    set_optimizer_state_dict(other, resumed, snapshot(saved), options=StateDictOptions(**options))
    train(tensors, optimizer, range(3, 6))
    train(copies, resumed, range(3, 6))
    assert differing(tensors, copies) is None
    assert differing(optimizer.state_dict(), resumed.state_dict()) is None


def test_distributed_checkpoint_of_a_frozen_parameter():
    """torch.distributed.checkpoint leaves frozen parameters' state out: loading takes that."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    optimizer = Gefen(model.named_parameters(), lr=0.1)
    tensors = [p for p in model.parameters() if p.requires_grad]
    train(tensors, optimizer, range(2))
    saved = get_optimizer_state_dict(model, optimizer)
    saved["state"].pop("0.weight", None)
    set_optimizer_state_dict(model, optimizer, saved)
    assert optimizer.state_dict()["state"][0] == {"name": "0.weight"}
    assert optimizer.state[model[1].weight]["step"] == 2


def test_names_of_wrapped_models():
    """A checkpoint saved under DDP or torch.compile loads without: their prefixes do not count."""
    tensors, optimizer = trained()
    checkpoint = optimizer.state_dict()
    checkpoint["param_groups"][0]["param_names"] = [f"module._orig_mod.p{i}" for i in range(len(tensors))]
    _, resumed = twin(tensors)
    resumed.load_state_dict(checkpoint)
    assert resumed.param_groups[0]["param_names"] == ["p0", "p1", "p2", "p3"]

"""What wrappers such as DeepSpeed do to an optimizer: other parameters in its groups, one group at a time."""

from __future__ import annotations

import torch
from torch import nn

from gefen_offload import Gefen
from support.steps import differing, named, parameters, set_gradients, snapshot


def flattened(seed=0):
    """An optimizer whose two groups were given one flat float32 master copy each in place of their parameters."""
    model = parameters(torch.bfloat16, [(16, 8), (24,), (8, 8)], seed=seed)
    optimizer = Gefen([{"params": named(model)[:2], "lr": 0.1}, {"params": named(model)[2:], "lr": 0.2}])
    masters = []
    for group in optimizer.param_groups:
        flat = torch.cat([p.detach().float().flatten() for p in group["params"]])
        group["params"] = [nn.Parameter(flat)]
        masters += group["params"]
    return masters, optimizer


def step_group_by_group(optimizer, masters, step):
    """As ZeRO 3: all groups are empty but the one that steps."""
    set_gradients(masters, step)
    for group, master in zip(optimizer.param_groups, masters, strict=True):
        for other in optimizer.param_groups:
            other["params"] = []
        group["params"] = [master]
        optimizer.step()
    for group, master in zip(optimizer.param_groups, masters, strict=True):
        group["params"] = [master]


def test_replaced_parameters_save_and_resume():
    """Flat partitions in the parameters' place step with the block second moment, and resume exactly."""
    masters, optimizer = flattened()
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    for step in range(3):
        set_gradients(masters, step)
        optimizer.step()
    assert [sorted(optimizer.state[m])[-1] for m in masters] == ["vmean_step"] * 2
    saved = snapshot(optimizer.state_dict())
    assert [group["param_names"] for group in saved["param_groups"]] == [["group_0_param_0"], ["p2"]]
    others, resumed = flattened(seed=1)
    for other, master in zip(others, masters, strict=True):
        other.data.copy_(master.data)
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        for tensors in (masters, others):
            set_gradients(tensors, step)
        optimizer.step()
        resumed.step()
    assert differing(masters, others) is None
    assert differing(optimizer.state_dict(), resumed.state_dict()) is None


def test_group_after_group():
    """Stepped one group at a time, the others empty, each parameter advances once a round and everything resumes."""
    masters, optimizer = flattened()
    for step in range(3):
        step_group_by_group(optimizer, masters, step)
    assert [optimizer.state[m]["step"] for m in masters] == [3, 3]
    others, resumed = flattened()
    for other, master in zip(others, masters, strict=True):
        other.data.copy_(master.data)
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    step_group_by_group(optimizer, masters, 3)
    step_group_by_group(resumed, others, 3)
    assert differing(masters, others) is None


def test_all_groups_empty():
    """A step, a save and a load while every group is empty work, and count."""
    _, optimizer = flattened()
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["gefen_global_step"] == 1

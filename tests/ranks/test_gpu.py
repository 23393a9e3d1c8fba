"""What only a GPU can show of the harness: errors of kernels, and what is restored between tests."""

from __future__ import annotations

import os
import random
import signal

import pytest
import torch

from gefen_offload.ranks import expect_failure
from gefen_offload.ranks.inventory import inventory
from support.child_pytest import wait_until

MIB = 1 << 20
KILLS = int(os.environ.get("GEFEN_RANKS_GPU_KILLS", "1"))
"""How often a pytest whose ranks use two GPUs is killed; each time takes as long as two NCCL ranks take to start."""


def fail_late(context):
    """Worker: returns before the kernel has failed."""
    torch._assert_async(torch.zeros(1, device=context.device))


def allocate(context, size):
    torch.empty(size, dtype=torch.uint8, device=context.device)
    torch.cuda.set_device(context.world - 1)
    torch.backends.cudnn.allow_tf32 = False
    return torch.cuda.max_memory_allocated(context.device)


def surroundings(context):
    torch.cuda.empty_cache()
    return torch.cuda.max_memory_allocated(), torch.cuda.current_device(), torch.backends.cudnn.allow_tf32


@pytest.mark.gpu1
def test_the_error_of_a_kernel_is_its_own_tests(ranks):
    """A kernel that fails after the body returned fails the run that launched it, and the next run has new ranks."""
    with expect_failure(rank=0, stage="body", message="device-side assert"):
        ranks.run(fail_late)
    assert ranks.run(surroundings).values[0][1] == 0


@pytest.mark.gpu2
def test_restored_between_runs(ranks):
    """Peak memory, current device and TF32 are those of a new rank in a run after one that changed them."""
    assert min(ranks.run(allocate, 64 * MIB).values) >= 64 * MIB
    for rank, (peak, device, tf32) in enumerate(ranks.run(surroundings).values):
        assert peak < 64 * MIB
        assert (device, tf32) == (rank, True)


@pytest.mark.gpu2
def test_nothing_stays_on_the_gpus(ranks, start_mortal, tmp_path):
    """A pytest killed while its ranks hold memory and wait in a collective leaves no process, file or GPU memory."""
    ranks.run(surroundings)
    idle = used()  # by this run's own ranks, which make room for the child's
    for kill in range(KILLS):
        folder = tmp_path / str(kill)
        folder.mkdir()
        mortal = start_mortal(folder, "-k", "uses_both_gpus", "-m", "gpu2")
        mortal.wait_for_ranks()
        busy = used()
        assert min(busy) > 1024  # each rank holds a tensor of a gibibyte
        number = random.Random(kill).choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        os.kill(mortal.child.process.pid, number)
        mortal.check_gone()
        freed = f"free GPUs, {idle} MiB with idle ranks, {busy} with the child's"
        wait_until(lambda: all(now < before for now, before in zip(used(), idle, strict=True)), 30, freed)


def used():
    """MiB in use on each GPU, by whomever."""
    return [gpu.memory_used for gpu in inventory().gpus]

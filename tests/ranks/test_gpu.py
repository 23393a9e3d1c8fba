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
from support.mortal import Mortal

MIB = 1 << 20
KILLS = int(os.environ.get("GEFEN_RANKS_GPU_KILLS", "1"))


def fail_late(context):
    """Worker: returns before the kernel has failed."""
    torch._assert_async(torch.zeros(1, device=context.device))


def allocate(context, size):
    torch.empty(size, dtype=torch.uint8, device=context.device)
    torch.cuda.set_device(context.world - 1)
    torch.backends.cudnn.allow_tf32 = False
    return torch.cuda.max_memory_allocated(context.device)


def surroundings(context):
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


def used():
    """MiB of each GPU."""
    return [gpu.memory_used for gpu in inventory().gpus]


@pytest.mark.gpu2
def test_a_killed_pytest_leaves_no_gpu_memory(ranks, tmp_path):
    """Killed while its ranks are in NCCL, with a gibibyte each, pytest leaves both empty (GEFEN_RANKS_GPU_KILLS)."""
    ranks.run(surroundings)  # these ranks stay until the other pytest asks for their GPUs
    held = used()
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        mortal = Mortal(folder, "-k", "uses_both_gpus", "-m", "gpu2")
        mortal.wait_for_ranks()
        assert all(now > before + 512 for now, before in zip(used(), held, strict=True))
        os.kill(mortal.child.process.pid, random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP]))
        mortal.check_gone()
        wait_until(lambda: all(now < before for now, before in zip(used(), held, strict=True)), 10, "GPUs given back")

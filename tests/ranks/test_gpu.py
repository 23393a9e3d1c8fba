"""What only a GPU can show of the harness: errors of kernels, and what is restored between tests."""

from __future__ import annotations

import pytest
import torch

from gefen_offload.ranks import expect_failure

MIB = 1 << 20


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

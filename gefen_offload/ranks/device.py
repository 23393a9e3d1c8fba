"""Taking the GPU that the lease gave this rank."""

from __future__ import annotations

import torch

from gefen_offload.ranks.wire import Join


def take_device(join: Join) -> str:
    """Make the rank's GPU current and return its UUID; where there is a lease it must be the leased one."""
    if not join.devices:
        torch.cuda.set_device(join.gpu)
        return _uuid(join.gpu)
    count = torch.cuda.device_count()
    if count != len(join.devices):
        raise RuntimeError(f"{count} GPUs are visible, the lease is for {len(join.devices)}: {', '.join(join.devices)}")
    torch.cuda.set_device(join.rank)
    torch.zeros(1, device=torch.device("cuda", join.rank))  # makes the context now
    found = _uuid(join.rank)
    if found != join.devices[join.rank]:
        raise RuntimeError(f"cuda:{join.rank} is {found}, the lease says {join.devices[join.rank]}")
    return found


def _uuid(gpu: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(gpu).uuid}".replace("GPU-GPU-", "GPU-")

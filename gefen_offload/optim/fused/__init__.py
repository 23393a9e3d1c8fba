"""The fused kernels, in Triton: Gefen's update for many parameters in a few launches, and GefenMuon's momentum.

Importing this package imports neither Triton nor CUDA; `available` says whether the kernels can run.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gefen_offload.optim.fused.momentum import FusedMomentum
    from gefen_offload.optim.fused.update import FusedUpdate

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OLDEST = (8, 0)  # the compute capability that bfloat16 arithmetic needs


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernels can step parameters of this dtype on this device.

    That takes Triton, a GPU of compute capability 8.0 or more, and not float64. Under TRITON_INTERPRET=1 they run on
    the CPU, slowly, for tests.
    """
    return why_not(device, dtype) is None


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason for which the kernels cannot run, as part of a sentence, or None."""
    if dtype not in DTYPES:
        return f"they do not have {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else "they run on GPUs, and this is the CPU"
    if device.type != "cuda" or torch.version.hip:
        return f"they run on NVIDIA GPUs, not on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= OLDEST else f"the GPU's compute capability is {capability}, below {OLDEST}"


def fused_update(device: torch.device) -> FusedUpdate:
    """A new `FusedUpdate` for a device where the kernels are available; keep it as long as the optimizer."""
    from gefen_offload.optim.fused.update import FusedUpdate

    return FusedUpdate(device)


def fused_momentum() -> FusedMomentum:
    """A new `FusedMomentum`, for a device where the kernels are available; keep it as long as the optimizer."""
    from gefen_offload.optim.fused.momentum import FusedMomentum

    return FusedMomentum()

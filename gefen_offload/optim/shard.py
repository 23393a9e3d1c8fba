"""What this rank holds of a parameter that is sharded over a mesh, and the tag that says so in a checkpoint."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.nn import Parameter


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, whose elements on this rank are its local shard."""
    if type(tensor) is Parameter or type(tensor) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before its module is imported
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The tensor itself, or the local shard of a DTensor: the same memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_tag(tensor: Tensor) -> dict[str, Any]:
    """Where this rank's shard lies: the mesh's shape, this rank's coordinate, the placements, both shapes."""
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return {
        "mesh": list(mesh.shape),
        "coordinate": list(mesh.get_coordinate() or []),
        "placements": [str(placement) for placement in tensor.placements],  # type: ignore[attr-defined]
        "shape": list(tensor.shape),
        "local_shape": list(local_of(tensor).shape),
    }

"""State that lives with its parameter: where it is allocated, placed and updated while offload is off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gefen_offload.offload.pieces import Launch, Piece, Prepare, Shapes, Staged
from gefen_offload.offload.schema import Cut, StateSchema


@dataclass(frozen=True)
class ResidentAgain:
    """A step on the live tensors."""

    launch: Launch
    valid: bool = True

    def __call__(self) -> None:
        """Run it."""
        self.launch(0)


def run(pieces: Sequence[Piece], prepare: Prepare, schema: StateSchema) -> ResidentAgain:
    """Update the live tensors, in one window."""
    names = [(entry.name, entry.cut is Cut.BLOCKS) for entry in schema.tensors]
    again = ResidentAgain(prepare([[Staged(piece, _views(piece, names)) for piece in pieces]]))
    again()
    return again


def _views(piece: Piece, names: Sequence[tuple[str, bool]]) -> dict[str, Tensor]:
    state, first, last = piece.work.state, piece.first, piece.last
    if first == 0 and last == piece.work.blocks:
        return {name: state[name] for name, _ in names if name in state}
    return {name: state[name][first:last] if blocks else state[name] for name, blocks in names if name in state}


def allocate(requests: Sequence[tuple[Tensor, Shapes]]) -> list[dict[str, Tensor]]:
    """Zero-filled state tensors on each parameter's device."""
    return [
        {name: torch.zeros(shape, dtype=dtype, device=parameter.device) for name, (shape, dtype) in shapes.items()}
        for parameter, shapes in requests
    ]


def place(staged: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Copies of a checkpoint's tensors, in their own dtype, on each parameter's device."""
    return [
        {name: copy_to(tensor, parameter.device) for name, tensor in tensors.items()} for parameter, tensors in staged
    ]


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tight row-major copy of its own storage, without a graph."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copy.copy_(tensor.detach())
    return copy

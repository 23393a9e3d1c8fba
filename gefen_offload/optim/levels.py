"""The learnt codebook as an optimizer holds it: one tensor, and copies for parameters on other devices."""

from __future__ import annotations

import torch
from torch import Tensor

from gefen_offload.optim.work import PIECE_ELEMENTS

BLANK_LEVEL = 2**-12  # the centre of the histogram bin that holds zero


class Levels:
    """At most one codebook, float32 (256,), ascending from -1 to 1. It is replaced, never written to."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor = tensor
        self.blank = tensor is not None and tensor[1].item() == tensor[-2].item() == BLANK_LEVEL
        self._copies: dict[torch.device, Tensor] = {}

    @property
    def learnt(self) -> bool:
        """Whether there is a codebook that a gradient other than zero has shaped.

        From gradients that are all zero, as wrappers use to set state up, only a blank one can be learnt, with a single
        level inside. Every magnitude is zero then, so that replacing it changes nothing.
        """
        return self.tensor is not None and not self.blank

    def on(self, device: torch.device) -> Tensor:
        """The codebook on `device`."""
        if self.tensor is None:
            raise RuntimeError("there is no codebook yet: it is learnt on the first step with a gradient")
        if self.tensor.device == device:
            return self.tensor
        if device not in self._copies:
            self._copies[device] = self.tensor.to(device)
        return self._copies[device]


class Remap:
    """Re-quantises stored indices by a table of 256. All memory is taken at construction: calling it cannot run out."""

    def __init__(self, table: Tensor, targets: list[Tensor]) -> None:
        self._targets = targets
        self._tables = {device: table.to(device) for device in {target.device for target in targets}}
        longest = min(PIECE_ELEMENTS, max((target.numel() for target in targets), default=0))
        self._scratch = {
            device: (
                torch.empty(longest, dtype=torch.int32, device=device),
                torch.empty(longest, dtype=torch.uint8, device=device),
            )
            for device in self._tables
        }

    def __call__(self) -> None:
        """Replace every index in place."""
        for target in self._targets:
            for part in torch.split(target.view(-1), PIECE_ELEMENTS):
                positions, mapped = (scratch[: part.numel()] for scratch in self._scratch[part.device])
                torch.index_select(self._tables[part.device], 0, positions.copy_(part), out=mapped)
                part.copy_(mapped)

"""What is learnt from gradients: the period of each parameter, and the codebook that all of them share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gefen_offload.optim import fused
from gefen_offload.optim.codebook import BINS, block_histogram, solve_codebook
from gefen_offload.optim.period import choose_period, find_period

if TYPE_CHECKING:
    from gefen_offload.optim.fused.first_step import FirstStep


@dataclass(frozen=True)
class PeriodRule:
    """Which parameters have blocks of one element: those of one dimension, or with a fragment in their name."""

    one_dimensional: bool = False
    fragments: tuple[str, ...] = ()

    def forces_one(self, name: str, dimensions: int) -> bool:
        """Whether a parameter of this name and number of dimensions does."""
        name = name.lower()
        return (self.one_dimensional and dimensions == 1) or any(fragment in name for fragment in self.fragments)


class Learning:
    """Finds periods and codebooks: with kernels on GPUs that run them, in whichever path the parameters are stepped.

    One way on each device, so that a run is the same with the fused kernels and without, resident and offloaded.
    """

    def __init__(self) -> None:
        self._kernels: dict[torch.device, FirstStep] = {}

    def period(self, gradient: Tensor, shape: torch.Size, *, force_one: bool) -> int:
        """The period of a parameter of this shape, whose flat gradient this is."""
        kernels = None if force_one else self._kernels_for(gradient)
        if kernels is None:
            return find_period(gradient, shape, force_one=force_one)
        return choose_period(kernels.divisor_errors(gradient), shape)

    def codebook(self, gradients: Sequence[tuple[Tensor, int]]) -> Tensor:
        """The codebook, float32 (256,) on the CPU, of all the flat gradients, each with its period."""
        counts = torch.zeros(BINS, dtype=torch.int64)
        together: dict[FirstStep, list[tuple[Tensor, int]]] = {}
        for gradient, period in gradients:
            kernels = self._kernels_for(gradient)
            if kernels is None:
                counts += block_histogram(gradient, period).cpu()
            else:
                together.setdefault(kernels, []).append((gradient, period))
        for kernels, items in together.items():
            counts += kernels.histogram(items).cpu()
        return solve_codebook(counts)

    def _kernels_for(self, gradient: Tensor) -> FirstStep | None:
        device = gradient.device
        if device.type != "cuda" or not fused.available(device, gradient.dtype):
            return None
        if device not in self._kernels:
            from gefen_offload.optim.fused.first_step import FirstStep

            self._kernels[device] = FirstStep(device)
        return self._kernels[device]


def refuse_orphans(states: Iterable[Mapping[str, Any]]) -> None:
    """Raise where state has indices, given that there is no codebook: it was not loaded by the optimizer."""
    for state in states:
        if "m_codebook" in state:
            raise RuntimeError(
                f"{state.get('name')} has indices but the optimizer has no codebook: its state was set without "
                "load_state_dict(). Under ZeroRedundancyOptimizer save and load each rank's own optimizer: "
                "`zero.optim.state_dict()` and `zero.optim.load_state_dict()`"
            )

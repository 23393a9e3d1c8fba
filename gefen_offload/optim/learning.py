"""What is learnt from gradients: the period of each parameter, and the codebook that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gefen_offload.optim import fused
from gefen_offload.optim.codebook import BINS, block_histogram, solve_codebook
from gefen_offload.optim.period import SHORTEST_PERIOD, choose_period, divisor_errors
from gefen_offload.optim.small_gradients import SMALL, SmallGradients

Counted = Sequence[tuple[Tensor, int]]  # flat gradients, each with its period


@dataclass(frozen=True)
class PeriodRule:
    """Which parameters have blocks of one element: those of one dimension, or with a fragment in their name."""

    one_dimensional: bool = False
    fragments: tuple[str, ...] = ()

    def forces_one(self, name: str, dimensions: int) -> bool:
        """Whether a parameter of this name and number of dimensions does."""
        name = name.lower()
        return (self.one_dimensional and dimensions == 1) or any(fragment in name for fragment in self.fragments)


class Newcomer(NamedTuple):
    """A parameter at its first step: its flat gradient, its shape, and whether its blocks are of one element anyway."""

    gradient: Tensor
    shape: torch.Size
    force_one: bool


class Reader(Protocol):
    """Reads flat gradients. What a method returns waits for the device and gives the result, on the host."""

    def queue_errors(self, gradients: Sequence[Tensor]) -> Callable[[], list[list[float]]]:
        """For each gradient `period.divisor_errors`."""

    def queue_counts(self, gradients: Counted) -> Callable[[], Tensor]:
        """`codebook.block_histogram`, summed over the gradients."""


class Learning:
    """Finds periods and codebooks, in one way on each device whichever path the parameters are stepped in.

    So a run is the same with the fused kernels and without, resident and offloaded. Small gradients are read on the
    host: a model that has no others waits for no kernel to be compiled. Others are read where they are, by kernels on a
    GPU that runs them, which meanwhile need not be waited for.
    """

    def __init__(self) -> None:
        self._small, self._plain = SmallGradients(), _Plain()
        self._kernels: dict[torch.device, Reader] = {}

    def periods(self, newcomers: Sequence[Newcomer]) -> list[int]:
        """The period of each."""
        asked = [i for i, new in enumerate(newcomers) if not new.force_one and new.shape.numel() >= SHORTEST_PERIOD]
        periods = [1] * len(newcomers)
        for i, errors in zip(asked, self._errors([newcomers[i].gradient for i in asked]), strict=True):
            periods[i] = choose_period(errors, newcomers[i].shape)
        return periods

    def codebook(self, gradients: Counted) -> Tensor:
        """The codebook, float32 (256,) on the CPU, of all the flat gradients, each with its period."""
        readers = self._readers([gradient for gradient, _ in gradients])
        queued = [reader.queue_counts([gradients[i] for i in members]) for reader, members in readers]
        return solve_codebook(sum((read() for read in queued), torch.zeros(BINS, dtype=torch.int64)))

    def _errors(self, gradients: Sequence[Tensor]) -> list[list[float]]:
        readers = self._readers(gradients)
        queued = [(members, reader.queue_errors([gradients[i] for i in members])) for reader, members in readers]
        errors = {i: found for members, read in queued for i, found in zip(members, read(), strict=True)}
        return [errors[i] for i in range(len(gradients))]

    def _readers(self, gradients: Sequence[Tensor]) -> list[tuple[Reader, list[int]]]:
        """Who reads which gradients: the small ones first, so that their copies do not queue behind the kernels."""
        readers: dict[Reader, list[int]] = {self._small: []}
        for i, gradient in enumerate(gradients):
            reader = self._small if gradient.numel() <= SMALL else self._reader_of(gradient)
            readers.setdefault(reader, []).append(i)
        return [(reader, members) for reader, members in readers.items() if members]

    def _reader_of(self, gradient: Tensor) -> Reader:
        device = gradient.device
        if device.type != "cuda" or not fused.available(device, gradient.dtype):
            return self._plain
        if device not in self._kernels:
            from gefen_offload.optim.fused.first_step import FirstStep

            self._kernels[device] = FirstStep(device)
        return self._kernels[device]


class _Plain:
    """Reads gradients one by one, with torch's operations on their device."""

    def queue_errors(self, gradients: Sequence[Tensor]) -> Callable[[], list[list[float]]]:
        return lambda: [divisor_errors(gradient) for gradient in gradients]

    def queue_counts(self, gradients: Counted) -> Callable[[], Tensor]:
        return lambda: sum(
            (block_histogram(gradient, period).cpu() for gradient, period in gradients),
            torch.zeros(BINS, dtype=torch.int64),
        )


def refuse_orphans(states: Iterable[Mapping[str, Any]]) -> None:
    """Raise where state has indices, given that there is no codebook: it was not loaded by the optimizer."""
    for state in states:
        if "m_codebook" in state:
            raise RuntimeError(
                f"{state.get('name')} has indices but the optimizer has no codebook: its state was set without "
                "load_state_dict(). Under ZeroRedundancyOptimizer save and load each rank's own optimizer: "
                "`zero.optim.state_dict()` and `zero.optim.load_state_dict()`"
            )

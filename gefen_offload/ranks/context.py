"""What a worker is told about the rank it runs on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from gefen_offload.ranks.faults import FaultPlan
    from gefen_offload.ranks.page import StatusPage


@dataclass(frozen=True)
class RankContext:
    """First argument of every worker.

    `rank` of `world`; `backend` is "nccl", "gloo" or None (no process group); `tmp_path` is an empty directory of this
    rank and this run, removed afterwards.
    """

    rank: int
    world: int
    backend: str | None
    tmp_path: Path
    device_uuid: str = "cpu"
    gpu: int = 0  # of this machine's visible ones
    _page: StatusPage | None = field(default=None, repr=False, compare=False)
    _faults: FaultPlan | None = field(default=None, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """On NCCL the rank's GPU, `cuda:rank` unless ranks are spread over machines; else the CPU."""
        import torch

        return torch.device("cuda", self.gpu) if self.backend == "nccl" else torch.device("cpu")

    def mark(self, name: str) -> None:
        """Say where the body is: shown in hang reports, counted as progress, and a place where faults fire."""
        if self._page is not None:
            self._page.mark(name)
        if self._faults is not None:
            self._faults.at_mark(name)

    def step(self, number: int) -> None:
        """The mark of a training step: `step 3`."""
        self.mark(f"step {number}")

    def digest(self, *values: Any) -> str:
        """Hex SHA-256 of the raw bits, dtypes and shapes of nested values; equal on two ranks when the bits are."""
        from gefen_offload.ranks.compare import feed

        hasher = hashlib.sha256()
        feed(hasher, values)
        return hasher.hexdigest()

"""The tiers: what each marker asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """A world size and a backend; `gpus` physical GPUs."""

    name: str
    world: int
    backend: str
    gpus: int = 0

    @property
    def summary(self) -> str:
        if self.gpus:
            return f"runs on {self.world} rank(s) with one GPU each, NCCL"
        return f"runs on {self.world} CPU ranks, Gloo"


TIERS = {
    tier.name: tier
    for tier in (
        *(Tier(f"gloo{n}", n, "gloo") for n in (2, 4, 8)),
        *(Tier(f"gpu{n}", n, "nccl", n) for n in (1, 2, 4, 8)),
    )
}

"""Which tiers run side by side, and over how many processes each is spread. Pure.

A machine with GPUs and cores enough runs two lanes: tiers that need no GPU, and those that do. In a lane one tier
follows the other. The lane without GPUs is given half of the cores: the other half is for the ranks that its tests
start (those of the harness have deadlines of a few seconds) and for the processes that drive the GPUs. Measurements are
in no lane: they run when everything else has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gefen_offload.gate.outcome import world_of

ENOUGH_CORES = 8
"""With fewer, tiers run one after the other: ranks that wait for a core look like ranks that hang."""


@dataclass(frozen=True)
class Turn:
    """One tier's session in its lane."""

    tier: str
    workers: int
    """Processes over which its tests are spread; 1 is plain pytest."""
    threads: int | None = None
    """Threads that each process computes with; None leaves that to torch."""


def lanes(tiers: Sequence[str], cores: int, gpus: int, spread: bool = True) -> tuple[tuple[Turn, ...], ...]:
    """The lanes that run side by side, without empty ones; ``spread`` says whether pytest-xdist is there."""
    on_cpu = [tier for tier in tiers if not tier.startswith("gpu")]
    on_gpu = [tier for tier in tiers if tier.startswith("gpu")]
    beside = bool(on_cpu and on_gpu) and cores >= ENOUGH_CORES
    share = cores // 2 if beside else cores
    plain = tuple(turn(tier, share, spread) for tier in on_cpu)
    accelerated = tuple(Turn(tier, gpus // world_of(tier) if spread else 1) for tier in on_gpu)
    return tuple(lane for lane in ((plain, accelerated) if beside else (plain + accelerated,)) if lane)


def turn(tier: str, cores: int, spread: bool) -> Turn:
    """A tier without GPUs on so many cores: one process a core, or for tests of N ranks one for each 2 N."""
    workers = max(1, cores // (2 * world_of(tier) or 1)) if spread else 1
    return Turn(tier, workers, threads=1 if tier == "cpu" and workers > 1 else None)

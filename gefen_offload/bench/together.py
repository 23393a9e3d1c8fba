"""Several GPUs of one host offloading at once: each rank's step and link floor, alone and with all of them busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist

from gefen_offload.bench.contestants import ours
from gefen_offload.bench.floor import Floor, duplex_floor
from gefen_offload.bench.measure import Memory, Timing, allocated, peak, reset_peak, time_steps
from gefen_offload.bench.results import Entry
from gefen_offload.bench.workloads import sized
from gefen_offload.ranks import RankContext, RankGroup
from gefen_offload.ranks.harness import close
from gefen_offload.ranks.inventory import inventory
from gefen_offload.ranks.run import Options


@dataclass(frozen=True)
class Found:
    """What one rank measured in one way."""

    floor: Floor
    step: Timing
    memory: Memory
    streamed: int
    pinned_asked: int
    pinned_reserved: int


def together(world: int, size: str, staging: int, repeats: int) -> Iterator[Entry]:
    """For each rank an entry alone and one with all ranks at it; one that says why not, with too few GPUs."""
    workload = sized(size)
    found = len(inventory().gpus)
    if found < world:
        yield Entry(f"{size} x {world}", "all", workload.elements, absent=f"needs {world} GPUs, found {found}")
        return
    try:
        group = RankGroup(world, Options(backend="nccl", timeout=300.0), gpus=world)
        values = group.run(measure, size, staging, repeats).values
    finally:
        close()
    for way in ("alone", "together"):
        for rank, ways in enumerate(values):
            one: Found = ways[way]
            yield Entry(
                f"{size} x {world}",
                f"rank {rank}, {way}",
                workload.elements,
                len(workload.shapes),
                staging,
                step=one.step,
                memory=one.memory,
                pinned_asked=one.pinned_asked,
                pinned_reserved=one.pinned_reserved,
                streamed=one.streamed,
                floor=one.floor,
            )


def measure(context: RankContext, size: str, staging: int, repeats: int) -> dict[str, Found]:
    """Worker: this rank's floor and offloaded step, while the others wait, and while they do the same."""
    device, workload = context.device, sized(size)
    parameters = workload.parameters(device)
    held = allocated(device)
    optimizer = ours(staging=staging)(parameters)
    for _ in range(4):
        optimizer.step()
    kept = allocated(device) - held

    def both(ready: Callable[[], None]) -> Found:
        floor = duplex_floor(device, workload.elements, staging, ready=ready)
        reset_peak(device)
        step = time_steps(optimizer.step, device, repeats=repeats, ready=ready)
        report = optimizer.state_offload_report()
        return Found(
            floor,
            step,
            Memory(kept, peak(device) - held),
            report.to_device.nbytes // max(1, report.steps),
            report.pinned_asked,
            report.pinned_reserved,
        )

    for _ in range(context.rank):
        dist.barrier()
    alone = both(lambda: None)
    for _ in range(context.rank, context.world):
        dist.barrier()
    return {"alone": alone, "together": both(dist.barrier)}

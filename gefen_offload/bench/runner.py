"""Runs the sections of the bench: each measures contestants on workloads and hands every entry on as it is found."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gefen_offload.bench.contestants import Contestant, contestants, ours
from gefen_offload.bench.floor import Floor, duplex_floor
from gefen_offload.bench.measure import Memory, allocated, free_bytes, peak, reset_peak, synchronize, time_steps
from gefen_offload.bench.results import Entry
from gefen_offload.bench.timeline import record
from gefen_offload.bench.together import together
from gefen_offload.bench.workloads import Network, NetworkShape, Workload, divided, sized, tiny, workload_a

MIB = 2**20
NEEDED = 10  # bytes an element that a comparison may take: parameter, gradient, two moments of AdamW, room


@dataclass(frozen=True)
class Plan:
    """What to run, and how often."""

    device: torch.device
    sections: tuple[str, ...]
    sizes: tuple[str, ...]
    stagings: tuple[int, ...]
    counts: tuple[int, ...]
    staging: int
    repeats: int
    network: NetworkShape
    only: tuple[str, ...] = ()
    world: int = 2
    timelines: bool = False

    def chosen(self, staging: int) -> list[Contestant]:
        """The contestants whose names hold one of `only`, or all."""
        return [c for c in contestants(staging) if not self.only or any(part in c.name for part in self.only)]


def run(plan: Plan) -> Iterator[Entry]:
    """Every entry, section after section."""
    sections: dict[str, Callable[[Plan], Iterator[Entry]]] = {
        "smoke": _smoke,
        "A": _workload_a,
        "B": _workload_b,
        "sizes": _sizes,
        "tensors": _tensors,
        "staging": _staging,
        "together": _together,
    }
    for section in plan.sections:
        yield from sections[section](plan)


# --- sections -------------------------------------------------------------------------------------------------------


def _smoke(plan: Plan) -> Iterator[Entry]:
    for contestant in plan.chosen(plan.staging):
        yield measure(plan, contestant, tiny(), None)


def _workload_a(plan: Plan) -> Iterator[Entry]:
    workload = workload_a()
    floor = duplex_floor(plan.device, workload.elements, plan.staging)
    for contestant in plan.chosen(plan.staging):
        yield measure(plan, contestant, workload, floor, staging=plan.staging)


def _sizes(plan: Plan) -> Iterator[Entry]:
    picked = [c for c in plan.chosen(plan.staging) if c.name in _SCALED]
    for name in plan.sizes:
        workload = sized(name)
        if workload.elements * NEEDED > free_bytes(plan.device):
            yield Entry(workload.name, "all", workload.elements, absent="too large for this GPU's free memory")
            continue
        floor = duplex_floor(plan.device, min(workload.elements, 2**30), plan.staging, repeats=2)
        for contestant in picked:
            yield measure(plan, contestant, workload, floor, staging=plan.staging)


_SCALED = ("gefen_offload, resident", "gefen_offload, offloaded", "torch AdamW fused")


def _tensors(plan: Plan) -> Iterator[Entry]:
    picked = [c for c in plan.chosen(plan.staging) if c.name in _SCALED]
    floor = duplex_floor(plan.device, 2**27, plan.staging, repeats=2)
    for count in plan.counts:
        for contestant in picked:
            yield measure(plan, contestant, divided(count), floor, staging=plan.staging)


def _staging(plan: Plan) -> Iterator[Entry]:
    workload = sized("350M")
    for staging in plan.stagings:
        floor = duplex_floor(plan.device, workload.elements, staging, repeats=2)
        contestant = Contestant("gefen_offload, offloaded", ours(staging=staging), offloaded=True)
        yield measure(plan, contestant, workload, floor, staging=staging)


def _together(plan: Plan) -> Iterator[Entry]:
    yield from together(plan.world, "1.3B", plan.staging, plan.repeats)


def _workload_b(plan: Plan) -> Iterator[Entry]:
    for contestant in plan.chosen(plan.staging):
        yield train(plan, contestant)


# --- one entry ------------------------------------------------------------------------------------------------------


def measure(plan: Plan, contestant: Contestant, workload: Workload, floor: Floor | None, *, staging: int = 0) -> Entry:
    """Step one optimizer on fixed gradients."""
    blank = partial(Entry, workload.name, contestant.name, workload.elements, len(workload.shapes))
    missing = contestant.missing(plan.device)
    if missing is None and contestant.hooks:
        missing = "steps inside backward: see workload B"
    if missing is not None:
        return blank(absent=missing)
    try:
        parameters = workload.parameters(plan.device)
        return _stepped(plan, contestant, parameters, floor, blank, staging)
    except Exception as failure:
        return blank(absent=f"failed: {type(failure).__name__}: {failure}"[:200])
    finally:
        parameters = []
        _clear(plan.device)


def _stepped(
    plan: Plan,
    contestant: Contestant,
    parameters: Sequence[nn.Parameter],
    floor: Floor | None,
    blank: Callable[..., Entry],
    staging: int,
) -> Entry:
    synchronize(plan.device)
    before = allocated(plan.device)
    begun = time.perf_counter()
    optimizer = contestant.build(parameters)
    optimizer.step()
    synchronize(plan.device)
    first = time.perf_counter() - begun
    optimizer.step()
    synchronize(plan.device)
    reset_peak(plan.device)
    timing = time_steps(optimizer.step, plan.device, repeats=plan.repeats)
    memory = Memory(allocated(plan.device) - before, peak(plan.device) - before)
    streamed, asked, reserved = _streaming(optimizer) if contestant.offloaded else (0, 0, 0)
    timeline = tuple(record(optimizer.step)) if plan.timelines and contestant.offloaded else ()
    return blank(
        timeline=timeline,
        staging=staging if contestant.offloaded else 0,
        first=first,
        step=timing,
        memory=memory,
        pinned_asked=asked,
        pinned_reserved=reserved,
        streamed=streamed,
        floor=floor if contestant.offloaded else None,
        version=contestant.version(),
    )


def _streaming(optimizer: Any) -> tuple[int, int, int]:
    """Bytes each way in a step, pinned bytes asked for, and reserved."""
    report = optimizer.state_offload_report()
    return report.to_device.nbytes // max(1, report.steps), report.pinned_asked, report.pinned_reserved


def train(plan: Plan, contestant: Contestant) -> Entry:
    """Train the network of workload B, and time whole training steps."""
    device = plan.device
    missing = contestant.missing(device)
    if missing is not None:
        return Entry("B", contestant.name, absent=missing)
    try:
        torch.manual_seed(0)
        network = Network(plan.network, device, torch.bfloat16)
        tokens = torch.randint(plan.network.vocabulary, (plan.network.batch, plan.network.length + 1), device=device)
        parameters = list(network.parameters())
        before = allocated(device)
        optimizer = contestant.build(parameters)

        def step() -> None:
            network(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        begun = time.perf_counter()
        step()
        synchronize(device)
        first = time.perf_counter() - begun
        timing = time_steps(step, device, repeats=max(5, plan.repeats // 2))
        memory = Memory(allocated(device) - before, 0)
        elements = sum(p.numel() for p in parameters)
        streamed, asked, reserved = _streaming(optimizer) if contestant.offloaded else (0, 0, 0)
        return Entry(
            "B", contestant.name, elements, len(parameters), plan.staging if contestant.offloaded else 0, first, timing,
            memory, asked, reserved, streamed, None, contestant.version(),
        )  # fmt: skip
    except Exception as failure:
        return Entry("B", contestant.name, absent=f"failed: {type(failure).__name__}: {failure}"[:200])
    finally:
        network = optimizer = parameters = step = None  # type: ignore[assignment]
        _clear(device)


def _clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

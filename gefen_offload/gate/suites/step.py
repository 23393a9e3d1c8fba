"""The measurements: counters and times of one optimizer step, resident and offloaded, beside torch's fused AdamW.

All run in one process. Times are interleaved A/B/B/A, with AdamW as A, and noted as ratios to it; how far the two runs
of the same thing lie apart is the noise. Counters are per step, after warm-up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from gefen_offload import Gefen
from gefen_offload.ranks import RankContext, RankGroup

WORKLOAD = "gpt-163m-bf16@1"
SHAPES = [
    (50304, 1024),
    *[shape for _ in range(9) for shape in ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))],
]
SMALL = [(1024,)] * 36
WARM_UP, STEPS, ROUNDS = 4, 20, 2
LONGEST_TIMELINE = 400
LANES = (("HtoD", "copy-in"), ("DtoH", "copy-out"))

Step = Callable[[], object]


def parameters(device: torch.device, seed: int) -> list[tuple[str, torch.nn.Parameter]]:
    """Named bfloat16 parameters with gradients of standard deviation 1e-3."""
    generator = torch.Generator(device).manual_seed(seed)
    named: list[tuple[str, torch.nn.Parameter]] = []
    for number, shape in enumerate([*SHAPES, *SMALL]):
        values = torch.randn(shape, device=device, generator=generator).mul_(0.02).to(torch.bfloat16)
        parameter = torch.nn.Parameter(values)
        parameter.grad = torch.randn(shape, device=device, generator=generator).mul_(1e-3).to(torch.bfloat16)
        named.append((f"p{number}", parameter))
    return named


def median_step(step: Step) -> float:
    """Median seconds of a synchronised step."""
    seconds: list[float] = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def interleaved(reference: Step, subject: Step) -> tuple[float, float]:
    """Ratio of the subject to the reference in the quietest A/B/B/A round, and that round's noise."""
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        a1, b1, b2, a2 = (median_step(step) for step in (reference, subject, subject, reference))
        apart = max(abs(a1 - a2) / (a1 + a2), abs(b1 - b2) / (b1 + b2)) * 2
        found.append(((b1 + b2) / (a1 + a2), apart))
    return min(found, key=lambda pair: pair[1])


def allocations() -> int:
    """Allocations from torch's CUDA allocator so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def counted(optimizer: Gefen) -> dict[str, int]:
    """Counters of offloaded steps: bytes each way, windows, allocations, peak above what is held between."""
    before, drawn = optimizer.state_offload_report(), allocations()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        optimizer.step()
    torch.cuda.synchronize()
    drawn = allocations() - drawn
    after = optimizer.state_offload_report()
    return {
        "offloaded_bytes_in": (after.to_device.nbytes - before.to_device.nbytes) // STEPS,
        "offloaded_bytes_out": (after.to_host.nbytes - before.to_host.nbytes) // STEPS,
        "offloaded_windows": (after.windows - before.windows) // STEPS,
        "offloaded_allocations": -(-drawn // STEPS),
        "offloaded_transient_bytes": torch.cuda.max_memory_allocated() - held,
    }


def profiled(step: Step) -> list[tuple[str, float, float]]:
    """What one step did on the GPU: name, start and end in milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    events = [event for event in trace.events() or [] if str(event.device_type).endswith("CUDA")]
    return [(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3) for event in events]


def launches(events: list[tuple[str, float, float]]) -> int:
    """Kernels among the events."""
    return sum(not name.startswith(("Memcpy", "Memset")) for name, _, _ in events)


def intervals(events: list[tuple[str, float, float]]) -> list[dict[str, object]]:
    """The events as intervals of three lanes."""
    found: list[dict[str, object]] = []
    for name, start, end in sorted(events, key=lambda event: event[1])[:LONGEST_TIMELINE]:
        lane = next((lane for word, lane in LANES if word in name), "update")
        found.append({"lane": lane, "start": round(start, 4), "end": round(end, 4), "label": name[:60]})
    return found


def measure(context: RankContext) -> dict[str, object]:
    """Worker: every counter and time, and one offloaded step's timeline."""
    device = context.device
    base = torch.cuda.memory_allocated()
    named = parameters(device, 0)
    own = torch.cuda.memory_allocated() - base
    offloaded = Gefen(named, lr=1e-4)
    offloaded.offload_state_()
    warm(offloaded.step)
    # What offload keeps on the GPU for as long as it is on: slots, codebook, buffers.
    kept = torch.cuda.memory_allocated() - base - own
    counters = {**counted(offloaded), "offloaded_persistent_bytes": kept}
    resident = Gefen(parameters(device, 0), lr=1e-4)
    reference = torch.optim.AdamW([p for _, p in parameters(device, 0)], lr=1e-4, fused=True)
    warm(resident.step)
    warm(reference.step)
    ratios = {
        "offloaded_step": interleaved(reference.step, offloaded.step),
        "resident_step": interleaved(reference.step, resident.step),
    }
    trace = profiled(offloaded.step)
    counters["offloaded_launches"] = launches(trace)
    counters["resident_launches"] = launches(profiled(resident.step))
    return {
        "counters": counters,
        "times": {name: ratio for name, (ratio, _) in ratios.items()},
        "noise": {name: noise for name, (_, noise) in ratios.items()},
        "timeline": intervals(trace),
    }


def warm(step: Step) -> None:
    """First steps: codebook, compiled kernels, plans."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()


@pytest.mark.gpu1
@pytest.mark.timeout(600)
def test_step(ranks: RankGroup, record_property: Callable[[str, object], None]) -> None:
    """Something was measured on one GPU, by the rank that holds it."""
    from gefen_offload.ranks.inventory import inventory

    measured = ranks.options(timeout=500.0).run(measure).values[0]
    gpu = inventory().gpus[0]
    identity = {"gpu": gpu.name, "driver": gpu.driver, "torch": torch.__version__, "workload": WORKLOAD}
    record_property("timeline", measured.pop("timeline"))
    record_property("measurement", {"identity": identity, **measured})
    assert measured["counters"]["offloaded_bytes_in"] > 0

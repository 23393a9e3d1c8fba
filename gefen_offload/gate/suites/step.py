"""The measurements: counters and times of one optimizer step, resident and offloaded, beside torch's fused AdamW.

All run in one process. Times are interleaved A/B/B/A, with AdamW as A, and noted as ratios to it; how far the two runs
of the same thing lie apart is the noise. Counters are per step, after warm-up.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gefen_offload import Gefen
from gefen_offload.bench.measure import allocated, peak, reset_peak, synchronize, time_steps
from gefen_offload.bench.workloads import Workload, transformer_shapes
from gefen_offload.ranks import RankContext, RankGroup

WORKLOAD = Workload("gpt-165m-bf16@1", transformer_shapes(1024, 9, 50304))
"""Its name ends in a version, to be raised with any change of what is measured here."""
WARM_UP, STEPS, ROUNDS = 4, 20, 3
LONGEST_TIMELINE = 400
LANES = (("HtoD", "copy-in"), ("DtoH", "copy-out"))

Step = Callable[[], object]


def interleaved(reference: Step, subject: Step, device: torch.device) -> tuple[float, float]:
    """Ratio of the subject to the reference in the quietest A/B/B/A round, and that round's noise."""
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        turns = (reference, subject, subject, reference)
        a1, b1, b2, a2 = (time_steps(step, device, warmup=1, repeats=STEPS).median for step in turns)
        apart = max(abs(a1 - a2) / (a1 + a2), abs(b1 - b2) / (b1 + b2)) * 2
        found.append(((b1 + b2) / (a1 + a2), apart))
    return min(found, key=lambda pair: pair[1])


def allocations(device: torch.device) -> int:
    """Allocations from torch's CUDA allocator so far; 0 on the CPU."""
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"]) if device.type == "cuda" else 0


def counted(optimizer: Gefen, device: torch.device) -> dict[str, int]:
    """Counters of offloaded steps: bytes each way, windows, allocations, peak above what is held between."""
    synchronize(device)
    before, drawn, held = optimizer.state_offload_report(), allocations(device), allocated(device)
    reset_peak(device)
    for _ in range(STEPS):
        optimizer.step()
    synchronize(device)
    drawn = allocations(device) - drawn
    after = optimizer.state_offload_report()
    return {
        "offloaded_bytes_in": (after.to_device.nbytes - before.to_device.nbytes) // STEPS,
        "offloaded_bytes_out": (after.to_host.nbytes - before.to_host.nbytes) // STEPS,
        "offloaded_windows": (after.windows - before.windows) // STEPS,
        "offloaded_allocations": -(-drawn // STEPS),
        "offloaded_transient_bytes": peak(device) - held,
    }


def profiled(step: Step, device: torch.device) -> list[tuple[str, float, float]]:
    """What one step did on the device: name, start and end in milliseconds; on the CPU its operators."""
    from torch.profiler import ProfilerActivity, profile

    kind = device.type.upper()
    with profile(activities=[getattr(ProfilerActivity, kind)]) as trace:
        step()
        synchronize(device)
    # A named range, as the step itself is one, appears beside the kernels that it spans.
    events = [e for e in trace.events() or [] if e.device_type.name == kind and not e.is_user_annotation]
    return [(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3) for event in events]


def launches(events: list[tuple[str, float, float]]) -> int:
    """Kernels among the events."""
    return sum(not name.startswith(("Memcpy", "Memset")) for name, _, _ in events)


def intervals(events: list[tuple[str, float, float]]) -> list[dict[str, object]]:
    """The events as intervals of three lanes, beginning at 0."""
    ordered = sorted(events, key=lambda event: event[1])[:LONGEST_TIMELINE]
    origin = ordered[0][1] if ordered else 0.0
    found: list[dict[str, object]] = []
    for name, start, end in ordered:
        lane = next((lane for word, lane in LANES if word in name), "update")
        times = {"start": round(start - origin, 4), "end": round(end - origin, 4)}
        found.append({"lane": lane, **times, "label": name[:60]})
    return found


def measure(context: RankContext, workload: Workload = WORKLOAD) -> dict[str, object]:
    """Worker: every counter and time, and one offloaded step's timeline."""
    device = context.device
    named = workload.parameters(device)
    own = allocated(device)
    offloaded = Gefen(named, lr=1e-4)
    offloaded.offload_state_()
    warm(offloaded.step, device)
    # What offload keeps on the GPU for as long as it is on: slots, codebook, buffers.
    kept = allocated(device) - own
    counters = {**counted(offloaded, device), "offloaded_persistent_bytes": kept}
    resident = Gefen(workload.parameters(device), lr=1e-4)
    reference = torch.optim.AdamW(workload.parameters(device), lr=1e-4, fused=True)
    warm(resident.step, device)
    warm(reference.step, device)
    ratios = {
        "offloaded_step": interleaved(reference.step, offloaded.step, device),
        "resident_step": interleaved(reference.step, resident.step, device),
    }
    trace = profiled(offloaded.step, device)
    counters["offloaded_launches"] = launches(trace)
    counters["resident_launches"] = launches(profiled(resident.step, device))
    return {
        "counters": counters,
        "times": {name: ratio for name, (ratio, _) in ratios.items()},
        "noise": {name: noise for name, (_, noise) in ratios.items()},
        "timeline": intervals(trace),
    }


def warm(step: Step, device: torch.device) -> None:
    """First steps: codebook, compiled kernels, plans."""
    for _ in range(WARM_UP):
        step()
    synchronize(device)


@pytest.mark.gpu1
@pytest.mark.timeout(300)
def test_step(ranks: RankGroup, record_property: Callable[[str, object], None]) -> None:
    """Something was measured on one GPU, by the rank that holds it."""
    from gefen_offload.ranks.inventory import inventory

    measured = ranks.options(timeout=240.0).run(measure).values[0]
    gpu = inventory().gpus[0]
    identity = {"gpu": gpu.name, "driver": gpu.driver, "torch": torch.__version__, "workload": WORKLOAD.name}
    record_property("timeline", measured.pop("timeline"))
    record_property("measurement", {"identity": identity, **measured})
    assert measured["counters"]["offloaded_bytes_in"] > 0

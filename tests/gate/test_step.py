"""The performance suite, run whole on a simulated accelerator: what it counts, what it notes, and what comes of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gefen_offload.bench.workloads import Workload
from gefen_offload.gate import baseline
from gefen_offload.gate.baseline import Identity, Measurement
from gefen_offload.gate.reason import Reason
from gefen_offload.gate.suites import step
from support.simulated import SimulatedAccelerator, simulated

SMALL = Workload("small@1", ((64, 48), (48,), (40, 40)), torch.float32)
IDENTITY = Identity("Imaginary 9", "1.0", torch.__version__, SMALL.name)


@pytest.fixture(scope="module")
def noted():
    """What the worker of the performance suite returns, as it stands in a record."""
    with simulated(SimulatedAccelerator()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "STEPS", 3)
        context = SimpleNamespace(device=torch.device("cpu"))
        return json.loads(json.dumps(step.measure(context, SMALL)))


def measurement(noted):
    return Measurement(IDENTITY, noted["counters"], noted["times"], dict.fromkeys(noted["noise"], 0.01))


def test_the_counters_are_those_of_one_step(noted):
    """Each byte of state crosses once each way in a step: one an element for the indices, and the second moments."""
    counters = noted["counters"]
    elements = SMALL.elements
    assert elements <= counters["offloaded_bytes_in"] < 2 * elements
    assert elements <= counters["offloaded_bytes_out"] <= counters["offloaded_bytes_in"]
    assert counters["offloaded_windows"] == 1
    assert counters["resident_launches"] > 0


def test_times_are_ratios_with_their_noise(noted):
    """Both steps are measured against the reference, each with how far its repetitions lie apart."""
    assert noted["times"].keys() == noted["noise"].keys() == {"offloaded_step", "resident_step"}
    assert all(ratio > 0 for ratio in noted["times"].values())


def test_the_timeline_begins_at_nought_and_has_known_lanes(noted):
    """The report can draw it: intervals from 0 on, each in one of the three lanes."""
    timeline = noted["timeline"]
    assert timeline[0]["start"] == 0
    assert all(entry["end"] >= entry["start"] for entry in timeline)
    assert {entry["lane"] for entry in timeline} <= {"copy-in", "update", "copy-out"}


def test_copies_are_told_from_kernels():
    """Copies in either direction have lanes of their own and are no launches."""
    events = [("Memcpy HtoD (Pinned -> Device)", 5.0, 6.0), ("kernel", 6.0, 7.0), ("Memcpy DtoH", 7.0, 8.0)]
    assert [entry["lane"] for entry in step.intervals(events)] == ["copy-in", "update", "copy-out"]
    assert [entry["start"] for entry in step.intervals(events)] == [0, 1, 2]
    assert step.launches([*events, ("Memset (Device)", 8.0, 9.0)]) == 1


def test_a_measurement_is_within_itself_and_not_without_a_baseline(noted):
    """The same numbers pass as their own baseline; without one, or with another workload's, they never do."""
    found = measurement(noted)
    assert baseline.compare(found, found) == []
    assert [f.reason for f in baseline.compare(found, None)] == [Reason.NO_BASELINE]
    other = replace(found, identity=replace(IDENTITY, workload="small@2"))
    assert [f.reason for f in baseline.compare(found, other)] == [Reason.BASELINE_MISMATCH]


def test_a_second_transfer_of_the_state_exceeds_its_counter(noted):
    """A step that copies a byte more than the baseline is a failure that names the counter."""
    found = measurement(noted)
    more = replace(found, counters={**found.counters, "offloaded_bytes_in": found.counters["offloaded_bytes_in"] + 1})
    assert [(f.reason, f.subject) for f in baseline.compare(more, found)] == [
        (Reason.COUNTER_EXCEEDED, "offloaded_bytes_in")
    ]


def test_the_ratio_is_that_of_the_steps(monkeypatch):
    """A subject that takes four times as long as the reference has ratio 4, and repetition shows as noise."""
    seconds = {"reference": 1, "subject": 4}
    now = 0.0

    def tick(name):
        nonlocal now
        now += seconds[name]

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    cpu = torch.device("cpu")
    ratio, noise = step.interleaved(lambda: tick("reference"), lambda: tick("subject"), cpu)
    assert (ratio, noise) == (4.0, 0.0)

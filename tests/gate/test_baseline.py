"""Comparing measurements: like with like, exact counters, times with their noise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gefen_offload.gate import baseline, rundir
from gefen_offload.gate.reason import Reason
from gefen_offload.gate.selftest.release import MEASURED


def reasons(measured, against=MEASURED):
    return [finding.reason for finding in baseline.compare(measured, against)]


def slower(factor, noise):
    return replace(MEASURED, times={"offloaded_step": 1.2 * factor}, noise={"offloaded_step": noise})


@pytest.mark.parametrize("field", ["gpu", "driver", "torch", "workload"])
def test_only_like_is_compared(field):
    """Another GPU, driver, torch or workload version is a mismatch that names the field, and nothing else is judged."""
    other = replace(MEASURED, identity=replace(MEASURED.identity, **{field: "another"}))
    found = baseline.compare(replace(slower(9, 0.0)), other)
    assert [(finding.reason, finding.subject) for finding in found] == [(Reason.BASELINE_MISMATCH, field)]


@pytest.mark.parametrize(
    ("factor", "noise", "expected"),
    [(1.09, 0.01, []), (1.11, 0.01, [Reason.TIME_EXCEEDED]), (1.11, 0.05, []), (1.0, 0.16, [Reason.TOO_NOISY])],
    ids=["within", "above", "within-noise", "too-noisy"],
)
def test_times_are_tripwires(factor, noise, expected):
    """A time may exceed by a tenth, or by three times the noise; more noise than 15% compares nothing."""
    assert reasons(slower(factor, noise)) == expected


def test_fewer_bytes_are_no_fault():
    """A counter below its limit passes."""
    assert reasons(replace(MEASURED, counters={name: value - 1 for name, value in MEASURED.counters.items()})) == []


def test_a_baseline_reads_back(tmp_path):
    """What ``baseline --update`` writes is found again by the GPU's name."""
    rundir.write_json(tmp_path / baseline.file_name("Imaginary 9 (80 GB)"), MEASURED)
    assert baseline.load(tmp_path, "Imaginary 9 (80 GB)") == MEASURED
    assert baseline.load(tmp_path, "Imaginary 8") is None

"""The regression drill: changes that a careless gate lets through, each planted into recorded evidence of a release."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gefen_offload.gate.outcome import PASSED
from gefen_offload.gate.reason import Reason, Status
from gefen_offload.gate.record import Phase
from gefen_offload.gate.selftest.case import released
from gefen_offload.gate.selftest.evidence import measured
from gefen_offload.gate.selftest.release import MEASURED, id_of


@pytest.fixture
def release(tmp_path):
    return released(tmp_path)


def changed(evidence, tier, **changes):
    """The evidence with one tier's session changed."""
    record = tuple(replace(s, **changes) if s.tier == tier else s for s in evidence.record)
    return replace(evidence, record=record)


def named(evidence):
    """The verdict's status, and its reasons with what each is about."""
    verdict = evidence.verdict()
    return verdict.status, {(finding.reason, finding.check, finding.subject) for finding in verdict.findings}


def test_the_release_passes(release):
    """Before anything is planted, the verdict is a releasable pass."""
    verdict = release.verdict()
    assert (verdict.status, verdict.findings, verdict.releasable) == (Status.PASS, (), True)
    assert verdict.headline == "PASS"


def test_one_ulp_in_the_offloaded_path(release):
    """A parity test that fails by one ulp is a product failure that names the test and shows the difference."""
    id, text = id_of("gpu2"), "E  first difference: step 3, p0[17]: 1 ulp"
    phases = (Phase(id, "setup", PASSED), Phase(id, "call", "failed", text=text), Phase(id, "teardown", PASSED))
    evidence = changed(release, "gpu2", phases=phases, status=1, exit=replace(release.record[0].exit, code=1))
    assert named(evidence) == (Status.FAIL, {(Reason.FAILED, "gpu2", id)})
    assert "1 ulp" in evidence.verdict().findings[0].detail


def test_a_step_that_is_a_fifth_slower(release):
    """20% more time than the baseline, at 1% noise, is a product failure that names the time."""
    slower = measured(times={"offloaded_step": 1.2 * MEASURED.times["offloaded_step"]})(release)
    assert named(slower) == (Status.FAIL, {(Reason.TIME_EXCEEDED, "performance", "offloaded_step")})


def test_a_step_within_the_tripwire(release):
    """5% more time passes: wall time is a tripwire, not a limit."""
    slower = measured(times={"offloaded_step": 1.05 * MEASURED.times["offloaded_step"]})(release)
    assert slower.verdict().status is Status.PASS


def test_fifty_mebibytes_more(release):
    """50 MiB more peak memory is a product failure that names the counter."""
    more = {**MEASURED.counters, "peak_bytes": MEASURED.counters["peak_bytes"] + 50 * 2**20}
    assert named(measured(counters=more)(release)) == (
        Status.FAIL,
        {(Reason.COUNTER_EXCEEDED, "performance", "peak_bytes")},
    )


def test_one_byte_more(release):
    """Counters are exact: one byte more is already too much."""
    more = {**MEASURED.counters, "bytes_in": MEASURED.counters["bytes_in"] + 1}
    assert named(measured(counters=more)(release))[1] == {(Reason.COUNTER_EXCEEDED, "performance", "bytes_in")}


def test_a_deleted_gpu_test(release):
    """A GPU test that is gone leaves the evidence incomplete, and the verdict names it."""
    gone = changed(release, "gpu2", collected=(), selected=(), started=(), phases=(), status=5)
    gone = changed(gone, "gpu2", exit=replace(release.record[0].exit, code=5))
    assert named(gone) == (Status.INCOMPLETE, {(Reason.MISSING, "gpu2", id_of("gpu2"))})


def test_a_deleted_gpu_test_and_its_line(release):
    """Deleting the list's line too does not help: the tier is due and its list is empty."""
    gone = changed(release, "gpu2", collected=(), selected=(), started=(), phases=(), status=5)
    gone = changed(gone, "gpu2", exit=replace(release.record[0].exit, code=5))
    lists = {**release.manifest.lists, "gpu2": ()}
    gone = replace(gone, manifest=replace(release.manifest, lists=lists))
    assert (Reason.EMPTY_LIST, "lists", "gpu2") in named(gone)[1]

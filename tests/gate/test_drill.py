"""The regression drill: changes that a careless gate lets through, in recorded evidence and in a real copy."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from gefen_offload.gate import drill, manifest
from gefen_offload.gate.drill import PLANTS
from gefen_offload.gate.reason import Finding, Reason, Status
from gefen_offload.gate.selftest.case import released
from gefen_offload.gate.selftest.evidence import measured
from gefen_offload.gate.selftest.release import MEASURED
from support.checkout import ROOT

ONE_ROW = "tests/offload/test_identity.py::test_offloaded_repeats_resident[block-middle]"


def name(plant):
    return plant.name.replace(" ", "-")


@pytest.fixture
def release(tmp_path):
    return released(tmp_path)


def test_the_release_passes(release):
    """Before anything is planted, the verdict is a releasable pass."""
    verdict = release.verdict()
    assert (verdict.status, verdict.findings, verdict.releasable) == (Status.PASS, (), True)
    assert verdict.headline == "PASS"


@pytest.mark.parametrize("plant", PLANTS, ids=name)
def test_a_plant_in_recorded_evidence_is_named(release, plant):
    """The verdict has the plant's reason alone, about what was planted, and lets nothing be released."""
    verdict = plant.recorded(release).verdict()
    assert [(finding.reason, finding.subject) for finding in verdict.findings] == [
        (plant.reason, plant.recorded_subject)
    ]
    assert (verdict.status, verdict.releasable) == (plant.reason.status, False)


@pytest.mark.parametrize("plant", PLANTS, ids=name)
def test_a_plant_fits_the_checkout(tmp_path, plant):
    """Each fault can be made in a copy of today's checkout, changes it, and leaves Python that can be read."""
    copy = drill.copied(ROOT, tmp_path / "copy")
    before = {path: path.read_bytes() for path in copy.rglob("*.py")}
    plant.edit(copy)
    edited = [path for path, text in before.items() if path.read_bytes() != text]
    assert len(edited) == 1
    ast.parse(edited[0].read_text())


def test_the_drill_runs_tests_that_exist():
    """The tests that must see the planted faults, and the one that is deleted, are mandatory."""
    ids = manifest.load(ROOT / "ci" / "mandatory")["gpu1"]
    assert sum(manifest.within(id, (drill.IDENTITY,)) for id in ids) == 4
    assert f"{drill.PART}::{drill.DELETED}" in ids


def test_one_ulp_is_seen_for_real(tmp_path):
    """A copy whose offloaded step is one ulp off fails the parity test on the simulated accelerator, by name."""
    ulp = PLANTS[0]
    copy = drill.copied(ROOT, tmp_path / "copy")
    ulp.edit(copy)
    found = drill.judged(copy, tmp_path / "run", ("--only", ONE_ROW), tier="cpu")
    assert drill.complaint(ulp, found, ONE_ROW) == ""


ULP = Finding(Reason.FAILED, "gpu1", drill.IDENTITY, "1 ulp apart")


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([ULP], ""),
        ([], "expected FAILED, the gate said nothing"),
        ([ULP, replace(ULP, reason=Reason.SKIPPED)], "expected FAILED, the gate said FAILED, SKIPPED"),
        ([replace(ULP, subject="test_other")], f"FAILED is not about {drill.IDENTITY} 1 ulp: test_other 1 ulp apart"),
        ([replace(ULP, detail="E  RecursionError")], f"FAILED is not about {drill.IDENTITY} 1 ulp: "),
    ],
    ids=["right", "green", "more", "elsewhere", "another-cause"],
)
def test_the_drill_is_exact(found, says):
    """A gate that stays green, gives another reason or cause, or names something else, fails the drill."""
    told = drill.complaint(PLANTS[0], found, PLANTS[0].subject)
    assert told == says or (says.endswith(": ") and told.startswith(says))


def test_a_step_within_the_tripwire(release):
    """5% more time passes: wall time is a tripwire, not a limit."""
    slower = measured(times={"offloaded_step": 1.05 * MEASURED.times["offloaded_step"]})(release)
    assert slower.verdict().status is Status.PASS


def test_a_deleted_gpu_test_and_its_line(release):
    """Deleting the list's line too does not help: the tier is due and its list is empty."""
    gone = drill.without_its_test(release)
    gone = replace(gone, manifest=replace(gone.manifest, lists={**gone.manifest.lists, "gpu1": ()}))
    assert Reason.EMPTY_LIST in {finding.reason for finding in gone.verdict().findings}

"""Comparing measurements: like with like, exact counters, times with their noise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gefen_offload import cli
from gefen_offload.gate import baseline, rundir
from gefen_offload.gate import cli as gate_cli
from gefen_offload.gate.manifest import Manifest
from gefen_offload.gate.reason import Reason, Status
from gefen_offload.gate.selftest.case import MACHINE, Suite, released
from gefen_offload.gate.selftest.release import MEASURED, plain
from support.checkout import git


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


@pytest.fixture
def tree(tmp_path):
    """A repository whose first commit holds one file."""
    git(tmp_path, "init", "-q")
    return committed(tmp_path, "code.py")


def committed(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(len(list(root.rglob("*")))))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", " ".join(names))
    return root


def test_a_baseline_in_its_own_commit(tree):
    """A baseline that was committed alone with its report is in order, and other commits do not matter."""
    committed(tree, "ci/baseline/a.json", "ci/baseline/a.html")
    committed(tree, "code.py")
    assert baseline.mixed_commits(tree) == []


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("ci/baseline/a.json", "ci/baseline/a.html", "code.py"), "changes a baseline and code.py"),
        (("ci/baseline/a.json",), "changes ci/baseline/a.json without its report"),
    ],
    ids=["with-code", "without-report"],
)
def test_a_baseline_among_other_changes(tree, names, says):
    """A commit that loosens a limit together with the code that needs it loosened is named."""
    found = baseline.mixed_commits(committed(tree, *names))
    assert len(found) == 1
    assert found[0].endswith(says)


MEASURES = """
def test_one(record_property):
    record_property("measurement", {noted!r})
"""


def test_the_documented_way_to_a_baseline(tmp_path, monkeypatch):
    """A run without a baseline is incomplete; ``baseline --update`` makes one of it; the same numbers then pass."""
    suite = Suite({"test_it.py": MEASURES.format(noted=plain(MEASURED))})
    done = suite.session(tmp_path)
    run = rundir.make(tmp_path, str(tmp_path / "run"), "run")
    (tmp_path / "cpu.jsonl").rename(run / "sessions" / f"{baseline.CHECK}.jsonl")
    evidence = rundir.Evidence(Manifest({}), (replace(done, tier=baseline.CHECK),), MACHINE, MACHINE, None)
    verdict = evidence.verdict()
    assert [f.reason for f in verdict.findings if f.check == baseline.CHECK] == [Reason.NO_BASELINE]
    assert Reason.NO_BASELINE.status is Status.INCOMPLETE
    rundir.write(run, evidence, verdict)
    (run / "report.html").write_text("the report")
    monkeypatch.setattr(gate_cli, "the_checkout", lambda: tmp_path)
    (tmp_path / "ci").mkdir()
    assert cli.main(["gate", "baseline", "--update", str(run)]) == 0
    assert {path.name for path in (tmp_path / "ci" / "baseline").iterdir()} == {"imaginary-9.json", "imaginary-9.html"}
    made = replace(evidence, baseline=baseline.load(tmp_path / "ci" / "baseline", "Imaginary 9")).verdict()
    assert [f for f in made.findings if f.check == baseline.CHECK] == []


def test_a_verdict_without_performance_is_no_release(tmp_path):
    """``--without-performance`` passes without a measurement, and says in its first line that it is no release."""
    evidence = released(tmp_path)
    manifest = replace(evidence.manifest, performance=False)
    verdict = replace(evidence, manifest=manifest, baseline=None).verdict()
    assert (verdict.status, verdict.releasable) == (Status.PASS, False)
    assert verdict.headline == "PASS (not a release verdict: performance not judged)"

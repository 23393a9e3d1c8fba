"""What must hold for every workflow, and what lets a wheel be published."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys

import pytest

from support.checkout import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOB = re.compile(r"^  ([a-z-]+):\n((?:    .*\n|\n)+)", re.MULTILINE)


def jobs(path):
    return dict(JOB.findall(path.read_text().partition("\njobs:\n")[2] + "\n"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path):
    """Each action is named by a full commit hash, with its version in a comment."""
    uses = re.findall(r"uses: (.*)", path.read_text())
    assert uses
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*", use) for use in uses), uses


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_is_bounded_and_the_workflow_may_nothing(path):
    """No permission at the top, a timeout on each job."""
    assert "\npermissions: {}\n" in path.read_text()
    assert jobs(path)
    assert all("    timeout-minutes: " in body for body in jobs(path).values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_fan_in_job_sees_every_other(path):
    """The job named like the workflow always runs, and needs all the others."""
    found = jobs(path)
    last = found.pop(path.stem)
    assert "    if: always()\n" in last
    needs = re.search(r"needs: \[(.*)\]", last)
    assert needs is not None
    assert sorted(needs[1].split(", ")) == sorted(found)


def test_no_pull_request_reaches_the_gpu_box():
    """Only gpu.yml asks for the self-hosted box, and no pull request triggers it."""
    asking = [path.stem for path in WORKFLOWS if "self-hosted" in path.read_text()]
    assert asking == ["gpu"]
    triggers = (ROOT / ".github" / "workflows" / "gpu.yml").read_text().partition("\npermissions")[0]
    assert re.findall(r"^  ([a-z_]+):", triggers, re.MULTILINE) == ["push", "schedule", "workflow_dispatch"]


def test_missing_artifacts_are_errors():
    """No upload is content with nothing."""
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert text.count("uses: actions/upload-artifact@") == text.count("if-no-files-found: error") > 0


@pytest.fixture
def run(tmp_path):
    """A run directory with a wheel and its passing statement."""
    folder = tmp_path / "run"
    (folder / "wheel").mkdir(parents=True)
    (folder / "wheel" / "a.whl").write_bytes(b"wheel")
    digest = hashlib.sha256(b"wheel").hexdigest()
    subject = [{"name": "a.whl", "digest": {"sha256": digest}}]
    write(folder / "statement.json", {"subject": subject, "predicate": {"result": "PASSED"}})
    write(folder / "verdict.json", {"exit_code": 0, "releasable": True, "headline": "PASS"})
    return folder


def write(path, value):
    path.write_text(json.dumps(value))


def publishable(run):
    command = [sys.executable, str(ROOT / "ci" / "publishable"), str(run), str(run / "dist")]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_judged_wheel_is_publishable(run):
    """A PASSED statement lets exactly its wheel out."""
    assert publishable(run).returncode == 0
    assert (run / "dist" / "a.whl").read_bytes() == b"wheel"


@pytest.mark.parametrize(
    "fault", ["other-wheel", "warned", "not-releasable", "no-statement", "two-subjects", "no-wheel"]
)
def test_nothing_else_is(run, fault):
    """Another wheel, another result, or missing evidence publishes nothing."""
    statement = json.loads((run / "statement.json").read_text())
    if fault == "other-wheel":
        (run / "wheel" / "a.whl").write_bytes(b"another")
    elif fault == "warned":
        write(run / "statement.json", {**statement, "predicate": {"result": "WARNED"}})
    elif fault == "not-releasable":
        write(run / "verdict.json", {"exit_code": 0, "releasable": False, "headline": "PASS (not a release verdict)"})
    elif fault == "no-statement":
        (run / "statement.json").unlink()
    elif fault == "two-subjects":
        write(run / "statement.json", {**statement, "subject": statement["subject"] * 2})
    else:
        (run / "wheel" / "a.whl").unlink()
    done = publishable(run)
    assert done.returncode == 1
    assert "publishable: no: " in done.stderr
    assert not (run / "dist").exists()

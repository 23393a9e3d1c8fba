"""What must hold for every workflow."""

from __future__ import annotations

import re

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


def test_the_baselines_history_is_fetched():
    """The job that runs ./ci/test has the whole history, without which nobody can say how baselines were committed."""
    assert "fetch-depth: 0" in jobs(ROOT / ".github" / "workflows" / "cpu.yml")["test"].partition("./ci/test")[0]


def test_missing_artifacts_are_errors():
    """No upload is content with nothing."""
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert text.count("uses: actions/upload-artifact@") == text.count("if-no-files-found: error") > 0


def test_only_commits_of_main_are_judged_or_published():
    """Before it runs anything of a named commit, gpu.yml asks whether it is one of main; so does release.yml."""
    for name, then in (("gpu", "run: ./ci/gate"), ("release", "run: ./ci/publishable")):
        steps = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text().partition(then)[0]
        assert "fetch-depth: 0" in steps
        assert "./ci/on-main" in steps
        assert "ref:" not in steps


def test_every_commit_has_a_group_of_its_own():
    """A commit that waits for the box is not pushed out by the next one."""
    text = (ROOT / ".github" / "workflows" / "gpu.yml").read_text()
    assert "  group: gpu-${{ inputs.commit || github.sha }}\n  cancel-in-progress: false\n" in text

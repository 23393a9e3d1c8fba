"""The hooks of the self-hosted box, run as the programs that they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.checkout import ROOT

IDLE = "#!/bin/sh\nexit 0\n"
BUSY = "#!/bin/sh\necho '4711, python, GPU-a'\n"
OURS = {
    "GEFEN_OFFLOAD_REPOSITORY": "owner/project",
    "GITHUB_REPOSITORY": "owner/project",
    "GITHUB_REF": "refs/heads/main",
    "GITHUB_EVENT_NAME": "push",
    "GITHUB_RUN_ID": f"12345678901{os.getpid()}",  # a hook ends whatever carries it, a test of another process too
}


@pytest.fixture
def hook(tmp_path):
    """Run a hook with an nvidia-smi of ours on PATH, or without any."""

    def run(name, smi=IDLE, **variables):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        if smi is not None:
            (folder / "nvidia-smi").write_text(smi)
            (folder / "nvidia-smi").chmod(0o755)
        path = {"PATH": f"{folder}:/usr/bin:/bin" if smi is not None else str(folder)}
        command = [sys.executable, str(ROOT / "ci" / "runner" / name)]
        return subprocess.run(command, env={**path, **variables}, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize("event", ["push", "schedule", "workflow_dispatch"])
def test_events_on_main_may_run(hook, event):
    """Pushes to main, schedules and manual runs of this repository start on an idle box."""
    done = hook("job-started", **{**OURS, "GITHUB_EVENT_NAME": event})
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"GITHUB_EVENT_NAME": "pull_request"}, "event pull_request is not allowed"),
        ({"GITHUB_EVENT_NAME": "pull_request_target"}, "event pull_request_target is not allowed"),
        ({"GITHUB_EVENT_NAME": "issue_comment"}, "event issue_comment is not allowed"),
        ({"GITHUB_EVENT_NAME": "workflow_run"}, "event workflow_run is not allowed"),
        ({"GITHUB_EVENT_NAME": ""}, "event none is not allowed"),
        ({"GITHUB_REF": "refs/heads/feature"}, "only from refs/heads/main"),
        ({"GITHUB_REF": "refs/pull/7/merge"}, "only from refs/heads/main"),
        ({"GITHUB_REPOSITORY": "somebody/project"}, "this box serves owner/project"),
        ({"GEFEN_OFFLOAD_REPOSITORY": ""}, "no job runs until it names"),
    ],
    ids=["pull-request", "target", "comment", "workflow-run", "none", "branch", "merge-ref", "fork", "unset"],
)
def test_everything_else_is_refused(hook, change, says):
    """Anything that is not on the list does not start, and the log says why."""
    done = hook("job-started", **{**OURS, **change})
    assert done.returncode == 1
    assert says in done.stdout


def test_a_busy_box_does_not_start(hook):
    """A GPU that somebody holds keeps the job from starting."""
    done = hook("job-started", BUSY, **OURS)
    assert done.returncode == 1
    assert "on a GPU: 4711, python, GPU-a" in done.stdout


@pytest.mark.parametrize("name", ["job-started", "job-completed"])
def test_a_box_whose_gpus_cannot_be_seen_is_not_idle(hook, name):
    """Without nvidia-smi nothing is believed to be idle."""
    done = hook(name, None, **OURS)
    assert done.returncode == 1
    assert "nvidia-smi is not on PATH" in done.stdout


def test_a_clean_job_completes(hook):
    """A job that left nothing on an idle box is in order."""
    done = hook("job-completed", **OURS)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_left_over_process_is_found_and_ended(hook):
    """A process of the job that runs on is named, killed, and makes the hook fail; another job's is left alone."""
    ours = {"PATH": os.environ["PATH"], "GITHUB_RUN_ID": OURS["GITHUB_RUN_ID"]}
    left = subprocess.Popen(["sleep", "600"], env=ours, start_new_session=True)
    other = subprocess.Popen(["sleep", "601"], env={**ours, "GITHUB_RUN_ID": "555"})
    try:
        done = hook("job-completed", **OURS)
        assert done.returncode == 1
        assert f"left running, killed: process {left.pid}: sleep 600" in done.stdout
        assert left.wait(10) == -9
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_a_gpu_still_held_fails_the_completion(hook):
    """A GPU that is not idle after the job is an error."""
    assert hook("job-completed", BUSY, **OURS).returncode == 1

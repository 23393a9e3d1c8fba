"""What lets a wheel be published: its evidence, a run of the gpu workflow, and a commit of main; run as programs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.checkout import ROOT, git
from support.kept import WHEEL, kept

ABSENT = ("torch", "numpy", "rich", "jinja2", "xdist", "setuptools")
BARE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program where only the standard library and pytest are installed."""


def program(name, *arguments, **given):
    """A program of ci/."""
    command = [sys.executable, "-c", BARE, str(ROOT / "ci" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **given)


@pytest.fixture
def run(tmp_path):
    """A kept run of a release."""
    kept(tmp_path / "run")
    return tmp_path / "run"


def test_the_judged_wheel_is_publishable(run, tmp_path):
    """A release verdict that follows from its evidence lets exactly its wheel out, without torch."""
    done = program("publishable", run, tmp_path / "dist")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [WHEEL]
    assert (tmp_path / "dist" / WHEEL).read_bytes() == (run / "wheel" / WHEEL).read_bytes()


def edited(name, old, new):
    """An edit of one file of a run directory."""

    def edit(run):
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return edit


FAULTS = {
    "other-wheel": (edited(f"wheel/{WHEEL}", "judged", "another"), f"wheel/{WHEEL} in "),
    "other-subject": (edited("statement.json", WHEEL, "other.whl"), "statement.json in "),
    "warned": (edited("statement.json", "PASSED", "WARNED"), "statement.json in "),
    "other-verdict": (edited("verdict.json", '"releasable": true', '"releasable": false'), "verdict.json in "),
    "dirty": (edited("facts.json", '"claimed": false', '"claimed": true'), "its evidence gives PASS (not a release"),
    "less-to-run": (edited("manifest.json", '"gpu2"', '"gpu8"'), "its evidence gives INCOMPLETE"),
    "failed": (edited("sessions/gpu2.jsonl", "passed", "failed"), "its evidence gives INCOMPLETE"),
    "no-record": (lambda run: (run / "sessions" / "cpu.jsonl").unlink(), "its evidence gives INCOMPLETE"),
    "no-statement": (lambda run: (run / "statement.json").unlink(), "statement.json in "),
    "no-wheel": (lambda run: (run / "wheel" / WHEEL).unlink(), f"wheel/{WHEEL} in "),
    "no-facts": (lambda run: (run / "facts.json").unlink(), "is no complete run directory"),
}


@pytest.mark.parametrize(("fault", "says"), FAULTS.values(), ids=FAULTS.keys())
def test_nothing_else_is(run, tmp_path, fault, says):
    """Another wheel, another result, edited or missing evidence publishes nothing."""
    fault(run)
    done = program("publishable", run, tmp_path / "dist")
    assert done.returncode == 1
    assert done.stderr.startswith("publishable: no: ")
    assert says in done.stderr
    assert not (tmp_path / "dist").exists()


def test_two_forged_words_publish_nothing(tmp_path):
    """A folder that holds a statement and a verdict to one's liking, and no evidence, is no run directory."""
    (tmp_path / "wheel").mkdir()
    (tmp_path / "wheel" / "a.whl").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    subject = [{"name": "a.whl", "digest": {"sha256": empty}}]
    (tmp_path / "statement.json").write_text(json.dumps({"subject": subject, "predicate": {"result": "PASSED"}}))
    (tmp_path / "verdict.json").write_text(json.dumps({"exit_code": 0, "releasable": True, "headline": "PASS"}))
    done = program("publishable", tmp_path, tmp_path / "dist")
    assert done.returncode == 1
    assert "is no complete run directory" in done.stderr


RUN = {
    "id": 7,
    "path": ".github/workflows/gpu.yml",
    "event": "push",
    "head_branch": "main",
    "repository": {"full_name": "owner/project"},
    "head_repository": {"full_name": "owner/project"},
    "conclusion": "success",
    "created_at": "2025-01-08T00:00:00Z",
}


def last_pass(given, *arguments, days="4"):
    """``ci/last-pass`` on the tenth of January."""
    command = ["--days", days, "--repository", "owner/project", "--now", "2025-01-10T00:00:00Z", *arguments]
    return program("last-pass", *command, input=given if isinstance(given, str) else json.dumps(given))


@pytest.mark.parametrize(
    "given",
    [
        RUN,
        {"workflow_runs": [{**RUN, "id": 8, "conclusion": "failure"}, RUN]},
        {"workflow_runs": [{**RUN, "event": "schedule"}]},
        {**RUN, "event": "workflow_dispatch", "path": ".github/workflows/gpu.yml@refs/heads/main"},
        {**RUN, "created_at": "2025-01-10T00:05:00Z"},
    ],
    ids=["one", "second-of-two", "nightly", "by-hand", "another-clock"],
)
def test_a_recent_success_of_the_gpu_workflow_counts(given):
    """A success of gpu.yml on main counts whether it is asked for alone or in a list."""
    done = last_pass(given, "--run", "7")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": ".github/workflows/cpu.yml"}, "of the workflow .github/workflows/cpu.yml"),
        ({"name": "gpu", "path": None}, "of the workflow None"),
        ({"event": "pull_request"}, "event pull_request on main"),
        ({"event": "pull_request_target"}, "event pull_request_target on main"),
        ({"head_branch": "feature"}, "event push on feature"),
        ({"head_repository": {"full_name": "fork/project"}}, "fork/project"),
        ({"head_repository": None}, "None"),
        ({"repository": {"full_name": "other/project"}, "head_repository": {"full_name": "other/project"}}, "other"),
        ({"conclusion": "failure"}, "ended in failure"),
        ({"conclusion": None}, "ended in None"),
        ({"created_at": "2025-01-05T00:00:00Z"}, "5.0 days old"),
        ({"created_at": "2025-01-11T00:00:00Z"}, "-1.0 days old"),
        ({"id": 8}, "not the run 7"),
    ],
    ids=[
        "another-workflow",
        "its-name-alone",
        "pull-request",
        "target",
        "branch",
        "fork",
        "fork-gone",
        "elsewhere",
        "failed",
        "running",
        "old",
        "future",
        "another-run",
    ],
)
def test_no_other_run_counts(change, says):
    """What is no recent success of this repository's own gpu.yml on main, begun as the box allows, is red, and why."""
    done = last_pass({**RUN, **change}, "--run", "7")
    assert done.returncode == 1
    assert says in done.stdout


@pytest.mark.parametrize("given", ["", "[]", "{}", "null", '{"workflow_runs": []}', '{"message": "Not Found"}'])
def test_no_runs_are_red(given):
    """An answer without runs, or that is none, is red with a sentence."""
    done = last_pass(given)
    assert (done.returncode, done.stderr) == (1, "")
    assert "none is a success" in done.stdout


@pytest.mark.parametrize("days", ["nan", "inf", "0", "-1"])
def test_an_age_without_end_is_wrong_usage(days):
    """No number of days lets any age pass."""
    assert last_pass(RUN, days=days).returncode == 2


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of a repository with a commit on main, one on a branch, and one that was never pushed."""
    origin, here = tmp_path_factory.mktemp("origin"), tmp_path_factory.mktemp("clone")
    git(origin, "init", "-q", "-b", "main")
    for branch in ("main", "feature"):
        git(origin, "checkout", "-q", "-B", branch)
        git(origin, "commit", "-q", "--allow-empty", "-m", branch)
    git(origin, "checkout", "-q", "main")
    git(origin, "commit", "-q", "--allow-empty", "-m", "second")
    git(here, "clone", "-q", str(origin), ".")
    git(here, "commit", "-q", "--allow-empty", "-m", "own")
    return here


@pytest.mark.parametrize(
    ("commit", "says"),
    [
        ("origin/main", ""),
        ("origin/main~1", ""),
        ("origin/feature", "is not a commit of main"),
        ("HEAD", "is not a commit of main"),
        ("0" * 40, "is not a commit of main"),
        ("origin/main^{tree}", "is not a commit of main"),
        (None, "is no full commit hash"),
        ("main", "is no full commit hash"),
        ("--help", "is no full commit hash"),
    ],
    ids=["head", "older", "branch", "local", "unknown", "tree", "none", "name", "option"],
)
def test_a_commit_of_main(clone, commit, says):
    """A commit that main has is let through, and no other, nor a name that somebody could move."""
    named = "/" in (commit or "") or commit == "HEAD"
    given = [git(clone, "rev-parse", commit)] if named else [commit] if commit else []
    done = subprocess.run([ROOT / "ci" / "on-main", *given], cwd=clone, capture_output=True, text=True)
    assert (done.returncode == 0) == (says == "")
    assert says in done.stderr


def test_a_cut_history_proves_nothing(clone, tmp_path):
    """In a shallow clone no commit is said to be one of main."""
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{clone}", ".")
    head = git(tmp_path, "rev-parse", "origin/main")
    done = subprocess.run([ROOT / "ci" / "on-main", head], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the history was cut" in done.stderr

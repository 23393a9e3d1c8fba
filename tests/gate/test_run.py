"""A whole run of the gate on a small checkout: wheel, isolated import, smoke, one tier, verdict."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from gefen_offload.gate import manifest, rundir
from support.checkout import ROOT, START, git

TEST = """
import torch
import gefen_offload

def test_one():
    assert gefen_offload.__version__
"""
ID = "tests/test_small.py::test_one"


@pytest.fixture
def small(tmp_path):
    """This checkout's package and packaging with one test, committed, in a path with a space."""
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "gefen_offload", root / "gefen_offload", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "conftest.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    (root / "tests").mkdir()
    (root / "tests" / "test_small.py").write_text(TEST)
    for tier, ids in (("cpu", [ID]), ("gloo2", ["tests/test_small.py::test_ranks"])):
        (root / "ci" / "mandatory").mkdir(parents=True, exist_ok=True)
        (root / "ci" / "mandatory" / f"{tier}.txt").write_text(manifest.render(tier, ids))
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "small")
    return root


def gate(root, *arguments):
    """``gate run`` of the cpu tier from that checkout's own files; the selftest is tested elsewhere."""
    fixed = ["gate", "run", "--no-selftest", "--tier", "cpu", "--run-dir", str(root.parent / "run")]
    return subprocess.run(
        [sys.executable, "-c", START, str(root), *fixed, *arguments],
        cwd=root,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )


def evidence(root, name):
    return json.loads((root.parent / "run" / name).read_text())


def test_a_clean_checkout_passes_on_its_wheel(small):
    """The tier passes, every module came from the installed wheel, and the statement is about that wheel."""
    done = gate(small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("PASS (not a release verdict: 0 GPUs; not run: gloo2, gpu1, gpu2")
    facts = evidence(small, "facts.json")["before"]
    assert facts["source"]["commit"] == git(small, "rev-parse", "HEAD")
    assert facts["smoke"] is None
    record = (small.parent / "run" / "sessions" / "cpu.jsonl").read_text()
    assert facts["wheel"]["site"] + "/gefen_offload/__init__.py" in record
    assert str(small / "gefen_offload") not in record
    assert evidence(small, "statement.json")["subject"][0]["digest"]["sha256"] == facts["wheel"]["sha256"]
    assert git(small, "status", "--porcelain") == ""
    kept = rundir.load(small.parent / "run")
    assert rundir.strange(small.parent / "run", kept, kept.verdict()) == []


def test_an_import_from_the_checkout_is_noticed(small):
    """A conftest that points the package at the checkout makes the evidence incomplete."""
    meddles = f"import gefen_offload\ngefen_offload.__path__.insert(0, {str(small / 'gefen_offload')!r})\n"
    (small / "tests" / "conftest.py").write_text(meddles)
    (small / "tests" / "test_small.py").write_text(f"import gefen_offload.cli\n{TEST}")
    done = gate(small, "--allow-dirty")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "IMPORT_SHADOWED" in done.stdout


def test_uncommitted_changes_are_refused_before_anything_runs(small):
    """A dirty tree ends the run with 3 before a session starts."""
    (small / "tests" / "test_new.py").write_text("")
    done = gate(small)
    assert done.returncode == 3
    assert "DIRTY_TREE x1" in done.stdout
    assert list((small.parent / "run" / "sessions").iterdir()) == []


def test_a_required_tier_is_refused_before_anything_runs(small):
    """--require gpu2 without GPUs ends the run with 3 before a session starts."""
    done = gate(small, "--require", "gpu2")
    assert done.returncode == 3
    assert "TIER_UNAVAILABLE x1" in done.stdout


def test_a_wheel_of_another_source_is_noticed(small):
    """--wheel with a wheel that lacks the checkout's change is stale."""
    assert gate(small).returncode == 0
    wheel = next((small.parent / "run" / "wheel").iterdir())
    shutil.move(small.parent / "run", small.parent / "first")
    (small / "gefen_offload" / "__init__.py").open("a").write("# changed\n")
    git(small, "commit", "-q", "-a", "-m", "changed")
    done = gate(small, "--wheel", str(small.parent / "first" / "wheel" / wheel.name))
    assert done.returncode == 4
    assert "STALE_WHEEL x1" in done.stdout
    assert "gefen_offload/__init__.py" in done.stdout

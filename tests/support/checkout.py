"""The checkout that the tests stand in, and small trees to try the gate on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gefen_offload.gate.environment import START

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``gefen-offload`` from the checkout's files in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", START, str(ROOT), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def git(folder: Path, *arguments: str) -> str:
    """Run git with an identity of the tests' own."""
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.invalid"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()

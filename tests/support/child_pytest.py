"""A pytest of its own, started as a process: what its tests reported, and what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
PATIENCE = 240.0


@dataclass(frozen=True)
class Report:
    """One phase of one test, as the child's pytest reported it."""

    name: str
    when: str
    outcome: str
    text: str
    seconds: float
    properties: list[Any]


def _default_signals() -> None:
    """A run in the background (a shell's `&`, nohup) ignores some signals, and its children would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _own_environment() -> dict[str, str]:
    """The environment without what tells a process that it is an xdist worker: the child is none, its parent may be."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


@dataclass
class ChildPytest:
    """A child pytest with a temporary directory of its own, so that every file it leaves can be seen."""

    folder: Path
    arguments: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)
    new_session: bool = True

    def __post_init__(self) -> None:
        self.temp = self.folder / "temp"
        self.temp.mkdir(exist_ok=True)
        self.reports_file = self.folder / "reports.jsonl"
        command = [sys.executable, "-m", "pytest", "-p", "support.report_lines", "-p", "no:cacheprovider"]
        options = ["--rootdir", str(self.folder), "-c", os.devnull, "--ranks-artifacts", str(self.folder / "artifacts")]
        self.process = subprocess.Popen(
            [*command, *options, *self.arguments],
            stdout=open(self.folder / "stdout", "wb"),  # noqa: SIM115 (the child's, for its whole life)
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env={**_own_environment(), **self._variables(), **self.environ},
            start_new_session=self.new_session,
            preexec_fn=_default_signals,
        )

    @staticmethod
    def path(*first: str) -> str:
        """The module path of a child, with folders of its own put first."""
        return os.pathsep.join(filter(None, [*first, str(TESTS), os.environ.get("PYTHONPATH")]))

    def _variables(self) -> dict[str, str]:
        variables = {"TMPDIR": str(self.temp), "PYTHONPATH": self.path(), "REPORT_LINES": str(self.reports_file)}
        return {**variables, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}

    def wait(self, patience: float = PATIENCE) -> int:
        """The exit status; the child is killed if it outlives the patience."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the child pytest did not end in {patience} s:\n{self.output}") from None

    @property
    def output(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def reports(self) -> list[Report]:
        if not self.reports_file.exists():
            return []
        return [Report(**json.loads(line)) for line in self.reports_file.read_text().splitlines()]

    def report(self, name: str, when: str = "call") -> Report:
        """The one report of a test's phase."""
        found = [r for r in self.reports if r.name == name and r.when == when]
        assert len(found) == 1, f"{len(found)} reports of {name} ({when}):\n{self.output[-6000:]}"
        return found[0]

    def left_behind(self) -> list[str]:
        """Files in its temporary directory, beside those that pytest and torch's compiler keep on purpose."""
        theirs = ("pytest-of-", "torchinductor_")
        return [str(p) for p in self.temp.iterdir() if not p.name.startswith(theirs)]


def run_child(folder: Path, *arguments: str, **environ: str) -> ChildPytest:
    """Run a child pytest to its end."""
    child = ChildPytest(folder, arguments, environ)
    child.wait()
    return child


def wait_until(fact: Callable[[], bool], patience: float = 30.0, what: str = "the expected state") -> None:
    """Wait for a fact of the outside world, such as the end of a foreign process."""
    limit = time.monotonic() + patience
    while not fact():
        assert time.monotonic() < limit, f"{what} did not come about in {patience} s"
        time.sleep(0.02)

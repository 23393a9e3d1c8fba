"""Everything that needs no GPU: ruff, mypy, the cpu and gloo tests, the mandatory lists and the gate's selftest.

Arguments after ``--`` go to pytest, and then only the tests run: ``./ci/test -- -k codebook``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from gefen_offload.gate import checkout, environment, session
from gefen_offload.gate.reason import Status

TIERS = "cpu or gloo2 or gloo4"
PROCESSES = 2
ELSEWHERE = "import sys; sys.path[:] = filter(None, sys.path)"
"""Takes the current folder off the module path, where Python has put it on."""


@dataclass(frozen=True)
class Result:
    """How one check ended: its exit code, or None where it could not run and ``why`` says so."""

    name: str
    code: int | None
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Place:
    """Where the checks run: the checkout, the module path that shows it, and a folder for temporary files."""

    root: Path
    path: Path
    scratch: Path

    def environment(self) -> dict[str, str]:
        """The environment of a judged session, with the checkout importable and importing from nowhere else."""
        caches = {} if os.access(self.root, os.W_OK) else {"MYPY_CACHE_DIR": str(self.scratch / "mypy")}
        path = [str(self.path), *session.inherited_path(checkout.PACKAGE)]
        return {**session.inherited(), **caches, "PYTHONPATH": os.pathsep.join(path)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    names = ", ".join(CHECKS)
    parser.add_argument("--only", action="append", choices=list(CHECKS), help=f"run only this check: {names}")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")


def main(arguments: argparse.Namespace) -> int:
    """Run the checks and print how each ended; 0 if none failed."""
    root = checkout.root()
    if root is None:
        print("gefen-offload test: run it from a checkout (./ci/test)", file=sys.stderr)
        return 2
    chosen = ["tests"] if arguments.pytest else arguments.only or list(CHECKS)
    with tempfile.TemporaryDirectory(prefix="gefen-offload-test-") as scratch:
        path = checkout.view(root, Path(scratch) / "path")
        place = Place(root, path, Path(scratch))
        results = [timed(name, place, arguments.pytest) for name in chosen]
        closing_line = counted(place.scratch)
    code = closing(results, asked=arguments.only or [])
    if closing_line:
        print(closing_line)
    return code


def timed(name: str, place: Place, extra: list[str]) -> Result:
    """Run one check and time it."""
    print(f"== {name}", flush=True)
    began = time.monotonic()
    code, why = CHECKS[name](place, extra)
    return Result(name, code, time.monotonic() - began, why)


def closing(results: list[Result], asked: list[str]) -> int:
    """Say how each check ended; failures decide, and what was `asked` for by name and could not run is one."""
    print("== checks")
    for result in results:
        says = "not run" if result.code is None else "ok" if result.code == 0 else f"FAILED ({result.code})"
        print(f"  {result.name:14} {says:10} {result.seconds:6.1f} s  {result.why}".rstrip())
    return int(any(result.code or (result.code is None and result.name in asked) for result in results))


def counted(scratch: Path) -> str:
    """Pytest's closing line over all its runs, or nothing where it did not run."""
    suites = [suite for path in scratch.glob("junit-*.xml") for suite in ElementTree.parse(path).iter("testsuite")]
    if not suites:
        return ""
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    bad = failed + errors
    return f"pytest: {total - bad - skipped} passed, {bad} failed, {skipped} skipped"


def call(place: Place, *command: str) -> int:
    """Run a command in the checkout, its output shown as it comes."""
    return subprocess.run(command, cwd=place.root, env=place.environment(), stdin=subprocess.DEVNULL).returncode


def module_check(module: str, *arguments: str) -> Callable[[Place, list[str]], tuple[int | None, str]]:
    """A check that is one run of a module, not run where the interpreter lacks it."""

    def check(place: Place, _: list[str]) -> tuple[int | None, str]:
        if importlib.util.find_spec(module) is None:
            return None, f"{module} is not installed here"
        return call(place, sys.executable, "-m", module, *arguments), ""

    return check


def workflows(place: Place, _: list[str]) -> tuple[int | None, str]:
    """The workflows under zizmor and actionlint; the script says by name which of them is missing."""
    if shutil.which("zizmor") is None:
        return None, "zizmor is not installed here"
    return call(place, str(place.root / "ci" / "workflows")), ""


def pytest(place: Place, *arguments: str) -> int:
    """Run pytest without the current folder on the module path; its counts go to a file for the closing line."""
    start = f"{ELSEWHERE}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    counts = place.scratch / f"junit-{len(list(place.scratch.glob('junit-*.xml')))}.xml"
    return call(place, sys.executable, "-c", start, f"--junitxml={counts}", *arguments)


def tests(place: Place, extra: list[str]) -> tuple[int | None, str]:
    """The tests that need no GPU, ranks pooled; cpu tests on two processes where pytest-xdist is there."""
    if why := environment.lacking():
        return 1, why
    if extra:
        return pytest(place, *(() if "-m" in extra else ("-m", TIERS)), *extra), ""
    spread = ("-n", str(PROCESSES)) if importlib.util.find_spec("xdist") else ()
    cpu = pytest(place, "-q", "-m", "cpu", *spread)
    ranks = pytest(place, "-q", "-m", "gloo2 or gloo4")
    return cpu or ranks, ""


def fresh(place: Place, _: list[str]) -> tuple[int | None, str]:
    """A sample of the gloo tests again with new processes for each: pooled and fresh must agree."""
    ids = sample(place)
    if not ids:
        return 1, "ci/mandatory/gloo2.txt lists no test: gefen-offload gate manifest --update"
    return pytest(place, "-q", "--ranks-fresh", *ids), ""


def sample(place: Place) -> list[str]:
    """Every so-manyth gloo2 test of the mandatory list."""
    from gefen_offload.gate.manifest import load

    ids = load(place.root / "ci" / "mandatory").get("gloo2", ())
    return list(ids[:: max(1, len(ids) // 12)])


def gate(*arguments: str) -> Callable[[Place, list[str]], tuple[int | None, str]]:
    """A check that is one of the gate's own commands."""

    def check(place: Place, _: list[str]) -> tuple[int | None, str]:
        start = f"{ELSEWHERE}; from gefen_offload.cli import main; sys.exit(main())"
        return call(place, sys.executable, "-c", start, "gate", *arguments), ""

    return check


def baselines(place: Place, extra: list[str]) -> tuple[int | None, str]:
    """How the performance baselines were committed, where there is a history that can tell."""
    code, _ = gate("baseline", "--check")(place, extra)
    return (None, "there is no whole history here") if code == Status.UNFIT else (code, "")


CHECKS: dict[str, Callable[[Place, list[str]], tuple[int | None, str]]] = {
    "lint": module_check("ruff", "check", "--no-cache", "."),
    "format": module_check("ruff", "format", "--no-cache", "--check", "."),
    "types": module_check("mypy"),
    "workflows": workflows,
    "manifest": gate("manifest", "--check"),
    "baseline": baselines,
    "selftest": gate("selftest"),
    "tests": tests,
    "fresh": fresh,
}

"""What a case is, and what cases are made of: real sessions of miniature suites, facts of an imaginary machine."""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

from gefen_offload.gate import session, shadow
from gefen_offload.gate.baseline import Measurement
from gefen_offload.gate.facts import Facts, Gpu, Software, Wheel
from gefen_offload.gate.manifest import Manifest
from gefen_offload.gate.progress import Watch
from gefen_offload.gate.reason import Reason
from gefen_offload.gate.record import Session
from gefen_offload.gate.verdict import Verdict, decide

TIMEOUT = 60.0
GPUS = tuple(Gpu(f"GPU-{letter}", "Imaginary 9", "1.0", 80000, 81000) for letter in "ab")
SOFTWARE = Software("3.12.0", "2.0+imaginary")
MACHINE = Facts(gpus=GPUS, foreign=(), software=SOFTWARE, source=None, wheel=None)

CONFTEST = """
    import pytest
    TIERS = {"cpu", "gloo2", "gpu1", "gpu2"}
    def pytest_configure(config):
        for tier in TIERS:
            config.addinivalue_line("markers", tier)
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(items):
        for item in items:
            if not TIERS & {mark.name for mark in item.iter_markers()}:
                item.add_marker("cpu")
"""
SUITE = """
    def test_one():
        assert 1 + 1 == 2
    def test_two():
        assert 2 + 2 == 4
"""
IDS = ("test_it.py::test_one", "test_it.py::test_two")


@dataclass(frozen=True)
class Evidence:
    """The five arguments of a verdict, with the imaginary machine's facts where nothing else is given."""

    manifest: Manifest
    record: tuple[Session, ...]
    before: Facts = MACHINE
    after: Facts | None = None
    baseline: Measurement | None = None

    def verdict(self) -> Verdict:
        """The verdict on it."""
        return decide(self.manifest, self.record, self.before, self.after or self.before, self.baseline)


Maker = Callable[[Path], Evidence]
"""Makes evidence; the path is an empty folder of its own."""


@dataclass(frozen=True)
class Case:
    """A fault with its clean twin, and the exact reasons that the gate must give for the fault."""

    name: str
    expected: frozenset[Reason]
    broken: Maker
    clean: Maker

    def complaint(self, folder: Path) -> str:
        """What the gate got wrong; empty where it gave exactly the reasons and passed the twin."""
        found = frozenset(finding.reason for finding in run(self.broken, folder / "broken").findings)
        if found != self.expected:
            return f"{self.name}: expected {names(self.expected)}, the gate said {names(found)}"
        twin = run(self.clean, folder / "clean")
        if twin.findings:
            return f"{self.name}: the clean twin got {names({finding.reason for finding in twin.findings})}"
        return ""


def run(maker: Maker, folder: Path) -> Verdict:
    """Make the evidence in a folder of its own, and decide."""
    folder.mkdir(parents=True)
    return maker(folder).verdict()


def names(reasons: frozenset[Reason] | set[Reason]) -> str:
    """Reasons by name, in a fixed order."""
    return ", ".join(sorted(reason.name for reason in reasons)) or "nothing"


@dataclass(frozen=True)
class Suite:
    """A miniature suite to be run for real."""

    files: Mapping[str, str]
    ids: tuple[str, ...] = IDS
    tier: str = "cpu"
    timeout: float = TIMEOUT
    package: str | None = None
    grace: float = 1.0
    workers: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)

    def lay(self, folder: Path) -> None:
        """Write the files; a conftest of theirs follows the common one."""
        for name, text in {"test_it.py": SUITE, **self.files, "conftest.py": ""}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text), encoding="utf-8")
        conftest = dedent(CONFTEST) + dedent(self.files.get("conftest.py", ""))
        (folder / "conftest.py").write_text(conftest, encoding="utf-8")

    def session(self, folder: Path, watch: Watch | None = None, stopping: threading.Event | None = None) -> Session:
        """Run it in a pytest of its own, with the gate's recorder and no other plugin but pytest-xdist for workers."""
        suite = folder / "suite"
        self.lay(suite)
        spread = ("-p", "xdist.plugin", *session.spread(self.workers)) if self.workers > 1 else ()
        arguments = ("-q", "-m", self.tier, "-p", "no:cacheprovider", *spread, "--rootdir", str(suite), str(suite))
        plan = session.Plan(
            self.tier,
            sys.executable,
            suite,
            arguments,
            self.timeout,
            self.package,
            (str(folder / "site"), str(suite)) if self.package else (),
            {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", **self.variables},
            self.grace,
        )
        return session.run(plan, folder, watch, stopping)

    def manifest(self, folder: Path) -> Manifest:
        """The list that it must run."""
        seen = shadow.shadowed(folder / "suite", (".",))
        return Manifest({self.tier: self.ids}, shadowed=seen, tiers=(self.tier,), performance=False)

    def evidence(self, folder: Path) -> Evidence:
        """Run it, and put the evidence together."""
        done = self.session(folder)
        return Evidence(self.manifest(folder), (done,))


def suite_case(name: str, *expected: Reason, broken: Suite, clean: Suite | None = None) -> Case:
    """A case whose two sides are suites; the usual clean twin is the common suite, in as many processes."""
    twin = clean.evidence if clean else lambda folder: common(broken.tier, broken.workers)
    return Case(name, frozenset(expected), broken.evidence, twin)


@functools.cache
def common(tier: str, workers: int) -> Evidence:
    """The common suite's evidence, which all cases share whose twin it is."""
    with tempfile.TemporaryDirectory(prefix="gefen-offload-selftest-") as folder:
        return Suite({}, tier=tier, workers=workers).evidence(Path(folder))


def facts_case(name: str, *expected: Reason, change: Callable[[Evidence], Evidence]) -> Case:
    """A case whose fault is in the evidence about a session that is itself in order; the machine has two GPUs."""
    return Case(name, frozenset(expected), lambda folder: change(released(folder)), released)


def released(folder: Path) -> Evidence:
    """Complete evidence of a release."""
    from gefen_offload.gate.selftest.release import evidence

    return evidence(folder)


def wheel(folder: Path, files: Mapping[str, str]) -> Wheel:
    """A wheel that holds these files, as far as facts go."""
    return Wheel("imaginary-1.0-py3-none-any.whl", "0" * 64, str(folder), dict(files))

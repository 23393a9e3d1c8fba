"""The regression drill: is the gate red, and for the right reason, when something is really wrong?

Each plant is one change that a careless gate lets through. On a GPU it is made in a copy of the checkout and the gate
runs there, on the tests and measurements that matter; without one, the same fault is put into recorded evidence.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gefen_offload.gate import baseline, checkout, facts
from gefen_offload.gate.environment import START
from gefen_offload.gate.outcome import PASSED
from gefen_offload.gate.reason import Finding, Reason
from gefen_offload.gate.record import Phase
from gefen_offload.gate.selftest.case import Evidence, names, released
from gefen_offload.gate.selftest.evidence import measured
from gefen_offload.gate.selftest.release import MEASURED, id_of
from gefen_offload.gate.summary import gist

IDENTITY = "tests/offload/test_identity.py::test_parameters_of_megabytes_on_a_gpu"
DELETED = "test_a_checkpoint_crosses_over"
PART = "tests/offload/test_cuda.py"
TIMEOUT = 150.0

# What is appended to the optimizer's module, so that a plant fits whatever stands there.
OVERRIDE = """

import time as planted_time

planted_over = Gefen.step


def planted_step(self, closure=None):
    began = planted_time.perf_counter()
    {before}
    result = planted_over(self, closure)
    {after}
    return result


Gefen.step = planted_step
"""
ONE_ULP = """if self.state_offload_active:
        first = next(p for group in self.param_groups for p in group["params"] if p.grad is not None)
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
        first.data.view(-1)[:1].view(integers).add_(1)"""
SLOWER = """torch.cuda.synchronize()
    until = planted_time.perf_counter() + 0.2 * (planted_time.perf_counter() - began)
    while planted_time.perf_counter() < until:
        pass"""
LARGER = 'held = torch.empty(50 * 2**20, dtype=torch.uint8, device=self.param_groups[0]["params"][0].device)'


@dataclass(frozen=True)
class Plant:
    """A fault, and the reason, with its subject, that the gate must give for it and for nothing else."""

    name: str
    reason: Reason
    subject: str
    edit: Callable[[Path], None]
    """Makes the fault in a copy of the checkout."""
    arguments: tuple[str, ...]
    """What of the gate shows it."""
    recorded: Callable[[Evidence], Evidence]
    """The same fault in the evidence of a release."""
    recorded_subject: str
    says: str = ""
    """What the finding's detail must hold, where the reason alone could have another cause."""


def appended(before: str = "pass", after: str = "pass") -> Callable[[Path], None]:
    """An edit that wraps the optimizer's step."""

    def edit(root: Path) -> None:
        module = root / checkout.PACKAGE / "optim" / "gefen.py"
        text = module.read_text(encoding="utf-8")
        module.write_text(text + OVERRIDE.format(before=before, after=after), encoding="utf-8")

    return edit


def deleted(root: Path) -> None:
    """The edit that takes one GPU test out of its file."""
    path = root / PART
    text = path.read_text(encoding="utf-8")
    if text.count(f"def {DELETED}(") != 1:
        raise LookupError(f"{PART} has no {DELETED}: the drill must delete another test")
    path.write_text(text.replace(f"def {DELETED}(", f"def no_{DELETED}("), encoding="utf-8")


def failed_by_one_ulp(evidence: Evidence) -> Evidence:
    """A parity test that failed."""
    id, text = id_of("gpu1"), "E  first difference: step 3, p0[17]: 1 ulp"
    phases = (Phase(id, "setup", PASSED), Phase(id, "call", "failed", text=text), Phase(id, "teardown", PASSED))
    return changed(evidence, "gpu1", phases=phases, status=1, exit=replace(evidence.record[0].exit, code=1))


def without_its_test(evidence: Evidence) -> Evidence:
    """A session that collected nothing."""
    ended = replace(evidence.record[0].exit, code=5)
    return changed(evidence, "gpu1", collected=(), selected=(), started=(), phases=(), status=5, exit=ended)


def changed(evidence: Evidence, tier: str, **changes: object) -> Evidence:
    """The evidence with one tier's session changed."""
    record = tuple(replace(s, **changes) if s.tier == tier else s for s in evidence.record)  # type: ignore[arg-type]
    return replace(evidence, record=record)


MEASURE = ("--with-performance",)
PLANTS = (
    Plant(
        "one ulp in the offloaded path",
        Reason.FAILED,
        IDENTITY,
        appended(after=ONE_ULP),
        ("--only", IDENTITY),
        failed_by_one_ulp,
        id_of("gpu1"),
        "1 ulp",
    ),
    Plant(
        "a step that takes a fifth longer",
        Reason.TIME_EXCEEDED,
        "step",
        appended(after=SLOWER),
        ("--only", IDENTITY, *MEASURE),
        measured(times={name: 1.2 * value for name, value in MEASURED.times.items()}),
        "offloaded_step",
    ),
    Plant(
        "50 MiB more GPU memory",
        Reason.COUNTER_EXCEEDED,
        "offloaded_transient_bytes",
        appended(before=LARGER),
        ("--only", IDENTITY, *MEASURE),
        measured(counters={**MEASURED.counters, "peak_bytes": MEASURED.counters["peak_bytes"] + 50 * 2**20}),
        "peak_bytes",
    ),
    Plant(
        "a deleted GPU test",
        Reason.MISSING,
        f"{PART}::{DELETED}",
        deleted,
        ("--only", PART),
        without_its_test,
        id_of("gpu1"),
    ),
)


def main(root: Path, on_record: bool = False, keep: Path | None = None) -> int:
    """Plant each fault in turn; 0 if the gate named each, and nothing but it."""
    began = time.monotonic()
    if on_record or not facts.gpus():
        print("drill: in recorded evidence" + ("" if on_record else ": there is no GPU here"))
        wrong = drilled(recorded)
    else:
        with tempfile.TemporaryDirectory(prefix="gefen-offload-drill-") as scratch:
            wrong = on_gpus(root, (keep or Path(scratch)).resolve())
    print(f"drill: {len(PLANTS)} faults, {wrong} not named as they should be, {time.monotonic() - began:.0f} s")
    return int(wrong > 0)


def drilled(run: Callable[[Plant], tuple[Sequence[Finding], str]]) -> int:
    """Run every plant, and say of each what the gate said; how many it got wrong."""
    wrong = 0
    for plant in PLANTS:
        began = time.monotonic()
        found, subject = run(plant)
        bad = complaint(plant, found, subject)
        wrong += bool(bad)
        seconds = f"{time.monotonic() - began:.0f} s"
        print(f"drill: {'WRONG' if bad else 'ok   '} {plant.name}: {bad or plant.reason.name}, {seconds}", flush=True)
    return wrong


def complaint(plant: Plant, found: Sequence[Finding], subject: str) -> str:
    """What the gate got wrong about a plant; empty if it gave its reason, about its subject, and no other reason."""
    reasons = {finding.reason for finding in found}
    if reasons != {plant.reason}:
        return f"expected {plant.reason.name}, the gate said {names(reasons)}"
    if not any(subject in finding.subject and plant.says in finding.detail for finding in found):
        about = "; ".join(f"{finding.subject} {gist(finding.detail)}".rstrip() for finding in found)
        return f"{plant.reason.name} is not about {subject} {plant.says}".rstrip() + f": {about}"
    return ""


def recorded(plant: Plant) -> tuple[Sequence[Finding], str]:
    """What the gate says about the fault in recorded evidence."""
    with tempfile.TemporaryDirectory(prefix="gefen-offload-drill-") as scratch:
        verdict = plant.recorded(released(Path(scratch))).verdict()
    return verdict.findings, plant.recorded_subject


def on_gpus(root: Path, scratch: Path) -> int:
    """Judge an unchanged copy, make its measurement the baseline, and then judge a copy with each fault."""
    clean = copied(root, scratch / "clean")
    shutil.rmtree(clean / baseline.FOLDER, ignore_errors=True)
    found = judged(clean, scratch / "clean-run", ("--only", IDENTITY, "--only", PART, *MEASURE))
    reasons = {finding.reason for finding in found}
    print(f"drill: unchanged: {names(reasons)}", flush=True)
    if reasons != {Reason.NO_BASELINE}:
        print(f"drill: expected NO_BASELINE alone of an unchanged copy: {found}")
        return len(PLANTS)
    made = gate(clean, "baseline", "--update", str(scratch / "clean-run"))
    if made.returncode:
        raise RuntimeError(f"no baseline could be made: {made.stderr[-2000:]}")

    def run(plant: Plant) -> tuple[Sequence[Finding], str]:
        name = f"plant-{PLANTS.index(plant)}"
        planted = copied(clean, scratch / name)
        plant.edit(planted)
        return judged(planted, scratch / f"{name}-run", plant.arguments), plant.subject

    return drilled(run)


def copied(root: Path, into: Path) -> Path:
    """A copy of what is judged and of what judges."""
    into.mkdir(parents=True)
    for name in checkout.DIGESTED:
        if (root / name).is_dir():
            shutil.copytree(root / name, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).is_file():
            shutil.copy(root / name, into / name)
    return into


def judged(root: Path, run: Path, arguments: Sequence[str], tier: str = "gpu1") -> Sequence[Finding]:
    """Run the copy's gate on one tier; what its verdict found. RuntimeError where there is none."""
    fixed = ("--tier", tier, "--no-selftest", "--timeout", str(TIMEOUT), "--run-dir", str(run))
    done = gate(root, "run", *fixed, *arguments)
    if not (run / "verdict.json").is_file():
        raise RuntimeError(f"the gate of {root} gave no verdict, exit {done.returncode}: {done.stderr[-2000:]}")
    findings = json.loads((run / "verdict.json").read_text(encoding="utf-8"))["findings"]
    return [Finding(**{**finding, "reason": Reason[finding["reason"]]}) for finding in findings]


def gate(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a checkout's gate."""
    command = [sys.executable, "-c", START, str(root), "gate", *arguments]
    return subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True)

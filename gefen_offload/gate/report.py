"""``report.html``: one file without references to others, for people who want to see what the verdict rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gefen_offload.gate import chart, summary
from gefen_offload.gate.outcome import PASSED, Ledger, attempts, outcome
from gefen_offload.gate.record import Session, is_number
from gefen_offload.gate.rundir import Evidence
from gefen_offload.gate.verdict import Verdict, measured

TEMPLATE = Path(__file__).with_name("templates") / "report.html.j2"
SLOWEST = 12


@dataclass(frozen=True)
class Cell:
    """One mandatory test in the matrix."""

    id: str
    state: str
    """``pass``, ``fail``, ``open`` (no proof) or ``none`` (not run here)."""
    word: str


@dataclass(frozen=True)
class File:
    """One row of the matrix: a file's tests in one tier."""

    tier: str
    name: str
    cells: tuple[Cell, ...]


def write(path: Path, evidence: Evidence, verdict: Verdict) -> None:
    """Render the report; where jinja2 is missing the file says so, and ``gate show --report`` draws it elsewhere."""
    try:
        text = render(evidence, verdict)
    except ImportError:
        text = f"<!doctype html><title>gate</title><p>{verdict.headline}. jinja2 is not installed here.</p>"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def render(evidence: Evidence, verdict: Verdict) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        verdict=verdict,
        word=summary.word,
        findings=verdict.findings,
        matrix=matrix(evidence, verdict),
        plots=plots(evidence.record),
        timelines=timelines(evidence.record),
        measurement=measured(evidence.record),
        baseline=evidence.baseline,
        memory=memory(evidence),
        slowest=slowest(evidence.record),
        facts=evidence.before,
        size=chart,
        provenance=summary.provenance(evidence.before).replace("`", ""),
    )


def matrix(evidence: Evidence, verdict: Verdict) -> list[File]:
    """Every mandatory test by tier and file."""
    against = {(finding.check, finding.subject): finding.reason for finding in verdict.findings}
    sessions = {session.tier: Ledger(session) for session in evidence.record}
    rows: list[File] = []
    for tier, ids in evidence.manifest.lists.items():
        files: dict[str, list[Cell]] = {}
        for id in ids:
            file, _, name = id.partition("::")
            files.setdefault(file, []).append(cell(name or id, id, tier, sessions.get(tier), against))
        rows += [File(tier, name, tuple(cells)) for name, cells in files.items()]
    return rows


def cell(name: str, id: str, tier: str, ledger: Ledger | None, against: dict[tuple[str, str], Any]) -> Cell:
    """One test's square."""
    if ledger is None:
        return Cell(name, "none", "not run here")
    reason = against.get((tier, id))
    if reason is not None:
        return Cell(name, "fail" if reason.status.name == "FAIL" else "open", reason.name)
    runs = attempts(ledger.phases.get(id, []))
    passed = bool(runs) and outcome(runs[-1]).word == PASSED
    return Cell(name, "pass" if passed else "open", "passed" if passed else "no evidence")


def plots(record: Sequence[Session]) -> list[chart.Plot]:
    """The loss curves that tests noted as ``trajectory``: a dict of named lists of numbers."""
    noted = [(id, value) for session in record for id, value in session.noted("trajectory") if are_curves(value)]
    return [chart.plot(id, value) for id, value in noted]


def timelines(record: Sequence[Session]) -> list[chart.Timeline]:
    """The steps that tests noted as ``timeline``: a list of intervals."""
    noted = [(id, value) for session in record for id, value in session.noted("timeline") if are_intervals(value)]
    return [chart.timeline(id, value) for id, value in noted]


def are_curves(value: object) -> bool:
    """Whether this is what :func:`plots` draws, and not another project's note of the same name."""
    curves = list(value.values()) if isinstance(value, dict) else [None]
    return all(isinstance(curve, list) and all(isinstance(v, (int, float)) for v in curve) for curve in curves)


def are_intervals(value: object) -> bool:
    """Whether this is what :func:`timelines` draws."""
    if not isinstance(value, list) or not all(isinstance(interval, dict) for interval in value):
        return False
    return all(is_number(i.get("start")) and is_number(i.get("end")) and isinstance(i.get("lane"), str) for i in value)


def memory(evidence: Evidence) -> list[tuple[str, int, int, int]]:
    """Each GPU with its free memory before and after, and its size, in MiB."""
    after = {gpu.uuid: gpu.free_mib for gpu in evidence.after.gpus}
    return [
        (f"{gpu.name} {gpu.uuid}", gpu.free_mib, after.get(gpu.uuid, 0), gpu.total_mib) for gpu in evidence.before.gpus
    ]


def slowest(record: Sequence[Session]) -> list[tuple[str, str, float]]:
    """The tests that took longest: tier, id, seconds over all phases."""
    spent: dict[tuple[str, str], float] = {}
    for session in record:
        for phase in session.phases:
            spent[session.tier, phase.id] = spent.get((session.tier, phase.id), 0.0) + phase.seconds
    most = sorted(spent.items(), key=lambda entry: -entry[1])[:SLOWEST]
    return [(tier, id, seconds) for (tier, id), seconds in most]

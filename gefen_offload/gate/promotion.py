"""A kept run's measurement becomes its GPU's baseline: only where the run judged this checkout, and all else passed."""

from __future__ import annotations

from pathlib import Path

from gefen_offload.gate import baseline, checkout, rundir, verdict
from gefen_offload.gate.baseline import Measurement
from gefen_offload.gate.checkout import Source
from gefen_offload.gate.reason import Finding, Reason
from gefen_offload.gate.rundir import Evidence

REPLACED = {
    Reason.NO_BASELINE,
    Reason.BASELINE_MISMATCH,
    Reason.BASELINE_PARTIAL,
    Reason.COUNTER_EXCEEDED,
    Reason.TIME_EXCEEDED,
}
"""All that a measurement may have against it: it is not within the baseline that it replaces."""


class PromotionError(RuntimeError):
    """A run makes no baseline; the message says why."""


def promote(root: Path, run: Path) -> Path:
    """Write the baseline, and beside it the report of the run that it was made from; the baseline's path."""
    evidence, report = whole(run)
    if why := elsewhere(evidence.before.source, checkout.source(root)):
        raise PromotionError(why)
    measured = own_measure(evidence)
    path = root / baseline.FOLDER / baseline.file_name(measured.identity.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    rundir.write_json(path, measured)
    path.with_suffix(".html").write_bytes(report)
    return path


def whole(run: Path) -> tuple[Evidence, bytes]:
    """A run's evidence and report, where its verdict follows from the one and the other is there."""
    try:
        evidence = rundir.load(run)
        strange = rundir.strange(run, evidence, evidence.verdict())
        report = (run / "report.html").read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromotionError(f"it is no complete run directory: {error}") from error
    if strange:
        raise PromotionError(f"{strange[0]} does not follow from the evidence beside it")
    return evidence, report


def elsewhere(judged: Source | None, here: Source) -> str:
    """Why what a run judged is not this checkout; empty where it is."""
    if judged is None:
        return "it judged another project's suite"
    if judged.dirty:
        return f"it judged uncommitted changes: {judged.dirty[0].strip()}"
    if judged.digest != here.digest and (judged.commit is None or judged.claimed or judged.commit != here.commit):
        return f"it judged {judged.commit or judged.digest}, and this checkout is at {here.commit or here.digest}"
    return ""


def own_measure(evidence: Evidence) -> Measurement:
    """What a run measured, where that is all that may be held against it."""
    against = [finding for finding in evidence.verdict().findings if not replaced(finding)]
    measured = verdict.measured([session for session in evidence.record if session.tier == baseline.CHECK])
    against += [finding for finding in baseline.compare(measured, measured) if finding not in against]
    if against or measured is None:
        first = against[0]
        raise PromotionError(
            f"it did not pass in all else: {first.reason.name} {first.check} {first.subject} {first.detail}".rstrip()
        )
    return measured


def replaced(finding: Finding) -> bool:
    """Whether a finding says only that the baseline there was does not fit."""
    return finding.check == baseline.CHECK and finding.reason in REPLACED

"""The verdict in words: the table on the terminal, and ``summary.md``, which fits one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gefen_offload.gate.facts import Facts
from gefen_offload.gate.reason import Finding
from gefen_offload.gate.verdict import Row, Verdict

MOST_REASONS = 12
MOST_SUBJECTS = 2
LONGEST = 200


def table(rows: Sequence[Row]) -> str:
    """The table as plain text: check, tier, verdict, seconds."""
    head = ("check", "tier", "verdict", "seconds", "")
    cells = [
        head,
        *((row.check, row.tier, word(row), f"{row.seconds:.0f}" if row.seconds else "", row.note) for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def word(row: Row) -> str:
    """One row's verdict in a word."""
    return "not run" if row.status is None else row.status.name


def reasons(findings: Sequence[Finding]) -> list[str]:
    """The reasons, each once with how often it was found and where first."""
    counts = Counter(finding.reason for finding in findings)
    lines: list[str] = []
    for reason, times in counts.most_common(MOST_REASONS):
        lines.append(f"{reason.name} x{times}: {reason.meaning}")
        for finding in [one for one in findings if one.reason is reason][:MOST_SUBJECTS]:
            detail = gist(finding.detail)
            lines.append(f"    {finding.check}: {finding.subject}{' - ' if finding.subject and detail else ''}{detail}")
    hidden = len(counts) - MOST_REASONS
    return lines + ([f"and {hidden} more reasons in verdict.json"] if hidden > 0 else [])


def gist(detail: str) -> str:
    """One line of a detail: of a traceback the first that pytest marks as the error, else the last."""
    lines = detail.strip().splitlines() or [""]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    line = (marked or [lines[-1]])[0]
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 4]} ..."


def text(verdict: Verdict, folder: str) -> str:
    """What the terminal shows at the end."""
    parts = [verdict.headline, "", table(verdict.rows)]
    if verdict.findings:
        parts += ["", *reasons(verdict.findings)]
    return "\n".join([*parts, "", f"run directory: {folder}"])


def markdown(verdict: Verdict, facts: Facts) -> str:
    """``summary.md``."""
    lines = [f"## Gate: {verdict.headline}", "", "| check | tier | verdict | seconds | |", "|---|---|---|---|---|"]
    lines += [f"| {row.check} | {row.tier} | {word(row)} | {row.seconds:.0f} | {row.note} |" for row in verdict.rows]
    if verdict.findings:
        lines += ["", "```", *reasons(verdict.findings), "```"]
    return "\n".join([*lines, "", provenance(facts), ""])


def provenance(facts: Facts) -> str:
    """Wheel, source, software and GPUs in one paragraph."""
    software = facts.software
    parts = [f"torch {software.torch}, CUDA {software.cuda}, NCCL {software.nccl}, Triton {software.triton}"]
    parts += [f"Python {software.python}, {facts.host}, {facts.cores} cores"]
    if facts.wheel is not None:
        parts.append(f"wheel `{facts.wheel.name}` sha256 `{facts.wheel.sha256}`")
    if facts.source is not None:
        parts.append(f"commit `{facts.source.commit or 'unknown'}`, source digest `{facts.source.digest[:16]}`")
    parts += [f"{gpu.name} `{gpu.uuid}` driver {gpu.driver}" for gpu in facts.gpus] or ["no GPU"]
    return "; ".join(parts) + "."

"""The text of a failed run: first cause, then what it set off, then what the others were doing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from gefen_offload.ranks import flight
from gefen_offload.ranks.outcome import Kind, Outcome, Verdict

OUTPUT_LINES = 30
STACK_LINES = 60


@dataclass(frozen=True)
class Evidence:
    """What a report is made of beside the outcomes; each list has one text a rank."""

    title: str
    stdout: Sequence[str]
    stderr: Sequence[str]
    notes: Sequence[str] = ()


def report(verdict: Verdict, outcomes: Sequence[Outcome], evidence: Evidence, summary: str = "") -> str:
    """The whole report, its summary on the first line: by default the first cause."""
    bad = [o for o in outcomes if o.bad]
    first = verdict.first
    lines = [f"{evidence.title}: {summary or _summary(verdict, bad, len(outcomes))}"]
    if first is not None:
        lines += ["", f"first cause: {first.headline()} ({first.seconds:.2f} s after dispatch)", *_details(first)]
    for outcome in verdict.secondary:
        label = "also" if _independent(outcome) else "secondary"
        lines += ["", f"{label}: {outcome.headline()}", *_details(outcome)]
    for outcome in outcomes:
        if not outcome.bad and first is not outcome:
            lines.append(f"rank {outcome.rank} {outcome.kind.value}")
    lines += _who_is_behind(outcomes)
    lines += flight.summary({o.rank: o.flight for o in outcomes})
    lines += [*_output(evidence), *(("", *evidence.notes) if evidence.notes else ())]
    return "\n".join(lines)


def _summary(verdict: Verdict, bad: Sequence[Outcome], world: int) -> str:
    if verdict.reason:
        return verdict.reason
    first = None if verdict.first is None else verdict.first.rank
    *others, last = (str(o.rank) for o in bad if o.kind is not Kind.BLOCKED or o.rank == first)
    ranks = f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
    return f"{ranks} of {world} failed; {verdict.first.headline() if verdict.first else verdict.kind.value}"


def _who_is_behind(outcomes: Sequence[Outcome]) -> list[str]:
    """When ranks wait in a collective that others have not entered, say which."""
    most = max((o.collectives for o in outcomes), default=0)
    behind = [o for o in outcomes if o.collectives < most]
    ahead = [o for o in outcomes if o.collectives == most and "not left" in o.collective]
    if not behind or not ahead:
        return []
    told = ", ".join(f"rank {o.rank} (entered {o.collectives} before)" for o in behind)
    waiting = ", ".join(str(o.rank) for o in ahead)
    return ["", f"never entered {ahead[0].collective.partition(',')[0]}), where rank {waiting} waited: {told}"]


def _independent(outcome: Outcome) -> bool:
    return outcome.kind is not Kind.BLOCKED and not (outcome.failure is not None and outcome.failure.is_connection)


def _details(outcome: Outcome) -> list[str]:
    details = []
    if outcome.failure is not None:
        details.append(outcome.failure.traceback.rstrip())
    if outcome.collective and outcome.kind is not Kind.RAISED:
        details.append(f"last collective: {outcome.collective}")
    if outcome.stack:
        details += ["Python stack:", _shortened(outcome.stack)]
    return [textwrap.indent("\n".join(details), "    ")] if details else []


def _shortened(stack: str) -> str:
    """The stack without import machinery, pytest, our own loop and idle threads; the artifacts have it whole."""
    kept: list[str] = []
    for thread in stack.split("\n\n"):
        lines = [line for line in thread.splitlines() if not any(part in line for part in _DULL)]
        if not ("hread 0x" in thread and all("/threading.py" in line for line in lines[1:])):
            kept += lines
    return "\n".join(kept[:STACK_LINES] + (["..."] if len(kept) > STACK_LINES else []))


_DULL = (
    *("<frozen ", "gefen_offload/ranks/", "/multiprocessing/", 'File "<string>"', "Extension modules:"),
    *("/_pytest/", "/pluggy/", "/pytest/__main__.py"),
)


def _output(evidence: Evidence) -> list[str]:
    lines: list[str] = []
    for stream, texts in (("stdout", evidence.stdout), ("stderr", evidence.stderr)):
        for rank, text in enumerate(texts):
            if text.strip():
                lines += ["", f"{stream} of rank {rank}:", textwrap.indent(_tail(text), "    ")]
    return lines


def _tail(text: str) -> str:
    kept = text.rstrip().splitlines()
    if len(kept) <= OUTPUT_LINES:
        return "\n".join(kept)
    return "\n".join([f"... {len(kept) - OUTPUT_LINES} lines before ...", *kept[-OUTPUT_LINES:]])

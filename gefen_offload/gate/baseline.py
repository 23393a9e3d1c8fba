"""Performance: what was measured, what it was measured before, and whether it may be compared at all.

Counters (bytes each way, launches, allocations, peak memory) are exact and are hard limits. Times are ratios to a
reference step timed in the same process, interleaved A/B/B/A, and only a tripwire: they may exceed the baseline by
:data:`TRIPWIRE` or by three times the noise that two runs of the same thing showed, whichever is more.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gefen_offload.gate import checkout
from gefen_offload.gate.reason import Finding, Reason

TRIPWIRE = 0.10
NOISE_LIMIT = 0.15
CHECK = "performance"
FOLDER = "ci/baseline"


class BaselineError(RuntimeError):
    """A baseline's file cannot be read; the message says which and what to do."""


@dataclass(frozen=True)
class Identity:
    """What must be the same for two measurements to be comparable."""

    gpu: str
    driver: str
    torch: str
    workload: str
    """Name and version of the measured work; it changes whenever the work does."""


@dataclass(frozen=True)
class Measurement:
    """One lease's numbers, or a baseline: those of an earlier one."""

    identity: Identity
    counters: Mapping[str, int]
    times: Mapping[str, float]
    """Ratios to the reference, by name."""
    noise: Mapping[str, float]
    """For each time, the relative difference between two runs of the same thing."""


def compare(measured: Measurement | None, baseline: Measurement | None) -> list[Finding]:
    """What keeps the measurement from being within its baseline."""
    if measured is None or not measured.counters or not measured.times:
        return [Finding(Reason.NOT_MEASURED, CHECK)]
    if baseline is None:
        made = f"gefen-offload gate baseline --update writes ci/baseline/{file_name(measured.identity.gpu)}"
        return [Finding(Reason.NO_BASELINE, CHECK, measured.identity.gpu, made)]
    differs = mismatch(measured.identity, baseline.identity)
    if differs:
        return [Finding(Reason.BASELINE_MISMATCH, CHECK, field, detail) for field, detail in differs]
    findings = [Finding(Reason.BASELINE_PARTIAL, CHECK, name) for name in unpaired(measured, baseline)]
    return findings + counters(measured, baseline) + times(measured, baseline)


def mismatch(measured: Identity, baseline: Identity) -> list[tuple[str, str]]:
    """The fields in which two identities differ."""
    pairs = [(name, getattr(measured, name), getattr(baseline, name)) for name in Identity.__dataclass_fields__]
    return [(name, f"here {here}, baseline {there}") for name, here, there in pairs if here != there]


def unpaired(measured: Measurement, baseline: Measurement) -> list[str]:
    """Names that only one of the two holds, and those under which one holds no number that can be compared."""
    names = {*measured.counters} ^ {*baseline.counters} | {*measured.times} ^ {*baseline.times}
    both = [*measured.counters.items(), *baseline.counters.items(), *measured.times.items(), *baseline.times.items()]
    return sorted(names | {name for name, value in both if not value >= 0 or math.isinf(value)})


def counters(measured: Measurement, baseline: Measurement) -> list[Finding]:
    """Counters above their limits."""
    return [
        Finding(Reason.COUNTER_EXCEEDED, CHECK, name, f"{value} > {baseline.counters[name]}")
        for name, value in sorted(measured.counters.items())
        if name in baseline.counters and value > baseline.counters[name]
    ]


def times(measured: Measurement, baseline: Measurement) -> list[Finding]:
    """Times above their tripwires, or too noisy to tell."""
    findings: list[Finding] = []
    for name, value in sorted(measured.times.items()):
        if name not in baseline.times:
            continue
        noises = [measured.noise.get(name, math.nan), baseline.noise.get(name, math.nan)]
        noise = math.nan if any(map(math.isnan, noises)) else max(noises)
        limit = baseline.times[name] * (1 + max(TRIPWIRE, 3 * noise))
        if not noise <= NOISE_LIMIT:
            findings.append(Finding(Reason.TOO_NOISY, CHECK, name, f"noise {noise:.1%}"))
        elif value > limit:
            detail = f"{value:.3f} of the reference, baseline {baseline.times[name]:.3f}, limit {limit:.3f}"
            findings.append(Finding(Reason.TIME_EXCEEDED, CHECK, name, detail))
    return findings


def untold(root: Path) -> str:
    """Why the history cannot tell how baselines were committed; empty where it can."""
    if not (root / ".git").exists():
        return "this copy has no git history"
    if not checkout.git(root, "rev-list", "--max-count=1", "--all"):
        return "this repository has no commit"
    if checkout.git(root, "rev-parse", "--is-shallow-repository") == "true":
        return "this clone has only the end of the history (git fetch --unshallow)"
    return ""


def mixed_commits(root: Path) -> list[str]:
    """Commits that changed a baseline together with anything else, or without the report that it was made from.

    The first commit of a history is not judged.
    """
    log = checkout.git(root, "log", "--min-parents=1", "--format=%H", "--", FOLDER)
    return [f"{commit[:12]} {why}" for commit in log.split() if (why := mixed(root, commit))]


def mixed(root: Path, commit: str) -> str:
    """What is wrong with how one commit changed baselines; empty if nothing."""
    names = checkout.git(root, "show", "--format=", "--name-only", "-m", "--first-parent", commit).split("\n")
    others = [name for name in names if name and not name.startswith(f"{FOLDER}/")]
    if others:
        return f"changes a baseline and {others[0]}"
    alone = [name for name in names if name.endswith(".json") and f"{name.removesuffix('.json')}.html" not in names]
    return f"changes {alone[0]} without its report" if alone else ""


def file_name(gpu: str) -> str:
    """The baseline's file for a GPU model."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def load(folder: Path, gpu: str) -> Measurement | None:
    """The baseline of a GPU model, if one was made; :class:`BaselineError` where its file holds none."""
    path = folder / file_name(gpu)
    if not path.is_file():
        return None
    try:
        found, why = from_json(json.loads(path.read_text(encoding="utf-8"))), "it lacks what a baseline holds"
    except ValueError as error:
        found, why = None, str(error)
    if found is None:
        raise BaselineError(f"{path} is damaged: {why}; restore it from git, or make it anew: gate baseline --update")
    return found


def from_json(data: Any) -> Measurement | None:
    """A measurement read back; None for what is none."""
    try:
        numbers = [{**data[name]} for name in ("counters", "times", "noise")]
        identity = Identity(**data["identity"])
    except (KeyError, TypeError):
        return None
    whole = all(type(value) in (int, float) for part in numbers for value in part.values())
    return (
        Measurement(identity, *numbers) if whole and all(isinstance(v, str) for v in vars(identity).values()) else None
    )

"""Runs the cases: some at a time, one line each."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gefen_offload.gate.reason import Reason
from gefen_offload.gate.selftest import collection, endings, evidence, outcomes, parallel
from gefen_offload.gate.selftest.case import Case

PARALLEL = max(2, min(8, len(os.sched_getaffinity(0)) // 2))


def cases() -> list[Case]:
    """All cases that this pytest, with its plugins, can run."""
    newer = [outcomes.SUBTESTS] if int(pytest.__version__.split(".")[0]) >= 9 else []
    workers = parallel.CASES if importlib.util.find_spec("xdist") else []
    return [*outcomes.CASES, *newer, *endings.CASES, *collection.CASES, *workers, *evidence.CASES]


def covered(chosen: Sequence[Case]) -> set[Reason]:
    """The reasons that these cases provoke."""
    return {reason for case in chosen for reason in case.expected}


def failures(only: str = "") -> list[str]:
    """What the gate gets wrong, one line each; nothing, if it can be trusted."""
    return [complaint for _, complaint in results(only) if complaint]


def results(only: str = "") -> list[tuple[Case, str]]:
    """Every case with its complaint, which is empty where the gate was right."""
    chosen = [case for case in cases() if only in case.name]
    with tempfile.TemporaryDirectory(prefix="gefen-offload-selftest-") as scratch:
        folders = [Path(scratch) / f"case-{number}" for number in range(len(chosen))]
        with ThreadPoolExecutor(PARALLEL) as pool:
            try:
                complaints = list(pool.map(lambda pair: checked(*pair), zip(chosen, folders, strict=True)))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # whoever interrupts waits for the running cases only
                raise
    return list(zip(chosen, complaints, strict=True))


def checked(case: Case, folder: Path) -> str:
    """One case's complaint; a case that cannot run is one too."""
    try:
        return case.complaint(folder)
    except Exception as error:
        return f"{case.name}: could not run: {type(error).__name__}: {error}"


def main(only: str = "") -> int:
    """Print each case with its reasons; 1 if the gate was wrong about any."""
    began = time.monotonic()
    done = results(only)
    if not done:
        print(f"selftest: no case has {only!r} in its name")
    for case, complaint in done:
        says = complaint or f"ok       {case.name}: {', '.join(sorted(reason.name for reason in case.expected))}"
        print(f"selftest: {'WRONG    ' if complaint else ''}{says}")
    wrong = sum(bool(complaint) for _, complaint in done)
    reasons = len(covered([case for case, _ in done]))
    print(f"selftest: {len(done)} faults, {reasons} reasons, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return int(wrong > 0 or not done)

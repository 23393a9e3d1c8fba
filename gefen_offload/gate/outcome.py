"""What one test's recorded phases amount to, and whether its ranks are proven. Pure functions over a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gefen_offload.gate.reason import Reason
from gefen_offload.gate.record import Phase, Session

PASSED = "passed"
BAD = {
    "failed": Reason.FAILED,
    "setup": Reason.SETUP_ERROR,
    "teardown": Reason.TEARDOWN_ERROR,
    "skipped": Reason.SKIPPED,
    "xfailed": Reason.XFAILED,
    "xpassed": Reason.XPASSED,
    "subtest": Reason.SUBTEST_FAILED,
    "cut": Reason.INTERRUPTED,
    "bodiless": Reason.BODY_NOT_RUN,
    "retried": Reason.FLAKY,
}
FAILURES = {"failed", "setup", "teardown", "subtest", "xpassed"}


@dataclass(frozen=True)
class Outcome:
    """How one attempt at a test ended."""

    word: str
    text: str = ""


def attempts(phases: Sequence[Phase]) -> list[list[Phase]]:
    """A test's phases, cut where a setup begins anew."""
    runs: list[list[Phase]] = []
    for phase in phases:
        if phase.when == "setup" or not runs:
            runs.append([])
        runs[-1].append(phase)
    return runs


def outcome(run: Sequence[Phase]) -> Outcome:
    """How one attempt ended: the first thing that kept it from passing, or ``passed``."""
    tries = max((phase.tries for phase in run), default=1)
    for phase in run:
        word = phase_word(phase)
        if word == PASSED and tries == 1:
            word = raised_word(phase)
        if word != PASSED:
            return Outcome(word, phase.text)
    whens = Counter(phase.when for phase in run if not phase.subtest)
    if whens != {"setup": 1, "call": 1, "teardown": 1}:
        return Outcome("cut", f"phases on record: {', '.join(phase.when for phase in run)}")
    if tries > 1:
        return Outcome("retried", f"a hook ran it {tries} times and told of the last alone")
    if not all(phase.body for phase in run if phase.when == "call" and not phase.subtest):
        return Outcome("bodiless")
    return Outcome(PASSED)


def phase_word(phase: Phase) -> str:
    """One phase in one word; ``passed`` only for a pass without reservations."""
    if phase.subtest:
        return PASSED if phase.outcome == PASSED and not phase.xfail else "subtest"
    if phase.xfail:
        return "xpassed" if phase.outcome == PASSED else "xfailed"
    if phase.outcome in (PASSED, "skipped"):
        return phase.outcome
    return "failed" if phase.when == "call" else phase.when


def raised_word(phase: Phase) -> str:
    """A phase by the exception that was seen in it, although it was reported as passed."""
    if phase.raised in ("", "skipped", "xfailed"):
        return phase.raised or PASSED
    return "failed" if phase.when == "call" else phase.when


class Ledger:
    """One session's events by test id."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.collected = Counter(session.collected)
        self.selected = Counter(id for id, _ in session.selected)
        self.tiers = dict(session.selected)
        self.started = Counter(session.started)
        self.phases: dict[str, list[Phase]] = {}
        for phase in session.phases:
            self.phases.setdefault(phase.id, []).append(phase)

    def _elsewhere(self, id: str) -> str:
        """For a list written from another folder: the collected test that this one must be."""
        near = [other for other in self.collected if id.endswith(f"/{other}") or other.endswith(f"/{id}")]
        return f"there is {near[0]}: ids are relative to the suite's folder" if near else ""

    def mandatory(self, id: str) -> tuple[Reason, str] | None:
        """Why this test does not count, or None if it was collected once and passed once."""
        if not self.selected[id]:
            return (Reason.DESELECTED, "") if self.collected[id] else (Reason.MISSING, self._elsewhere(id))
        if self.selected[id] > 1:
            return Reason.DUPLICATED, f"{self.selected[id]} times"
        runs = attempts(self.phases.get(id, ()))
        if not runs:
            return (Reason.INTERRUPTED if self.started[id] else Reason.NOT_RUN), ""
        ends = [outcome(run) for run in runs]
        if len(ends) == 1:
            return None if ends[0].word == PASSED else (BAD[ends[0].word], ends[0].text)
        words = ", then ".join(end.word for end in ends)
        if ends[-1].word != PASSED:
            return BAD[ends[-1].word], words
        return (Reason.FLAKY if any(end.word != PASSED for end in ends) else Reason.RAN_TWICE), words

    def failed_elsewhere(self, listed: set[str]) -> Iterator[tuple[str, str]]:
        """Tests outside the list whose last attempt did not pass, with the text."""
        for id, phases in self.phases.items():
            end = outcome(attempts(phases)[-1])
            if id not in listed and end.word in FAILURES:
                yield id, end.text


def world_of(tier: str) -> int:
    """How many ranks a tier's tests have: 2 for gloo2 and gpu2, 1 for gpu1, 0 for cpu."""
    return int("".join(c for c in tier if c.isdigit()) or 0)


def rank_proof(tier: str, runs: Sequence[Mapping[str, Any]], known: set[str]) -> tuple[Reason, str] | None:
    """Why a passed test of N ranks is not proven; ``runs`` is what the harness noted, ``known`` the GPUs on record.

    A test counts with at least one run of its tier's world. On GPUs that run must be whole: N ranks that reached the
    end of the body, each on a GPU of its own. Further runs may end early: that is how a test of a failing rank looks.
    """
    world = world_of(tier)
    whole = [run for run in runs if run.get("world") == world]
    if not whole:
        return Reason.NO_RANK_PROOF, f"worlds on record: {[run.get('world') for run in runs]}"
    if not tier.startswith("gpu"):
        return None
    doubts = [doubt(run, world, known) for run in whole]
    return None if None in doubts else doubts[0]


def is_proof(value: object) -> bool:
    """Whether a test's note called ``ranks`` is the harness's, and not another project's."""
    if not isinstance(value, dict) or not isinstance(value.get("world"), int):
        return False
    devices, finished = value.get("devices"), value.get("finished")
    named = isinstance(devices, list) and all(isinstance(device, str) for device in devices)
    return named and isinstance(finished, list) and all(isinstance(rank, int) for rank in finished)


def doubt(run: Mapping[str, Any], world: int, known: set[str]) -> tuple[Reason, str] | None:
    """What keeps one run on GPUs from being proof."""
    devices, finished = set(run.get("devices", ())), set(run.get("finished", ()))
    if finished != set(range(world)):
        return Reason.RANK_RETURNED_EARLY, f"ranks that finished: {sorted(finished)} of {world}"
    if len(devices) < world:
        return Reason.ONE_GPU_AS_MANY, f"{len(devices)} GPUs for {world} ranks"
    strange = sorted(devices - known)
    return (Reason.UNKNOWN_GPU, ", ".join(strange)) if strange or run.get("simulated") else None

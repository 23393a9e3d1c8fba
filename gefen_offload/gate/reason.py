"""Why a verdict is not a plain pass: the status that each reason leads to, and what it means in a sentence."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.IntEnum):
    """A verdict's kind; the value is the exit code."""

    PASS = 0
    FAIL = 1
    USAGE = 2
    UNFIT = 3
    INCOMPLETE = 4


SEVERITY = (Status.FAIL, Status.UNFIT, Status.INCOMPLETE, Status.PASS)
"""The worst first: a known failure outweighs an unfit box, which outweighs evidence that is missing."""


class Reason(enum.Enum):
    """Each way in which a run is not proof; the member's value is its status and its meaning."""

    # What a test did.
    FAILED = (Status.FAIL, "a mandatory test failed")
    SETUP_ERROR = (Status.FAIL, "a mandatory test's fixtures failed before its body")
    TEARDOWN_ERROR = (Status.FAIL, "a mandatory test passed and then failed in teardown")
    XFAILED = (Status.FAIL, "a mandatory test is marked as expected to fail, and failed")
    XPASSED = (Status.FAIL, "a mandatory test is marked as expected to fail, and passed")
    FLAKY = (Status.FAIL, "a mandatory test passed only after another outcome, or was run again until it passed")
    SUBTEST_FAILED = (Status.FAIL, "a part of a mandatory test did not pass")
    UNLISTED_FAILURE = (Status.FAIL, "a test outside the mandatory list failed")
    SKIPPED = (Status.INCOMPLETE, "a mandatory test was skipped")
    INTERRUPTED = (Status.INCOMPLETE, "a mandatory test began and did not end")
    NOT_RUN = (Status.INCOMPLETE, "a mandatory test was selected and never began")
    BODY_NOT_RUN = (Status.INCOMPLETE, "a mandatory test was called passed although its body did not run to its end")
    RAN_TWICE = (Status.INCOMPLETE, "a mandatory test ran more than once")

    # What was collected.
    MISSING = (Status.INCOMPLETE, "a mandatory test was not collected: deleted, renamed, or its file was skipped")
    DESELECTED = (Status.INCOMPLETE, "a mandatory test was collected and then left out of its tier")
    DUPLICATED = (Status.INCOMPLETE, "a mandatory test was collected more than once")
    SHADOWED = (Status.INCOMPLETE, "a later line of a test's file replaces it, so it never runs")
    WRONG_TIER = (Status.INCOMPLETE, "a test carries more than one tier's marker")
    UNLISTED = (Status.INCOMPLETE, "a test of the tier is not in its mandatory list")
    COLLECTION_ERROR = (Status.FAIL, "a file could not be collected")
    EMPTY_LIST = (Status.INCOMPLETE, "a tier that is due has no mandatory list, or an empty one")
    LIST_EDITED = (Status.INCOMPLETE, "a mandatory list is not what the manifest command wrote")

    # What the session's evidence is worth.
    NO_RECORD = (Status.INCOMPLETE, "a session left no record")
    RECORD_TRUNCATED = (Status.INCOMPLETE, "a record was cut short")
    RECORD_EDITED = (Status.INCOMPLETE, "a record was changed after it was written")
    RECORD_FOREIGN = (Status.INCOMPLETE, "a record is of another run")
    RECORD_VERSION = (Status.INCOMPLETE, "a record is of another version of the recorder")
    NO_END = (Status.INCOMPLETE, "a session stopped without its end line")
    DEADLINE = (Status.FAIL, "a session was still running at its deadline and was killed")
    CRASHED = (Status.FAIL, "a session was ended by a signal")
    WORKER_LOST = (Status.FAIL, "one of a session's parallel workers died, or its process did not end as it should")
    INTERNAL_ERROR = (Status.INCOMPLETE, "pytest or a hook failed inside")
    OPTIMIZED = (Status.INCOMPLETE, "a session's Python left out assert statements")
    EXIT_MISMATCH = (Status.INCOMPLETE, "a session's process ended with another code than its pytest reported")
    UNEXPLAINED_EXIT = (Status.INCOMPLETE, "a session reported an exit status that its tests do not explain")
    LEFTOVER = (Status.FAIL, "a process outlived its session")

    # Whether N ranks really did it.
    NO_RANK_PROOF = (Status.INCOMPLETE, "a test of several ranks passed and no run of that many ranks is on record")
    ONE_GPU_AS_MANY = (Status.INCOMPLETE, "a multi-GPU test ran on fewer distinct GPUs than its tier names")
    UNKNOWN_GPU = (Status.INCOMPLETE, "a test names a GPU that this machine does not have")
    RANK_RETURNED_EARLY = (Status.INCOMPLETE, "a test passed although a rank did not reach the end of its body")

    # What was judged.
    DIRTY_TREE = (Status.UNFIT, "the checkout is not its commit: changed, new or, among the judged, ignored files")
    SOURCE_CHANGED = (
        Status.INCOMPLETE,
        "the checkout, its commit or its changed files are not what they were before the run",
    )
    NO_WHEEL = (Status.INCOMPLETE, "there is no wheel to judge")
    STALE_WHEEL = (Status.INCOMPLETE, "the wheel is not what the checkout gives: files, metadata, or something beside")
    WHEEL_CHANGED = (Status.INCOMPLETE, "the judged files changed during the run")
    IMPORT_SHADOWED = (Status.INCOMPLETE, "a session imported the package from elsewhere than what is judged")
    IMPORT_UNPROVEN = (Status.INCOMPLETE, "a session never imported the judged package, or none loaded torch")

    # What it ran on.
    NO_TORCH = (Status.UNFIT, "the interpreter cannot import torch")
    WRONG_TORCH = (Status.UNFIT, "a session ran another torch than the one on record")
    SOFTWARE_CHANGED = (Status.INCOMPLETE, "Python, torch, CUDA, NCCL or Triton changed during the run")
    GPU_CHANGED = (Status.UNFIT, "the GPUs or their driver changed during the run")
    GPU_MEMORY_KEPT = (Status.FAIL, "GPU memory was not given back")
    FOREIGN_PROCESS = (Status.UNFIT, "another process holds a GPU")
    SMOKE_FAILED = (Status.UNFIT, "two ranks could not agree on an all-reduce of a known value")
    TIER_UNAVAILABLE = (Status.UNFIT, "a tier that must run cannot run here, or is not among those of this run")

    # How fast and how large.
    NOT_MEASURED = (Status.INCOMPLETE, "there is a GPU and nothing was measured on it")
    NO_BASELINE = (Status.INCOMPLETE, "no baseline was made for this GPU")
    BASELINE_MISMATCH = (Status.INCOMPLETE, "the baseline was made on another GPU, driver, torch or workload version")
    BASELINE_PARTIAL = (Status.INCOMPLETE, "something that the baseline holds was not measured, or the reverse")
    TOO_NOISY = (Status.INCOMPLETE, "two runs of the same thing differ too much to compare anything")
    COUNTER_EXCEEDED = (Status.FAIL, "bytes, launches, allocations or peak memory exceed the baseline")
    TIME_EXCEEDED = (Status.FAIL, "a time exceeds the baseline by more than the noise allows")

    @property
    def status(self) -> Status:
        """The status that this reason leads to."""
        return self.value[0]

    @property
    def meaning(self) -> str:
        """What the reason says, in a sentence."""
        return self.value[1]


@dataclass(frozen=True)
class Finding:
    """One reason, found at one place."""

    reason: Reason
    check: str
    """The row of the table to which it belongs: a tier's name, or source, wheel, machine, lists, performance."""
    subject: str = ""
    """A test id, a file, a GPU: what to look at."""
    detail: str = ""


def worst(findings: list[Finding]) -> Status:
    """The status that the findings lead to together."""
    present = {finding.reason.status for finding in findings} | {Status.PASS}
    return next(status for status in SEVERITY if status in present)

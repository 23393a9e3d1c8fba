"""What a test's phases amount to, and what proves its ranks."""

from __future__ import annotations

import pytest

from gefen_offload.gate.outcome import attempts, outcome, rank_proof, world_of
from gefen_offload.gate.reason import Reason
from gefen_offload.gate.record import Phase

KNOWN = {"GPU-a", "GPU-b"}
WHOLE = {"world": 2, "devices": ["GPU-a", "GPU-b"], "finished": [0, 1]}


def run(call="passed", **changes):
    phases = [Phase("t", "setup", "passed"), Phase("t", "call", call, **changes), Phase("t", "teardown", "passed")]
    return outcome(phases).word


@pytest.mark.parametrize(
    ("call", "changes", "word"),
    [
        ("passed", {}, "passed"),
        ("failed", {}, "failed"),
        ("skipped", {}, "skipped"),
        ("skipped", {"xfail": True}, "xfailed"),
        ("passed", {"xfail": True}, "xpassed"),
        ("passed", {"body": False}, "bodiless"),
        ("rerun", {}, "failed"),
    ],
    ids=["passed", "failed", "skipped", "xfailed", "xpassed", "bodiless", "rerun"],
)
def test_a_call_in_one_word(call, changes, word):
    """Only a plain pass of a body that ran is a pass."""
    assert run(call, **changes) == word


def test_a_test_without_teardown_was_cut():
    """Setup and call alone are not a test that ended."""
    assert outcome([Phase("t", "setup", "passed"), Phase("t", "call", "passed")]).word == "cut"


def test_a_second_setup_is_a_second_attempt():
    """Phases are cut where a setup begins anew."""
    once = [Phase("t", when, "passed") for when in ("setup", "call", "teardown")]
    assert [len(part) for part in attempts([*once, *once])] == [3, 3]


@pytest.mark.parametrize(("tier", "world"), [("cpu", 0), ("gloo4", 4), ("gpu8", 8)], ids=["cpu", "gloo", "gpu"])
def test_a_tier_names_its_world(tier, world):
    """The world size stands in the tier's name."""
    assert world_of(tier) == world


def test_two_gpus_prove_a_gpu2_test():
    """Two ranks on two known GPUs that reached the end are proof."""
    assert rank_proof("gpu2", [WHOLE], KNOWN) is None


def test_one_whole_run_is_enough():
    """A test that also makes a rank fail still counts by its whole run."""
    assert rank_proof("gpu2", [{**WHOLE, "finished": [0]}, WHOLE], KNOWN) is None


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([], Reason.NO_RANK_PROOF),
        ([{**WHOLE, "world": 1}], Reason.NO_RANK_PROOF),
        ([{**WHOLE, "devices": ["GPU-a", "GPU-a"]}], Reason.ONE_GPU_AS_MANY),
        ([{**WHOLE, "finished": [1]}], Reason.RANK_RETURNED_EARLY),
        ([{**WHOLE, "devices": ["GPU-a", "GPU-x"]}], Reason.UNKNOWN_GPU),
        ([{**WHOLE, "simulated": True}], Reason.UNKNOWN_GPU),
    ],
    ids=["none", "other-world", "one-gpu", "early", "unknown", "simulated"],
)
def test_what_is_no_proof(runs, reason):
    """Each lack of proof has its reason."""
    found = rank_proof("gpu2", runs, KNOWN)
    assert found is not None
    assert found[0] is reason


def test_cpu_ranks_need_a_run_of_their_world():
    """A gloo test is proven by a run of its world, also one in which a rank failed on purpose."""
    assert rank_proof("gloo2", [{"world": 2, "devices": ["cpu"] * 2, "finished": [1]}], set()) is None
    assert rank_proof("gloo4", [{"world": 2}], set()) is not None

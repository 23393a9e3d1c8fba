"""The fault suite itself: complete, exact, and able to see a gate that is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gefen_offload.gate.reason import Reason
from gefen_offload.gate.selftest import evidence, outcomes
from gefen_offload.gate.selftest import run as selftest
from gefen_offload.gate.selftest.case import Case, common, released
from support.checkout import ROOT


def name(case: Case) -> str:
    return case.name.replace(" ", "-")


def test_every_reason_is_provoked():
    """No reason exists that the fault suite does not provoke, and there are more than thirty."""
    assert selftest.covered(selftest.cases()) == set(Reason)
    assert len(Reason) >= 30


def test_every_reason_is_documented():
    """docs/gate.md has a row for each reason, with its exit code and its meaning."""
    page = (ROOT / "docs" / "gate.md").read_text()
    missing = [r.name for r in Reason if f"| `{r.name}` | {int(r.status)} | {r.meaning} |" not in page]
    assert missing == []


def test_case_names_are_unique():
    """Each fault has a name of its own."""
    names = [case.name for case in selftest.cases()]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("case", evidence.FACTS, ids=name)
def test_altered_facts_are_named(case, tmp_path):
    """Altered evidence of a release gets exactly its reasons, and the unaltered one passes."""
    assert case.complaint(tmp_path) == ""


def test_a_wrong_reason_is_a_complaint(tmp_path):
    """A gate that gave another reason than the expected one would be noticed."""
    case = replace(evidence.FACTS[0], expected=frozenset({Reason.FLAKY}))
    assert case.complaint(tmp_path) == "dirty tree: expected FLAKY, the gate said DIRTY_TREE"


def test_a_twin_that_does_not_pass_is_a_complaint(tmp_path):
    """A gate that is red about everything would be noticed too."""
    case = replace(evidence.FACTS[0], clean=evidence.FACTS[0].broken)
    assert case.complaint(tmp_path) == "dirty tree: the clean twin got DIRTY_TREE"


def test_a_case_that_cannot_run_is_a_complaint(tmp_path):
    """A case that raises is not counted as right."""

    def broken(folder):
        raise OSError("no space left")

    case = Case("full disk", frozenset(), broken, released)
    assert selftest.checked(case, tmp_path) == "full disk: could not run: OSError: no space left"


def test_suites_run_for_real(tmp_path):
    """A suite's case starts a session and reads its record."""
    case = next(case for case in outcomes.CASES if case.name == "skip in the body")
    assert case.complaint(tmp_path) == ""
    assert "skipped" in (tmp_path / "broken" / "cpu.log").read_text()


def test_the_common_suite_is_run_for_real():
    """The clean twin that most cases share is two tests that ran and passed."""
    made = common("cpu", 1)
    assert [phase.outcome for phase in made.record[0].phases] == ["passed"] * 6
    assert made.verdict().findings == ()

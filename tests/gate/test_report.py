"""What people and other programs get: summary, report, JUnit and statement."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from gefen_offload.gate import chart, junit, report, rundir, statement, summary
from gefen_offload.gate.reason import Status
from gefen_offload.gate.record import Phase
from gefen_offload.gate.selftest.case import released
from gefen_offload.gate.selftest.evidence import FACTS, listed
from gefen_offload.gate.selftest.release import TIERS, id_of


@pytest.fixture
def release(tmp_path):
    """Evidence of a release as a run directory holds it, with curves and a timeline noted."""
    made = released(tmp_path)
    noted = (
        ("trajectory", {"resident": [2.5, 2.0, 1.5], "offloaded": [2.5, 2.0, 1.5]}),
        ("timeline", [{"lane": "copy-in", "start": 0, "end": 1.5}, {"lane": "update", "start": 1, "end": 3.25}]),
    )
    session = made.record[0]
    properties = {**session.properties, id_of("cpu"): noted}
    record = (replace(session, properties=properties), *made.record[1:])
    return rundir.Evidence(made.manifest, record, made.before, made.before, made.baseline)


def failing(release, text):
    """The same with the cpu test failed."""
    phases = tuple(
        Phase(id_of("cpu"), w, "failed" if w == "call" else "passed", text=text) for w in ("setup", "call", "teardown")
    )
    return replace(release, record=(replace(release.record[0], phases=phases), *release.record[1:]))


def test_the_report_refers_to_nothing_outside(release):
    """The page loads no script, style, font or image from anywhere."""
    page = report.render(release, release.verdict())
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|<script|https?://", page)


def test_the_report_shows_what_was_noted(release):
    """Curves, timeline, measurement and memory are on the page, and equal curves are said to be equal."""
    page = report.render(release, release.verdict())
    for text in ("equal at every step", "3.25 ms", "peak_bytes", "80000 MiB", "prefers-color-scheme: dark"):
        assert text in page
    assert page.count("<polyline") == 2


def test_the_report_escapes_what_tests_print(release):
    """A failure's text cannot become markup."""
    page = report.render(*both(failing(release, "E  <script>alert(1)</script>")))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def both(evidence):
    return evidence, evidence.verdict()


def test_curves_that_differ_name_the_step():
    """The first step at which two curves differ is said, with both values."""
    plot = chart.plot("t", {"resident": [2.0, 1.0], "offloaded": [2.0, 1.0000001]})
    assert plot.verdict == "differ from step 1 on: 1, 1.0000001"


def test_a_curve_with_nan_is_drawn_around_it():
    """Values that are not numbers are left out of the drawing and do not break the scale."""
    plot = chart.plot("t", {"a": [1.0, float("nan"), 3.0]})
    assert (plot.low, plot.high) == (1.0, 3.0)
    assert len(plot.curves[0].points.split()) == 2


@pytest.mark.parametrize("case", [None, *FACTS], ids=lambda case: case.name.replace(" ", "-") if case else "pass")
def test_the_summary_fits_one_screen(case, tmp_path):
    """summary.md has at most 45 lines of at most 250 characters below the table, whatever went wrong."""
    evidence = (case.broken if case else released)(tmp_path)
    text = summary.markdown(evidence.verdict(), evidence.before)
    assert len(text.splitlines()) <= 45
    assert text.startswith("## Gate: ")


def test_a_hundred_failures_fit_one_screen(release):
    """A reason found a hundred times is one line with its count, and two examples."""
    many = {**release.manifest.lists, "cpu": tuple(f"tests/test_x.py::test_{n}" for n in range(100))}
    evidence = replace(release, manifest=replace(release.manifest, lists=many))
    text = summary.markdown(evidence.verdict(), evidence.before)
    assert "MISSING x100" in text
    assert len(text.splitlines()) <= 45


def test_the_detail_is_the_error_line(release):
    """Of a traceback the summary shows the line that pytest marks as the error."""
    evidence = failing(release, "def test_it():\n>   assert 1 == 2\nE   assert 1 == 2\n\ntests/x.py:3: AssertionError")
    assert f"cpu: {id_of('cpu')} - assert 1 == 2" in summary.text(evidence.verdict(), "run")


def test_only_a_release_verdict_is_passed(release):
    """The statement says PASSED for a releasable pass, WARNED for another pass, FAILED for the rest."""
    assert words(release) == "PASSED"
    assert words(replace(release, manifest=replace(release.manifest, performance=False))) == "WARNED"
    assert words(failing(release, "no")) == "FAILED"


def words(evidence):
    return statement.statement(evidence.verdict(), evidence.manifest, evidence.record, evidence.before)["predicate"][
        "result"
    ]


def test_the_statement_is_about_the_wheel(release):
    """The subject is the wheel by digest, the commit is a dependency, and each mandatory test is listed once."""
    made = statement.statement(release.verdict(), release.manifest, release.record, release.before)
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert made["subject"] == [{"name": "imaginary-1.0-py3-none-any.whl", "digest": {"sha256": "0" * 64}}]
    source = made["predicate"]["configuration"][0]
    assert source["digest"] == {"sha256": "d" * 64, "gitCommit": "c" * 40}
    assert made["predicate"]["passedTests"] == [id_of(tier) for tier in TIERS]


def test_junit_survives_a_crash(release):
    """A test that was selected and never ended is an error in junit.xml, and unprintable output does not break it."""
    evidence = failing(release, "bad \x00 byte")
    record = (evidence.record[0], replace(evidence.record[1], phases=()))
    suites = ElementTree.fromstring(junit.text(record))
    assert [(s.get("failures"), s.get("errors")) for s in suites] == [("1", "0"), ("0", "1")]


def test_a_refused_run_says_why(release):
    """The text of an unfit box names the tier that was required."""
    verdict = listed(required=("gpu8",))(release).verdict()
    assert verdict.status is Status.UNFIT
    assert "TIER_UNAVAILABLE x1" in summary.text(verdict, "run")

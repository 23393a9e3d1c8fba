"""What the verdict says as a whole: headline, precedence, tiers that are due, and when it lets a wheel out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gefen_offload.gate.checkout import Source
from gefen_offload.gate.reason import Finding, Reason, Status, worst
from gefen_offload.gate.record import Damage
from gefen_offload.gate.selftest.case import GPUS, MACHINE, released
from gefen_offload.gate.selftest.evidence import before, listed
from gefen_offload.gate.verdict import decide, due_tiers, possible


@pytest.fixture
def release(tmp_path):
    return released(tmp_path)


def without_gpus(release):
    """The same release on a machine that has none, with the sessions that it can run."""
    bare = before(gpus=())(release)
    return replace(bare, record=tuple(s for s in release.record if s.tier in ("cpu", "gloo2", "gloo4")), baseline=None)


def test_no_gpu_passes_and_says_so_first(release):
    """Without GPUs the verdict passes, and its first line says that it is no release verdict, and why."""
    verdict = without_gpus(release).verdict()
    assert verdict.status is Status.PASS
    assert not verdict.releasable
    assert verdict.headline == "PASS (not a release verdict: 0 GPUs; not run: gpu1, gpu2)"
    assert [row.tier for row in verdict.rows if row.check == "tests" and row.status is None] == ["gpu1", "gpu2"]


def test_a_required_tier_that_cannot_run_is_exit_3(release):
    """--require gpu2 on a machine without GPUs is an unfit box."""
    verdict = listed(required=("gpu2",))(without_gpus(release)).verdict()
    assert verdict.status == 3
    assert [finding.reason for finding in verdict.findings] == [Reason.TIER_UNAVAILABLE]


@pytest.mark.parametrize(
    ("tier", "changes", "says"),
    [
        ("gpu4", {}, "GPUs here: 2, needed: 4"),
        ("gloo8", {}, "cores here: 1, needed: 8"),
        ("gpu2", {"tiers": ("cpu",)}, "this run was asked for cpu alone"),
        ("gpu2", {"lists": {"cpu": ("test_cpu.py::test_it",)}}, "there is no list of its tests, ci/mandatory/gpu2.txt"),
    ],
    ids=["gpus", "cores", "left-out", "unlisted"],
)
def test_what_is_in_the_way_of_a_required_tier(release, tier, changes, says):
    """A required tier must be due; the finding says what keeps it from that."""
    found = listed(required=(tier,), **changes)(release).verdict().findings
    assert [(f.subject, f.detail) for f in found if f.reason is Reason.TIER_UNAVAILABLE] == [(tier, says)]


def test_another_suite_only_needs_the_machine(release):
    """Another project's suite is one session whatever its tiers: a required one must be able to run."""
    theirs = listed(exact=False, required=("gpu2",), lists={"suite": ("test_cpu.py::test_it",)})(release)
    assert Reason.TIER_UNAVAILABLE not in said(theirs)
    assert Reason.TIER_UNAVAILABLE in said(before(gpus=())(theirs))


def test_a_run_without_selftest_is_not_releasable(release):
    """A gate that was not tried first passes, and lets nothing out."""
    verdict = listed(selftest=False)(release).verdict()
    assert (verdict.status, verdict.headline) == (Status.PASS, "PASS (not a release verdict: selftest skipped)")


def test_allowed_dirt_passes_and_is_not_releasable(release):
    """--allow-dirty judges an edited tree and never lets its wheel out."""
    dirty = before(source=replace(release.before.source, dirty=(" M a.py",)))(release)
    assert dirty.verdict().status is Status.UNFIT
    verdict = listed(allow_dirty=True)(dirty).verdict()
    assert (verdict.status, verdict.releasable) == (Status.PASS, False)
    assert "uncommitted changes" in verdict.headline


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (Source("c" * 40, True, (), "d" * 64), "claimed"),
        (Source(None, False, (), "d" * 64), "digest of its source"),
    ],
    ids=["claimed-commit", "no-commit"],
)
def test_a_copy_without_git_is_not_releasable(release, source, says):
    """A claimed commit, or none, passes and is not releasable."""
    verdict = before(source=source)(release).verdict()
    assert (verdict.status, verdict.releasable) == (Status.PASS, False)
    assert says in verdict.headline


def test_part_of_the_tiers_is_not_releasable(release):
    """Asking for some tiers only is said in the headline."""
    part = listed(tiers=("cpu",))(release)
    verdict = replace(part, record=tuple(s for s in release.record if s.tier in ("cpu", "performance"))).verdict()
    assert verdict.status is Status.PASS
    assert "not run: gloo2, gpu1, gpu2" in verdict.headline


def test_performance_left_out_is_not_releasable(release):
    """A run without the measurements passes and is not releasable."""
    verdict = listed(performance=False)(replace(release, baseline=None)).verdict()
    assert (verdict.status, verdict.releasable) == (Status.PASS, False)


@pytest.mark.parametrize(
    ("reasons", "status"),
    [
        ((), 0),
        ((Reason.SKIPPED,), 4),
        ((Reason.SKIPPED, Reason.FOREIGN_PROCESS), 3),
        ((Reason.SKIPPED, Reason.FOREIGN_PROCESS, Reason.FAILED), 1),
    ],
    ids=["none", "incomplete", "unfit", "failed"],
)
def test_the_worst_reason_decides(reasons, status):
    """A known failure outweighs an unfit box, and that outweighs missing evidence."""
    assert worst([Finding(reason, "cpu") for reason in reasons]) == status


def test_tiers_follow_the_hardware():
    """A tier is possible with its GPUs, gloo8 with eight cores."""
    one = replace(MACHINE, gpus=GPUS[:1], cores=8)
    assert [tier for tier in ("cpu", "gloo8", "gpu1", "gpu2") if possible(tier, one)] == ["cpu", "gloo8", "gpu1"]
    assert not possible("gloo8", MACHINE)


def test_only_listed_tiers_are_due(release):
    """A tier without a list is not due."""
    assert due_tiers(release.manifest, MACHINE) == ("cpu", "gloo2", "gloo4", "gpu1", "gpu2")


def test_an_unfit_box_without_sessions_gets_no_further_reasons(release):
    """A run that was refused before it began does not also complain that nothing ran."""
    refused = replace(before(foreign=("process 7",))(release), record=())
    assert {finding.reason for finding in refused.verdict().findings} == {Reason.FOREIGN_PROCESS}


def test_deciding_twice_gives_the_same(release):
    """The verdict is a function of its arguments."""
    arguments = (release.manifest, release.record, release.before, release.after, release.baseline)
    assert decide(*arguments) == decide(*arguments)


def with_session(release, tier, **changes):
    record = tuple(replace(s, **changes) if s.tier == tier else s for s in release.record)
    return replace(release, record=record)


def said(evidence):
    return [finding.reason for finding in evidence.verdict().findings]


def test_an_exit_status_needs_a_cause(release):
    """A session that reports status 1 although its tests passed is not believed."""
    session = release.record[0]
    odd = with_session(release, session.tier, status=1, exit=replace(session.exit, code=1))
    assert said(odd) == [Reason.UNEXPLAINED_EXIT]


def test_a_module_from_elsewhere(release):
    """One module of the package that is no file of the judged wheel is a shadowed import."""
    modules = release.record[0].modules | {("imaginary.a", "/elsewhere/a.py")}
    assert said(with_session(release, "cpu", modules=modules)) == [Reason.IMPORT_SHADOWED]


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ("{site}/imaginary/", []),
        ("{site}/imaginary/:/elsewhere/imaginary/", [Reason.IMPORT_SHADOWED]),
        ("{site}/imagin/", [Reason.IMPORT_SHADOWED]),
        ("", [Reason.IMPORT_SHADOWED]),
    ],
    ids=["ours", "partly", "beside", "nowhere"],
)
def test_a_namespace_has_folders_of_the_wheel(release, folders, expected):
    """A namespace package has no file; each of its folders must hold files of the wheel."""
    modules = release.record[0].modules | {("imaginary.n", folders.format(site=release.before.wheel.site))}
    assert said(with_session(release, "cpu", modules=modules)) == expected


@pytest.mark.parametrize(("exact", "expected"), [(True, [Reason.UNLISTED]), (False, [])], ids=["own", "foreign"])
def test_a_new_cpu_test_counts_where_lists_are_exact(release, exact, expected):
    """Our own lists are exact; another project's list may name a part of its CPU tests."""
    session = release.record[0]
    more = with_session(release, "cpu", selected=(*session.selected, ("test_new.py::test_new", ("cpu",))))
    assert said(listed(exact=exact)(more)) == expected


def test_a_new_gpu_test_always_counts(release):
    """A GPU test outside the list counts also where the list may be a part."""
    session = release.record[2]
    more = with_session(release, session.tier, selected=(*session.selected, ("test_new.py::test_new", ("gpu1",))))
    assert said(listed(exact=False)(more)) == [Reason.UNLISTED]


def test_a_measurement_of_a_failed_session_does_not_count(release):
    """A measuring session whose test failed, or that lost its end, is red although it noted numbers."""
    failed = tuple(replace(p, outcome="failed" if p.when == "call" else p.outcome) for p in release.record[-1].phases)
    assert said(with_session(release, "performance", phases=failed)) == [Reason.FAILED]
    cut = with_session(release, "performance", damage=((Damage.UNENDED, ""),), status=None)
    assert said(cut) == [Reason.NO_END]

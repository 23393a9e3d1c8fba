"""Comparing measurements: like with like, exact counters, times with their noise."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gefen_offload import cli
from gefen_offload.gate import baseline, checkout, checks, promotion, rundir
from gefen_offload.gate import cli as gate_cli
from gefen_offload.gate.reason import Reason, Status
from gefen_offload.gate.selftest.case import released
from gefen_offload.gate.selftest.evidence import measured
from gefen_offload.gate.selftest.release import MEASURED
from support.checkout import git
from support.kept import kept


def reasons(measured, against=MEASURED):
    return [finding.reason for finding in baseline.compare(measured, against)]


def slower(factor, noise):
    return replace(MEASURED, times={"offloaded_step": 1.2 * factor}, noise={"offloaded_step": noise})


@pytest.mark.parametrize("field", ["gpu", "driver", "torch", "workload"])
def test_only_like_is_compared(field):
    """Another GPU, driver, torch or workload version is a mismatch that names the field, and nothing else is judged."""
    other = replace(MEASURED, identity=replace(MEASURED.identity, **{field: "another"}))
    found = baseline.compare(replace(slower(9, 0.0)), other)
    assert [(finding.reason, finding.subject) for finding in found] == [(Reason.BASELINE_MISMATCH, field)]


@pytest.mark.parametrize(
    ("factor", "noise", "expected"),
    [(1.09, 0.01, []), (1.11, 0.01, [Reason.TIME_EXCEEDED]), (1.11, 0.05, []), (1.0, 0.16, [Reason.TOO_NOISY])],
    ids=["within", "above", "within-noise", "too-noisy"],
)
def test_times_are_tripwires(factor, noise, expected):
    """A time may exceed by a tenth, or by three times the noise; more noise than 15% compares nothing."""
    assert reasons(slower(factor, noise)) == expected


def test_fewer_bytes_are_no_fault():
    """A counter below its limit passes."""
    assert reasons(replace(MEASURED, counters={name: value - 1 for name, value in MEASURED.counters.items()})) == []


def test_a_baseline_reads_back(tmp_path):
    """What ``baseline --update`` writes is found again by the GPU's name."""
    rundir.write_json(tmp_path / baseline.file_name("Imaginary 9 (80 GB)"), MEASURED)
    assert baseline.load(tmp_path, "Imaginary 9 (80 GB)") == MEASURED
    assert baseline.load(tmp_path, "Imaginary 8") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": {}}', "\xff"])
def test_a_damaged_baseline_is_told(tmp_path, text):
    """A file that holds no baseline is named, with what to do; it is not taken for none."""
    path = tmp_path / "imaginary-9.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(baseline.BaselineError, match=re.escape(f"{path} is damaged: ")):
        baseline.load(tmp_path, "Imaginary 9")


@pytest.fixture
def tree(tmp_path):
    """A repository whose first commit holds one file."""
    git(tmp_path, "init", "-q")
    return committed(tmp_path, "code.py")


def committed(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(len(list(root.rglob("*")))))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", " ".join(names))
    return root


def test_a_baseline_in_its_own_commit(tree):
    """A baseline that was committed alone with its report is in order, and other commits do not matter."""
    committed(tree, "ci/baseline/a.json", "ci/baseline/a.html")
    committed(tree, "code.py")
    assert baseline.mixed_commits(tree) == []


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("ci/baseline/a.json", "ci/baseline/a.html", "code.py"), "changes a baseline and code.py"),
        (("ci/baseline/a.json",), "changes ci/baseline/a.json without its report"),
    ],
    ids=["with-code", "without-report"],
)
def test_a_baseline_among_other_changes(tree, names, says):
    """A commit that loosens a limit together with the code that needs it loosened is named."""
    found = baseline.mixed_commits(committed(tree, *names))
    assert len(found) == 1
    assert found[0].endswith(says)


def test_a_history_that_cannot_tell_is_said(tree, tmp_path_factory, monkeypatch, capsys):
    """A copy without git, a repository without commits and a shallow clone are each named, and are no pass."""
    bare = tmp_path_factory.mktemp("copy")
    assert "no git history" in checked(bare, 3, monkeypatch, capsys)
    git(bare, "init", "-q")
    assert "no commit" in checked(bare, 3, monkeypatch, capsys)
    committed(tree, "ci/baseline/a.json", "code.py")
    shallow = tmp_path_factory.mktemp("clones") / "shallow"
    git(tree, "clone", "-q", "--depth", "1", f"file://{tree}", str(shallow))
    assert "git fetch --unshallow" in checked(shallow, 3, monkeypatch, capsys)
    assert "changes a baseline and code.py" in checked(tree, 1, monkeypatch, capsys)


def test_a_history_that_cannot_be_read_is_no_pass(tree, monkeypatch, capsys):
    """Where git fails, its own words are said."""
    (tree / ".git" / "HEAD").write_text("ref: refs/heads/none\n")
    for name in (tree / ".git" / "refs" / "heads").iterdir():
        name.write_text("f" * 40 + "\n")
    assert "cannot be read: git rev-list ended with" in checked(tree, 4, monkeypatch, capsys)


def checked(root, code, monkeypatch, capsys):
    """What ``baseline --check`` says of a checkout."""
    monkeypatch.setattr(gate_cli, "the_checkout", lambda: root)
    assert cli.main(["gate", "baseline", "--check"]) == code
    return capsys.readouterr().out


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (3, None), (4, 4)])
def test_a_copy_without_history_passes_the_tests(monkeypatch, code, ends):
    """./ci/test says that the baselines' history was not judged; any other trouble with it fails."""
    monkeypatch.setattr(checks, "call", lambda place, *command: code)
    assert checks.CHECKS["baseline"](None, [])[0] == ends


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A kept run of an imaginary GPU that has no baseline, in all else in order, and its checkout."""
    folder = tmp_path / "run"
    evidence = replace(kept(folder), baseline=None)
    write(folder, evidence)
    (folder / "report.html").write_text("the report")
    monkeypatch.setattr(gate_cli, "the_checkout", lambda: tmp_path)
    monkeypatch.setattr(checkout, "source", lambda root: evidence.before.source)
    return folder


def write(folder, evidence):
    rundir.write(folder, evidence, evidence.verdict())


def update(folder):
    return cli.main(["gate", "baseline", "--update", str(folder)])


def test_the_documented_way_to_a_baseline(run):
    """A run without a baseline is incomplete; ``baseline --update`` makes one of it; the same numbers then pass."""
    evidence = rundir.load(run)
    assert [finding.reason for finding in evidence.verdict().findings] == [Reason.NO_BASELINE]
    assert evidence.verdict().status is Status.INCOMPLETE
    assert update(run) == 0
    made = run.parent / "ci" / "baseline"
    assert {path.name for path in made.iterdir()} == {"imaginary-9.json", "imaginary-9.html"}
    assert replace(evidence, baseline=baseline.load(made, "Imaginary 9")).verdict().findings == ()


def changed_source(run, **changes):
    """The run, as if it had judged another source."""
    evidence = rundir.load(run)
    source = replace(evidence.before.source, **changes)
    facts = replace(evidence.before, source=source)
    return replace(evidence, manifest=replace(evidence.manifest, allow_dirty=True), before=facts, after=facts)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("nothing", "is no complete run directory"),
        ("tampered", "verdict.json does not follow"),
        ("no-report", "is no complete run directory"),
        ("foreign", "another project's suite"),
        ("elsewhere", "it judged ffff"),
        ("dirty", "it judged uncommitted changes: M a.py"),
        ("disturbed", "FOREIGN_PROCESS machine somebody"),
        ("unmeasured", "NOT_MEASURED"),
    ],
)
def test_only_a_run_of_this_checkout_that_passed_in_all_else_makes_one(run, capsys, fault, says):
    """Anything else is refused with what is wrong, and nothing is written."""
    evidence = rundir.load(run)
    if fault == "nothing":
        run = run / "none"
    elif fault == "tampered":
        (run / "verdict.json").write_text("{}")
    elif fault == "no-report":
        (run / "report.html").unlink()
    elif fault == "foreign":
        write(run, replace(evidence, before=replace(evidence.before, source=None)))
    elif fault == "elsewhere":
        write(run, changed_source(run, commit="f" * 40, digest="f" * 64))
    elif fault == "dirty":
        write(run, changed_source(run, dirty=(" M a.py",)))
    elif fault == "disturbed":
        write(run, replace(evidence, after=replace(evidence.after, foreign=("somebody",))))
    else:
        write(run, replace(evidence, record=evidence.record[:-1]))
    assert update(run) == 2
    assert says in capsys.readouterr().err
    assert not list(run.parent.rglob("imaginary-9.json"))


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"times": {"offloaded_step": 9.0}}, False),
        ({"counters": {**MEASURED.counters, "launches": 99}}, False),
        ({"noise": {"offloaded_step": 0.5}}, True),
    ],
    ids=["slower", "more", "noisy"],
)
def test_what_a_new_baseline_may_exceed(tmp_path, change, refused):
    """A new baseline may hold other numbers than the one that it replaces, but not such as nothing compares with."""
    evidence = measured(**change)(released(tmp_path))
    if refused:
        with pytest.raises(promotion.PromotionError, match="TOO_NOISY"):
            promotion.own_measure(evidence)
    else:
        assert vars(promotion.own_measure(evidence)).items() >= change.items()


def test_a_verdict_without_performance_is_no_release(tmp_path):
    """``--without-performance`` passes without a measurement, and says in its first line that it is no release."""
    evidence = released(tmp_path)
    manifest = replace(evidence.manifest, performance=False)
    verdict = replace(evidence, manifest=manifest, baseline=None).verdict()
    assert (verdict.status, verdict.releasable) == (Status.PASS, False)
    assert verdict.headline == "PASS (not a release verdict: performance not judged)"

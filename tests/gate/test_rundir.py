"""The run directory: one for each run, and nothing in it that does not follow from its evidence."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from gefen_offload.gate import rundir
from gefen_offload.gate.reason import Reason
from support.checkout import command
from support.kept import WHEEL, kept


@pytest.fixture
def run(tmp_path):
    """A kept run of a release."""
    kept(tmp_path / "run")
    return tmp_path / "run"


def test_a_kept_release_follows_from_its_evidence(run):
    """What is read back gives the verdict that was written, and every file that was made from it, to the byte."""
    evidence = rundir.load(run)
    verdict = evidence.verdict()
    assert (verdict.findings, verdict.releasable) == ((), True)
    assert rundir.strange(run, evidence, verdict) == []


def altered(name, change):
    """An edit of one JSON file."""

    def edit(run):
        value = json.loads((run / name).read_text())
        change(value)
        (run / name).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")

    return edit


def added(name, text):
    """An edit that adds to one file."""

    def edit(run):
        with (run / name).open("a") as file:
            file.write(text)

    return edit


EDITS = {
    "exit-code": ("verdict.json", altered("verdict.json", lambda v: v.update(exit_code=1))),
    "headline": ("verdict.json", altered("verdict.json", lambda v: v.update(headline="PASS, and more"))),
    "row": ("verdict.json", altered("verdict.json", lambda v: v["rows"][0].update(note="all of them"))),
    "statement": ("statement.json", altered("statement.json", lambda s: s["predicate"]["passedTests"].pop())),
    "subject": ("statement.json", altered("statement.json", lambda s: s["subject"][0].update(name="other.whl"))),
    "record": ("record.jsonl", added("record.jsonl", "{}\n")),
    "summary": ("summary.md", added("summary.md", "Everything passed.\n")),
    "junit": ("junit.xml", lambda run: (run / "junit.xml").unlink()),
    "wheel": (f"wheel/{WHEEL}", added(f"wheel/{WHEEL}", "more")),
    "site": ("site", added("site/gefen_offload/__init__.py", "more")),
    "file-in-site": ("site", lambda run: (run / "site" / "gefen_offload" / "new.py").write_text("")),
}


@pytest.mark.parametrize(("name", "edit"), EDITS.values(), ids=EDITS.keys())
def test_an_edited_file_is_named(run, name, edit):
    """A file that was changed, or is gone, after the verdict does not follow from the evidence."""
    edit(run)
    evidence = rundir.load(run)
    assert rundir.strange(run, evidence, evidence.verdict()) == [name]


def test_show_names_what_was_edited(run):
    """``gate show`` prints what the evidence gives, names what does not follow from it, and ends with 4."""
    EDITS["statement"][1](run)
    done = command("gate", "show", str(run))
    assert done.returncode == 4
    assert done.stdout.startswith("PASS\n")
    assert done.stdout.endswith("statement.json does not follow from the evidence beside it\n")


def test_a_lost_record_is_a_reason(run):
    """A session whose record is gone gives another verdict, and with it nothing that was written is right."""
    (run / "sessions" / "gpu2.jsonl").unlink()
    evidence = rundir.load(run)
    verdict = evidence.verdict()
    assert [finding.reason for finding in verdict.findings] == [Reason.NO_RECORD]
    assert {"verdict.json", "statement.json", "record.jsonl"} <= set(rundir.strange(run, evidence, verdict))


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    """Runs that start together, of one commit, do not share their evidence."""
    monkeypatch.setattr(rundir.time, "strftime", lambda *_: "20260101-000000")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: rundir.make(tmp_path, None, "a.commit"), range(8)))
    assert len(set(made)) == 8
    assert {path.parent for path in made} == {tmp_path / ".gate"}
    assert {path.name.partition("-a.commit")[0] for path in made} == {"20260101-000000"}


def test_a_folder_that_was_asked_for_is_one_runs(tmp_path):
    """Of runs that ask for one folder at the same time one gets it; the others are told to name another."""

    def ask(_):
        try:
            return rundir.make(tmp_path, str(tmp_path / "run"), "x")
        except rundir.TakenError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(ask, range(8)))
    assert sum(answer == tmp_path / "run" for answer in made) == 1
    assert sum("name a new folder" in str(answer) for answer in made) == 7


def test_a_folder_with_files_is_nobodys_run_directory(tmp_path):
    """Somebody's own folder is left as it is."""
    (tmp_path / ".gitignore").write_text("mine\n")
    with pytest.raises(rundir.TakenError, match="or other files"):
        rundir.make(tmp_path, str(tmp_path), "x")
    assert [path.name for path in tmp_path.iterdir()] == [".gitignore"]
    assert (tmp_path / ".gitignore").read_text() == "mine\n"

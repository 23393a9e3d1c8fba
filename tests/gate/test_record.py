"""A record, written and read back: whatever a test notes, and whatever stands in a line, it ends in a verdict."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gefen_offload.gate import junit, progress, report, run, rundir, session, statement, summary
from gefen_offload.gate.reason import Reason
from gefen_offload.gate.record import Damage, Exit, read
from gefen_offload.gate.recorder import VERSION, link
from gefen_offload.gate.selftest.case import IDS, MACHINE, Suite, released
from gefen_offload.gate.selftest.release import id_of

NOTES = r"""
    import enum
    class Odd:
        def __repr__(self):
            raise RuntimeError("no text")
    loop = []
    loop.append(loop)
    def test_one(record_property, request):
        record_property("keys", {(1, 2): "tuple", 3: "int", None: {"set": {1}}})
        record_property("odd", [Odd(), b"bytes", enum.Enum, 1e999])
        record_property("surrogate", "\udce9")
        record_property("long", "x" * 3_000_000)
        record_property("huge", 10 ** 5000)
        record_property("loop", loop)
        request.node.user_properties.append("no pair")
        for name in ("ranks", "measurement", "trajectory", "timeline"):
            record_property(name, {"theirs": "yes"})
            record_property(name, "theirs")
        record_property("ranks", {"world": 2, "devices": 2, "finished": None})
        record_property("trajectory", {"resident": [2.5, "two"]})
        record_property("timeline", [{"lane": "copy-in", "start": 0}])
    def test_two():
        assert "\udce9" == "\udce9"
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A session whose test noted the oddest things, with what was judged of it."""
    folder = tmp_path_factory.mktemp("odd")
    suite = Suite({"test_it.py": NOTES})
    done = suite.session(folder)
    return rundir.Evidence(suite.manifest(folder), (done,), MACHINE, MACHINE, None)


def test_what_json_lacks_is_noted_as_text(odd):
    """Keys and values that JSON lacks become text, what is too long or cannot be read is said to be."""
    (done,) = odd.record
    assert (done.damage, done.internal_errors, done.status) == ((), (), 0)
    noted = done.properties[IDS[0]]
    values = dict(noted)
    assert values["keys"] == {"(1, 2)": "tuple", "3": "int", "None": {"set": "{1}"}}
    assert values["odd"] == ["<Odd without text: RuntimeError>", "b'bytes'", "<enum 'Enum'>", float("inf")]
    assert values["surrogate"] == "\udce9"
    assert values["long"] == "<longer than 2000000 characters>"
    assert [name for name, _ in noted].count("unreadable") == 3


def test_notes_of_others_are_no_evidence_of_ours(odd, tmp_path):
    """A note that has one of our names and not its shape is neither proof, nor a measurement, nor a curve."""
    verdict = odd.verdict()
    assert verdict.findings == ()
    report.write(tmp_path / "report.html", odd, verdict)
    assert "<polyline" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    on_gpus = replace(odd.record[0], selected=tuple((id, ("gpu2",)) for id in IDS))
    assert {f.reason for f in replace(odd, record=(on_gpus,)).verdict().findings} == {Reason.NO_RANK_PROOF}


SURROGATE = "caf\udce9"


def test_text_that_is_no_unicode_reaches_every_file(tmp_path, monkeypatch):
    """A failure whose text and id hold bytes of another encoding is told in every file of the run directory."""
    evidence = released(tmp_path)
    renamed = f"{id_of('cpu')}[{SURROGATE}]"
    phases = tuple(
        replace(phase, id=renamed, outcome="failed", text=SURROGATE)
        if phase.when == "call"
        else replace(phase, id=renamed)
        for phase in evidence.record[0].phases
    )
    failed = replace(evidence.record[0], phases=phases, selected=((renamed, ("cpu",)),), collected=(renamed,))
    lists = {**evidence.manifest.lists, "cpu": (renamed,)}
    made = rundir.Evidence(
        replace(evidence.manifest, lists=lists),
        (failed, *evidence.record[1:]),
        MACHINE,
        evidence.before,
        evidence.baseline,
    )
    folder = rundir.make(tmp_path, str(tmp_path / "run"), "run")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step"))
    run.finish(folder, made)
    for name in ("summary.md", "report.html", "junit.xml", "statement.json", "verdict.json"):
        assert "caf" in (folder / name).read_text(encoding="utf-8")
    assert rundir.load(folder).manifest == made.manifest


def written(path, *events, nonce="n"):
    """A record with these events, its chain in order."""
    chain, lines = "", []
    header = {"kind": "header", "version": VERSION, "nonce": nonce, "worker": "", "optimize": 0}
    for event in (header, *events):
        body = event if isinstance(event, str) else json.dumps(event)
        chain = link(nonce, chain, body)
        lines.append(json.dumps({"chain": chain, "body": body}) + "\n")
    path.write_text("".join(lines))
    return path


PHASE = {
    "kind": "phase",
    "id": "t",
    "when": "call",
    "outcome": "passed",
    "xfail": False,
    "subtest": False,
    "body": True,
    "tries": 1,
    "raised": "",
    "seconds": 0.1,
    "text": "",
    "properties": [],
}
END = {"kind": "end", "status": 0}


def test_a_record_in_order_is_read(tmp_path):
    """What the malformed lines below are made from is itself in order."""
    done = read(written(tmp_path / "r.jsonl", PHASE, END), "cpu", "n", Exit(0))
    assert (done.damage, len(done.phases)) == ((), 1)


@pytest.mark.parametrize(
    "event",
    [
        "null",
        "[1]",
        "7",
        '"text"',
        "9" * 5000,
        "[" * 5000 + "]" * 5000,
        {},
        {"kind": ["phase"]},
        {"kind": "phase"},
        {**PHASE, "id": ["t"]},
        {**PHASE, "seconds": float("nan")},
        {**PHASE, "tries": True},
        {**PHASE, "properties": [["ranks"]]},
        {"kind": "selected", "tests": [["t", "cpu"]]},
        {"kind": "collected", "ids": "t"},
        {"kind": "imports", "modules": {"m": None}, "torch": None},
        {"kind": "end", "status": "0"},
        {"kind": "another"},
    ],
    ids=lambda event: (event if isinstance(event, str) else "-".join(map(str, event.values())))[:24] or "empty",
)
def test_a_strange_line_is_damage(tmp_path, event):
    """A line that is JSON and no event of a recorder's is found, also where its chain is in order."""
    path = written(tmp_path / "r.jsonl", event, END)
    done = read(path, "cpu", "n", Exit(0))
    assert [damage for damage, _ in done.damage] == [Damage.EDITED]
    progress.watcher(lambda *state: None, every=0.0)([path])
    path.rename(tmp_path / "r.gw0.jsonl")
    assert session.workers(path) == []


@pytest.mark.parametrize("line", ["null", "[]", "7", '{"chain": 1, "body": "[]"}', '{"chain": "x", "body": 5}'])
def test_a_first_line_that_is_none_is_damage(tmp_path, line):
    """Reading a file that begins with something else gives damage and no exception."""
    (tmp_path / "r.jsonl").write_text(f"{line}\n")
    assert [damage for damage, _ in read(tmp_path / "r.jsonl", "cpu", "n", Exit(0)).damage] == [Damage.EDITED]


def test_no_record_tells_what_the_session_said(tmp_path):
    """A session that left no record is explained by the end of its output."""
    (tmp_path / "cpu.log").write_bytes(b"starting\nImportError: no module named caf\xe9\n")
    ((damage, text),) = read(tmp_path / "cpu.jsonl", "cpu", "n", Exit(1)).damage
    assert damage is Damage.MISSING
    assert summary.gist(text) == "ImportError: no module named caf\\xe9"
    ((_, text),) = read(tmp_path / "gpu1.jsonl", "gpu1", "n", Exit(1)).damage
    assert text == "gpu1.jsonl; it printed nothing"


def test_junit_and_statement_take_any_outcome(odd):
    """What other programs read is written for the oddest session too."""
    assert junit.text(odd.record)
    made = statement.statement(odd.verdict(), odd.manifest, odd.record, odd.before)
    assert made["predicate"]["passedTests"] == list(IDS)

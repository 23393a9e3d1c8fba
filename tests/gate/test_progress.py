"""Progress in a terminal and in a log."""

from __future__ import annotations

import io
import json

from gefen_offload.gate import progress
from gefen_offload.gate.progress import Progress


def write(path, *events):
    with path.open("a") as file:
        for event in events:
            file.write(json.dumps({"chain": "", "body": json.dumps(event)}) + "\n")


def phase(id, when, outcome="passed"):
    return {"kind": "phase", "id": id, "when": when, "outcome": outcome}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_record_is_followed(tmp_path):
    """Each look shows what has been recorded until then, and reads each line once, half-written ones later."""
    record, seen = tmp_path / "r.jsonl", []
    watch = progress.watcher(lambda *state: seen.append((state[0], state[1], state[3])), every=0.0)
    watch([record])
    write(record, {"kind": "start", "id": "a"}, phase("a", "call", "failed"), phase("a", "teardown"))
    watch([record])
    with record.open("a") as file:
        file.write('{"chain": "", "bo')
    watch([record])
    assert seen == [(0, 0, ""), (1, 1, "a"), (1, 1, "a")]


def test_a_log_gets_plain_lines(tmp_path):
    """Where nobody looks at a terminal, lines are plain and end in a newline."""
    stream = io.StringIO()
    with Progress(stream).session("gpu2", 7):
        pass
    assert stream.getvalue() == "gate: gpu2: 7 tests\ngate: gpu2: ended after 0 s\n"
    assert progress.line("gpu2", 7, 3, 1, 61.2) == "gpu2: 3 of 7 tests, 1 failed, 61 s"


def test_a_terminal_gets_a_bar_with_any_test_name(tmp_path, monkeypatch):
    """A bar shows the running test, also one whose name looks like rich's markup."""
    monkeypatch.setattr(progress, "REFRESH", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    stream, record = Terminal(), tmp_path / "r.jsonl"
    write(record, {"kind": "start", "id": "test_it[/red]"}, phase("test_it[/red]", "teardown"))
    with Progress(stream).session("cpu", 2) as watch:
        watch([record])
    assert "1/2" in stream.getvalue()
    assert "test_it[/red]" in stream.getvalue()


def test_workers_are_added_up(tmp_path):
    """What several processes of one session have recorded is one count."""
    one, two, seen = tmp_path / "r.gw0.jsonl", tmp_path / "r.gw1.jsonl", []
    watch = progress.watcher(lambda *state: seen.append(state[:2]), every=0.0)
    write(one, phase("a", "call", "failed"), phase("a", "teardown"))
    write(two, phase("b", "teardown"))
    watch([one, two])
    write(two, phase("c", "teardown"))
    watch([one, two])
    assert seen == [(2, 1), (3, 1)]


def test_sessions_side_by_side_have_a_bar_each(tmp_path, monkeypatch):
    """Two sessions at a time are two bars of one display, and what is said meanwhile stays above them."""
    monkeypatch.setattr(progress, "REFRESH", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    shown = Progress(stream)
    with shown.session("cpu", 2) as first:
        with shown.session("gpu1", 3) as second:
            write(tmp_path / "a", phase("a", "teardown"))
            first([tmp_path / "a"])
            second([])
        first([tmp_path / "a"])
    text = stream.getvalue()
    assert "1/2" in text
    assert "0/3" in text
    assert text.index("gpu1: ended") < text.index("cpu: ended")

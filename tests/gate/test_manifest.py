"""The mandatory lists: written, read, damaged; tests that only parsing finds; what the check complains about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gefen_offload.gate import manifest
from gefen_offload.gate.manifest import Manifest
from gefen_offload.gate.record import Exit, Session

IDS = ("tests/test_a.py::test_one", "tests/test_a.py::test_two[x]")


def collected(*tests):
    """A collecting session that found these (id, tier) pairs."""
    return Session("collect", Exit(0), collected=tuple(id for id, _ in tests), selected=tests, status=0)


def test_a_written_list_reads_back():
    """What update writes, read accepts, in order."""
    text = manifest.render("gpu2", reversed(IDS))
    assert manifest.parse(text.encode(), headed=True) == (IDS, "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace(f"{IDS[0]}\n", ""), "says 2 ids"),
        (lambda text: text.replace("test_two", "test_too"), "another digest"),
        (lambda text: text + f"{IDS[0]}\n", "twice"),
        (lambda text: "\n".join(IDS), "no line with its count"),
    ],
    ids=["line-gone", "line-changed", "line-doubled", "header-gone"],
)
def test_an_edited_list_is_noticed(change, says):
    """A list that was changed by hand says what is wrong with it."""
    assert says in manifest.parse(change(manifest.render("cpu", IDS)).encode(), headed=True)[1]


def test_a_plain_list_is_enough_for_a_foreign_suite():
    """Without a header, comments and blank lines are left out and nothing is wrong."""
    assert manifest.parse(b"# ours\n\n" + "\n".join(IDS).encode(), headed=False) == (IDS, "")


@pytest.mark.parametrize("headed", [True, False], ids=["own", "foreign"])
def test_an_editors_bom_and_line_ends_change_nothing(headed):
    """A list that begins with a byte order mark and whose lines end in CRLF holds the same ids."""
    text = manifest.render("cpu", IDS).replace("\n", "\r\n")
    assert manifest.parse(text.encode("utf-8-sig"), headed) == (IDS, "")


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n\0\0\0", "test_a.py::test_one\n".encode("utf-16")], ids=["png", "utf-16"]
)
def test_a_list_that_is_no_text_is_named(tmp_path, content):
    """A binary list is a damaged one, with the byte that no text has."""
    (tmp_path / "cpu.txt").write_bytes(content)
    found = manifest.read(tmp_path)
    assert (found.lists["cpu"], found.damaged["cpu"].partition(": ")[0]) == ((), "is no text")


def test_lists_that_fit_draw_no_complaint(tmp_path):
    """Lists that are exactly the collected tests are in order."""
    found = collected((IDS[0], ("cpu",)), (IDS[1], ("gpu2",)))
    lists = Manifest({"cpu": IDS[:1], "gpu2": IDS[1:]})
    assert manifest.complaints(tmp_path, found, lists) == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (collected((IDS[0], ("cpu",))), "listed in cpu.txt, not collected: tests/test_a.py::test_two[x]"),
        (collected(*((id, ("cpu",)) for id in (*IDS, "new"))), "collected, not listed in cpu.txt: new"),
        (collected((IDS[0], ("cpu",)), (IDS[1], ("cpu", "gpu2"))), "not in exactly one tier (cpu, gpu2)"),
        (collected((IDS[0], ()), (IDS[1], ("cpu",))), "not in exactly one tier (none)"),
        (collected(*((id, ("cpu",)) for id in (*IDS, "test_x[A100]"))), "names hardware: test_x[A100]"),
        (collected(*((id, ("cpu",)) for id in (*IDS, IDS[0]))), "collected 2 times"),
    ],
    ids=["gone", "new", "two-tiers", "no-tier", "hardware", "doubled"],
)
def test_what_does_not_fit_is_named(found, says, tmp_path):
    """Each way in which lists and tests differ is a line that names the test."""
    assert any(says in line for line in manifest.complaints(tmp_path, found, Manifest({"cpu": IDS})))


def test_what_cannot_be_collected_is_named(tmp_path):
    """A collection error is a complaint with the error's own last line."""
    found = collected(*((id, ("cpu",)) for id in IDS))
    found = replace(found, collect_errors=(("tests/test_b.py", "failed", "Traceback\nImportError: no b"),))
    lines = manifest.complaints(tmp_path, found, Manifest({"cpu": IDS}))
    assert lines == ["collection failed: tests/test_b.py: ImportError: no b"]


@pytest.mark.parametrize(
    ("part", "kept"),
    [
        (("tests/a.py",), {"cpu": ("tests/a.py::test_one", "tests/a.py::test_two[x]")}),
        (("tests/a.py::test_two",), {"cpu": ("tests/a.py::test_two[x]",)}),
        (("tests/a.py::test_two[x]", "more/"), {"cpu": ("tests/a.py::test_two[x]",), "gpu1": ("more/b.py::test_one",)}),
        (("tests/a",), {}),
    ],
    ids=["file", "function", "test-and-folder", "half-a-name"],
)
def test_a_part_of_the_lists(part, kept):
    """A manifest cut down to a part keeps exactly the tests in it, and asks for no tier that has none."""
    lists = {"cpu": ("tests/a.py::test_one", "tests/a.py::test_two[x]"), "gpu1": ("more/b.py::test_one",)}
    found = manifest.cut_down(Manifest(lists), part)
    assert (found.lists, found.tiers, found.part) == (kept, tuple(kept), part)

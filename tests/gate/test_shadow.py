"""Tests that only parsing finds: those that a later statement of their file replaced, and what is no fault."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from gefen_offload.gate import shadow

TWICE = "def test_a(): ...\ndef test_a(): ...\n"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (TWICE, ["test_a"]),
        ("class TestA:\n    def test_b(self): ...\n    def test_b(self): ...", ["TestA::test_b"]),
        ("if True:\n    def test_a(): ...\ndef test_a(): ...", ["test_a"]),
        ("def test_a(): ...\ntry:\n    pass\nexcept ImportError:\n    async def test_a(): ...", ["test_a"]),
        ("try:\n    def test_a(): ...\nfinally:\n    def test_a(): ...", ["test_a"]),
        ("class TestA: ...\nclass TestA: ...", ["TestA"]),
        ("match 1:\n    case 1:\n        def test_a(): ...\n        def test_a(): ...", ["test_a"]),
        ("match 1:\n    case 1:\n        def test_a(): ...\ndef test_a(): ...", ["test_a"]),
        ("def test_a(): ...\ntest_a = None", ["test_a"]),
        ("def test_a(): ...\ntest_b, test_a = 1, 2", ["test_a"]),
        ("def test_a(): ...\nfor test_a in range(3): ...", ["test_a"]),
        ("def test_a(): ...\nfrom os import path as test_a", ["test_a"]),
        ("def test_a(): ...\nimport test_a.more", ["test_a"]),
        ("class TestA:\n    def test_b(self): ...\n    test_b = None", ["TestA::test_b"]),
    ],
    ids=[
        "functions",
        "methods",
        "under-if",
        "in-a-handler",
        "in-finally",
        "classes",
        "in-a-case",
        "after-match",
        "assigned",
        "unpacked",
        "loop",
        "imported",
        "module",
        "assigned-in-class",
    ],
)
def test_what_replaces_a_test(source, names):
    """A test is lost to any later definition, assignment or import of its name, in whatever block."""
    assert shadow.replaced(ast.parse(source).body) == names


@pytest.mark.parametrize(
    "source",
    [
        "def test_a(): ...\nclass TestB:\n    def test_a(self): ...\ndef helper(): ...\ndef helper(): ...",
        "if one:\n    def test_a(): ...\nelif two:\n    def test_a(): ...\nelse:\n    def test_a(): ...",
        "try:\n    import z\n    def test_a(): ...\nexcept ImportError:\n    def test_a(): ...",
        "try:\n    from z import test_a\nexcept ImportError:\n    def test_a(): ...",
        "match 1:\n    case 1:\n        def test_a(): ...\n    case _:\n        def test_a(): ...",
        "class TestA:\n    @property\n    def test_p(self): ...\n    @test_p.setter\n    def test_p(self, value): ...",
        "import typing\n@typing.overload\ndef test_a(): ...\n@overload\ndef test_a(): ...\ndef test_a(): ...",
        "@single\ndef test_a(): ...\n@test_a.register(int)\ndef test_a(): ...",
        "def test_a(): ...\ntest_a = mark(test_a)\ntest_a.slow = True",
        "class TestBase: ...\nclass TestA(TestBase): ...\ndel TestBase\nclass TestBase: ...",
        "test_data = [1]\ntest_data = [2]\ndef test_data_is_there(): ...",
    ],
    ids=["scopes", "else", "except", "import", "cases", "setter", "overload", "register", "wrapped", "deleted", "data"],
)
def test_what_replaces_nothing(source):
    """Variants of which one alone is reached, definitions that continue one another, and a name's own wrapper."""
    assert shadow.replaced(ast.parse(source).body) == []


@pytest.fixture
def suite(tmp_path):
    """A suite's folder with what is no file of its own."""
    for folder in (".hidden", "env/lib", "node_modules"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_foreign.py").write_text(TWICE)
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "test_folder.py").mkdir()
    (tmp_path / "test_gone.py").symlink_to("nowhere.py")
    return tmp_path


def test_only_the_files_of_the_suite_are_looked_at(suite):
    """Hidden folders, environments, folders with a file's name and links to nothing are left out."""
    (suite / "more").mkdir()
    (suite / "more" / "test_own.py").write_text(TWICE)
    assert shadow.shadowed(suite, (".",)) == ("more/test_own.py::test_a",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"# -*- coding: latin-1 -*-\nname = '\xe9'\n" + TWICE.encode(), "::test_a"),
        (b"\xef\xbb\xbf" + TWICE.replace("\n", "\r\n").encode(), "::test_a"),
        (b"name = '\xe9'\n", ": cannot be parsed (SyntaxError: "),
        (b"name = '\x00'\n", ": cannot be parsed ("),
        (b"def test_a(:\n", ": cannot be parsed (SyntaxError: "),
        (b"a = " + b"(" * 5000, ": cannot be parsed ("),
    ],
    ids=["latin-1", "bom", "unknown-coding", "null-byte", "syntax", "deep"],
)
def test_an_odd_file_is_read_or_named(tmp_path, content, says):
    """A file is read as Python reads it; a test file that cannot be is a line with its path and the error."""
    (tmp_path / "test_odd.py").write_bytes(content)
    (line,) = shadow.shadowed(tmp_path, (".",))
    assert line.startswith(f"test_odd.py{says}")


def test_a_file_that_is_no_test_may_hold_anything(tmp_path):
    """Data of a suite that happens to be broken Python is no fault."""
    (tmp_path / "broken.py").write_text(dedent("def test_a(:\n"))
    assert shadow.shadowed(tmp_path, (".",)) == ()

"""Tests that a later statement of their file replaced: pytest never sees them, only parsing finds them. Pure but for
the walk over the files.

A statement replaces a test if both are reached in one run of the file: the branches of an ``if``, a ``match`` or a
``try`` and its handlers are variants of each other, and no fault.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

FOREIGN = ("pyvenv.cfg", "conda-meta")
"""What the folder of an environment holds: its tests are not the suite's."""
SKIPPED = ("__pycache__", "node_modules")
UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
VARIANT = "overload"
"""The decorator of a definition that only types look at."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))


def shadowed(root: Path, folders: Sequence[str] = ("tests", "tests_distributed")) -> tuple[str, ...]:
    """Each replaced test as ``path::name``; a test file that cannot be parsed, with what is wrong with it."""
    return tuple(line for folder in folders for path in modules(root / folder) for line in seen(path, root))


def modules(folder: Path) -> Iterator[Path]:
    """The Python files below a folder, without those of hidden folders and of environments."""
    for place, inside, names in os.walk(folder):
        inside[:] = sorted(name for name in inside if not skipped(Path(place, name)))
        yield from (path for name in sorted(names) if (path := Path(place, name)).suffix == ".py" and path.is_file())


def skipped(folder: Path) -> bool:
    """Whether a folder below a suite is no part of it."""
    return folder.name.startswith(".") or folder.name in SKIPPED or any((folder / name).exists() for name in FOREIGN)


def seen(path: Path, root: Path) -> list[str]:
    """What is wrong in one file."""
    where = path.relative_to(root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes(), path.name)
        return [f"{where}::{name}" for name in dict.fromkeys(replaced(tree.body))]
    except UNREADABLE as error:
        # a file that pytest does not collect may hold anything
        tests = path.name.startswith("test_") or path.name.endswith("_test.py")
        return [f"{where}: cannot be parsed ({type(error).__name__}: {error})"] if tests else []


def replaced(body: Sequence[ast.stmt]) -> list[str]:
    """The tests of a module that a later statement of their scope replaced."""
    scope = Scope("")
    scope.block(body, frozenset())
    return scope.lost


class Scope:
    """One module or class, read in the order in which it runs."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.lost: list[str] = []

    def block(self, body: Iterable[ast.stmt], live: frozenset[str]) -> frozenset[str]:
        """Read statements that follow one another; from the tests that are defined before them to those after."""
        for node in body:
            live = self.statement(node, live)
        return live

    def statement(self, node: ast.stmt, live: frozenset[str]) -> frozenset[str]:
        """Read one statement."""
        if isinstance(node, DEFINITIONS):
            return self.definition(node, live)
        if isinstance(node, ast.Delete):
            return live - {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, (ast.If, ast.Match)):
            ways = [node.body, node.orelse] if isinstance(node, ast.If) else [[], *(case.body for case in node.cases)]
            return frozenset().union(*(self.block(way, live) for way in ways))
        if isinstance(node, TRIES):
            ways = [[*node.body, *node.orelse], *(handler.body for handler in node.handlers)]
            live = frozenset().union(*(self.block(way, live) for way in ways))
            return self.block(node.finalbody, live)
        self.lose(live & bound(node))
        live = self.block(getattr(node, "body", []), live - bound(node))
        return self.block(getattr(node, "orelse", []), live)

    def definition(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, live: frozenset[str]
    ) -> frozenset[str]:
        """Read a definition, and what a class defines inside."""
        if isinstance(node, ast.ClassDef):
            inner = Scope(f"{self.prefix}{node.name}::")
            inner.block(node.body, frozenset())
            self.lost += inner.lost
        if not node.name.lower().startswith("test") or continues(node):
            return live
        self.lose(live & {node.name})
        return live | {node.name}

    def lose(self, names: Iterable[str]) -> None:
        """Note that these tests were replaced."""
        self.lost += [self.prefix + name for name in sorted(names)]


def continues(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether a definition adds to the one before it: ``@name.setter``, ``@name.register(int)``, ``@overload``."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(called, ast.Attribute) and mentions(called.value, node.name):
            return True
        if VARIANT in (getattr(called, "id", ""), getattr(called, "attr", "")):
            return True
    return False


def bound(node: ast.stmt) -> frozenset[str]:
    """Names that a statement which is no definition gives another value; not where that is made from the old one."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return frozenset(alias.asname or alias.name.partition(".")[0] for alias in node.names)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.value
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        targets, value = [node.target], node.iter
    else:
        return frozenset()
    parts = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    names = {part.id for part in parts if isinstance(part.ctx, ast.Store)}
    return frozenset(name for name in names if value is not None and not mentions(value, name))


def mentions(tree: ast.expr, name: str) -> bool:
    """Whether an expression uses a name."""
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(tree))

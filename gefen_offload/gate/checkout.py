"""The source tree under judgement: its commit, whether it is dirty, a digest of its files, a view to import it by."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gefen_offload

PACKAGE = "gefen_offload"
PYTEST_SETTINGS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini")
"""Files that pytest would obey before pyproject.toml; there is none of them."""
DIGESTED = (
    PACKAGE,
    "tests",
    "tests_distributed",
    "ci",
    "pyproject.toml",
    "conftest.py",
    "README.md",
    "LICENSE",
    *PYTEST_SETTINGS,
)
"""What is judged or judges, as far as it is there."""
CACHE = re.compile(r"(\?\?|!!) \"?(.*/)?__pycache__/")
"""A line of ``git status`` about what Python keeps compiled."""
GIT_TIMEOUT = 60.0


class GitError(RuntimeError):
    """Git is absent, says no, or takes too long; the message names its command and what it said."""


@dataclass(frozen=True)
class Source:
    """What identifies the judged source."""

    commit: str | None
    """The full commit hash, or None where git or commits are missing and none was named."""
    claimed: bool
    """Whether the commit was named on the command line rather than read from git."""
    dirty: tuple[str, ...]
    """What keeps the tree from being the commit, as ``git status --porcelain`` writes it, or why that is unknown."""
    digest: str
    """SHA-256 over the names and contents of the files that are judged or judge."""


def root() -> Path | None:
    """The checkout that this package stands in; None where it is installed."""
    folder = Path(gefen_offload.__file__).resolve().parent.parent
    return folder if (folder / "pyproject.toml").is_file() and (folder / "ci").is_dir() else None


def source(folder: Path, claimed: str | None = None) -> Source:
    """Identify the source in ``folder``; ``claimed`` names the commit where git cannot."""
    commit = head(folder)
    if commit is None:
        return Source(claimed, claimed is not None, (), digest(folder))
    return Source(commit, False, dirt(folder), digest(folder))


def head(folder: Path) -> str | None:
    """The commit that is checked out in ``folder``; None for a copy without git or commits of its own."""
    try:
        inside = git(folder, "rev-parse", "--show-toplevel")
        commit = git(folder, "rev-parse", "--verify", "HEAD")
    except GitError:
        return None
    return commit if Path(inside).resolve() == folder.resolve() else None


def contradiction(folder: Path, claimed: str | None) -> str:
    """What is wrong with naming this commit for ``folder``, where git names another; empty if nothing."""
    commit = head(folder)
    if claimed is None or commit in (None, claimed):
        return ""
    return f"--commit {claimed}: this checkout is at {commit}; leave --commit out, or check out what it names"


def dirt(folder: Path) -> tuple[str, ...]:
    """What keeps the tree from being its commit.

    ``git status`` is believed about the whole tree. About the judged files it is asked again, with an index made anew
    from the commit: that one overlooks nothing (``--skip-worktree``, ``--assume-unchanged``), and ignored files count
    too, since they would enter the wheel or be collected.
    """
    with tempfile.TemporaryDirectory(prefix="gefen-offload-index-") as scratch:
        anew = Path(scratch) / "index"
        try:
            listed = git(folder, "status", "--porcelain", "--untracked-files=normal")
            git(folder, "read-tree", "--no-sparse-checkout", "HEAD", index=anew)
            every = ("--untracked-files=all", "--ignored", "--", *DIGESTED)
            judged = git(folder, "status", "--porcelain", *every, index=anew)
        except GitError as error:
            return (f"whether it is clean is unknown: {error}",)
    lines = [*listed.splitlines(), *judged.splitlines()]
    return tuple(dict.fromkeys(line for line in lines if not CACHE.match(line)))


def git(folder: Path, *arguments: str, index: Path | None = None) -> str:
    """The output of one git command that changes nothing in ``folder``; :class:`GitError` where there is none."""
    # The checkout may belong to another user (a container's mount): naming it safe here changes no configuration.
    options = ("-c", f"safe.directory={folder}", "-c", "core.fsmonitor=false", "-c", "core.quotePath=true")
    command = ["git", *options, "--no-optional-locks", "--no-replace-objects", *arguments]
    # In a git hook, variables point to the repository of the hook.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    if index is not None:
        variables["GIT_INDEX_FILE"] = str(index)
    try:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=GIT_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {arguments[0]}: {error}") from error
    if done.returncode:
        raise GitError(f"git {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout.strip("\n")


def digest(folder: Path) -> str:
    """SHA-256 over the sorted relative names and contents of the judged files; caches do not count."""
    total = hashlib.sha256()
    for path in judged_files(folder):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder)} {content}\n".encode())
    return total.hexdigest()


def judged_files(folder: Path) -> list[Path]:
    """The files that the digest covers."""
    found: list[Path] = []
    for name in DIGESTED:
        top = folder / name
        inside = top.rglob("*") if top.is_dir() else [top]
        found += [path for path in inside if path.is_file() and "__pycache__" not in path.parts]
    return sorted(found)


def view(folder: Path, into: Path) -> Path:
    """A folder to put on the module path that shows the checkout as an installed package, entry points included.

    It holds a link to the package and a little metadata, so it needs no build tool, writes nothing into the checkout,
    and lets child processes find the pytest plugin as they would in an installation.
    """
    metadata = into / f"{PACKAGE}-{gefen_offload.__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    link = into / PACKAGE
    if not link.is_symlink():
        link.symlink_to(folder / PACKAGE, target_is_directory=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {gefen_offload.__version__}\n"
    )
    (metadata / "entry_points.txt").write_text(
        f"[console_scripts]\ngefen-offload = {PACKAGE}.cli:main\n\n"
        f"[pytest11]\n{PACKAGE}_ranks = {PACKAGE}.ranks.plugin\n"
    )
    return into

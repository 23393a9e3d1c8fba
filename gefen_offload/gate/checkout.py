"""The source tree under judgement: its commit, whether it is dirty, a digest of its files, a view to import it by."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

import gefen_offload

PACKAGE = "gefen_offload"
DIGESTED = (PACKAGE, "tests", "tests_distributed", "ci", "pyproject.toml", "conftest.py")


@dataclass(frozen=True)
class Source:
    """What identifies the judged source."""

    commit: str | None
    """The full commit hash, or None where git or commits are missing and none was named."""
    claimed: bool
    """Whether the commit was named on the command line rather than read from git."""
    dirty: tuple[str, ...]
    """Changed and untracked files, as ``git status --porcelain`` lists them."""
    digest: str
    """SHA-256 over the names and contents of the files that are judged or judge."""


def root() -> Path | None:
    """The checkout that this package stands in; None where it is installed."""
    folder = Path(gefen_offload.__file__).resolve().parent.parent
    return folder if (folder / "pyproject.toml").is_file() and (folder / "ci").is_dir() else None


def source(folder: Path, claimed: str | None = None) -> Source:
    """Identify the source in ``folder``; ``claimed`` names the commit where git cannot."""
    commit = git(folder, "rev-parse", "--verify", "HEAD")
    inside = git(folder, "rev-parse", "--show-toplevel")
    if not commit or not inside or Path(inside).resolve() != folder.resolve():
        return Source(claimed, claimed is not None, (), digest(folder))
    status = git(folder, "status", "--porcelain", "--untracked-files=normal") or ""
    return Source(commit, False, tuple(status.splitlines()), digest(folder))


def git(folder: Path, *arguments: str) -> str | None:
    """The output of one read-only git command; None where git is absent or says no."""
    # The checkout may belong to another user (a container's mount): naming it safe here changes no configuration.
    safe = ("-c", f"safe.directory={folder}", "--no-optional-locks")
    try:
        done = subprocess.run(["git", *safe, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None


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

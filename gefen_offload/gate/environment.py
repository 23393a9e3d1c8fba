"""The interpreter that the commands run on: the current one where it will do, else one made here.

This file runs before anything is installed, so it uses the standard library only. An environment is made in a folder
that carries a marker from its first moment; the marker says ``building`` until the last package is in, so one that was
interrupted is recognised, removed and made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEEDED = ("torch", "pytest")
TESTS_IMPORT = {  # and the package that brings it
    "hypothesis": "hypothesis",
    "gefen": "gefen-x",
    "deepspeed": "deepspeed",
    "torchao": "torchao",
    "triton": "triton",
}
MINIMUM = (3, 10)
MARKER = ".gefen-offload-environment"
LOCK = ".gefen-offload-lock"
BUILDING = "building"
START = """
import sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
from gefen_offload.cli import main
sys.exit(main())
"""
"""Starts ``gefen-offload`` from the folder that is the first argument, and imports nothing from the current one."""


class NoInterpreterError(RuntimeError):
    """No usable interpreter could be found or made; the message says what to do."""


def main() -> None:
    """Run ``gefen-offload`` with the given arguments on an interpreter that has what it needs.

    ``sys.argv[1]`` is the checkout; the rest is the command line.
    """
    root, arguments = Path(sys.argv[1]), sys.argv[2:]
    try:
        python = interpreter(root)
    except NoInterpreterError as error:
        sys.exit(f"gefen-offload: {error}")
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])}
    sys.stdout.flush()
    os.execve(python, [python, "-c", START, str(root), *arguments], environment)


def interpreter(root: Path) -> str:
    """The path of a Python with torch and pytest: the current one, or that of the checkout's own environment."""
    if sys.version_info < MINIMUM:
        raise NoInterpreterError(
            f"Python {sys.version.split()[0]} at {sys.executable} is too old; put Python 3.10 or newer first on PATH, "
            "or name one: PYTHON=/path/to/python ./ci/gate"
        )
    if all(importlib.util.find_spec(name) for name in NEEDED):
        return sys.executable
    constraints = root / "ci" / "constraints.txt"
    for place in places(root):
        if complete(place, constraints) or theirs(place):
            return str(place / "bin" / "python")
    folder = first_writable(root)
    if folder is None:
        raise NoInterpreterError(
            f"none of these places can be written: {', '.join(map(str, places(root)))}; set GEFEN_OFFLOAD_VENV"
        )
    with locked(folder):
        if not complete(folder, constraints):
            build(folder, constraints)
    return str(folder / "bin" / "python")


def lacking() -> str:
    """What the tests import and this Python does not have, with what to do; empty where nothing is missing."""
    missing = [package for module, package in TESTS_IMPORT.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return ""
    return (
        f"{sys.executable} has torch and pytest, but lacks what the tests import: {', '.join(missing)}. Install that "
        f"there (pip install -c ci/constraints.txt {' '.join(missing)}), or start from a Python without torch, and an "
        "environment is made"
    )


def places(root: Path) -> list[Path]:
    """Where an environment may stand, in order: as asked, in the checkout, in the user's cache, in a temp folder."""
    key = f"{hashlib.sha256(str(root).encode()).hexdigest()[:12]}-py{sys.version_info[0]}.{sys.version_info[1]}"
    asked = os.environ.get("GEFEN_OFFLOAD_VENV")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gefen_offload"
    temporary = Path(tempfile.gettempdir()) / f"gefen_offload-{os.getuid()}"
    found = [Path(asked)] if asked else []
    return [*found, root / ".venv", cache / key, temporary / key]


def first_writable(root: Path) -> Path | None:
    """The first place in which an environment may be made."""
    return next((place for place in places(root) if writable(place)), None)


def complete(folder: Path, constraints: Path) -> bool:
    """Whether this environment was made here, to the end, from these constraints, and its Python still starts."""
    try:
        matches = (folder / MARKER).read_text() == stamp(constraints)
    except OSError:
        return False
    return matches and starts(folder, "import torch, pytest")


def theirs(folder: Path) -> bool:
    """Whether a person's own environment stands here and has what is needed; it is used and never changed."""
    if (folder / MARKER).exists() or not (folder / "bin" / "python").exists():
        return False
    return starts(folder, "import torch, pytest")


def starts(folder: Path, code: str) -> bool:
    """Whether the environment's Python runs ``code``."""
    try:
        return subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, timeout=300).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def writable(folder: Path) -> bool:
    """Whether an environment may be made here: the place can be written, and nothing of somebody else's is in it."""
    try:
        if folder.exists() and not (folder / MARKER).exists() and any(folder.iterdir()):
            return False
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).open("a").close()
    except OSError:
        return False
    return True


def stamp(constraints: Path) -> str:
    """What a finished environment's marker says: the digest of the constraints, and the Python they were put on."""
    return f"{hashlib.sha256(constraints.read_bytes()).hexdigest()} {sys.version.split()[0]}\n"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the place, so that two commands started together make it once."""
    with (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(folder: Path, constraints: Path) -> None:
    """Make the environment, torch first: the build of torch decides what else is chosen.

    With it comes what an old pip needs to build the packages that exist as source only.
    """
    for entry in folder.iterdir():
        if entry.name not in (MARKER, LOCK):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    (folder / MARKER).write_text(BUILDING)
    say(f"making a Python environment in {folder} (once; some minutes)")
    make(folder)
    python = str(folder / "bin" / "python")
    install(python, "-c", str(constraints), "torch", "setuptools", "wheel")
    install(python, "-r", str(constraints))
    finished = folder / f"{MARKER}.new"
    finished.write_text(stamp(constraints))
    finished.replace(folder / MARKER)


def make(folder: Path) -> None:
    """Make an empty environment that has pip, also where this Python lacks ensurepip and pip stands beside it."""
    with suppress(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        return
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    run_pip([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "pip"])


def install(python: str, *arguments: str) -> None:
    """Let the environment's own pip install, quietly, obeying the user's pip settings."""
    say(f"pip install {' '.join(arguments)}")
    run_pip([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def run_pip(command: list[str]) -> None:
    """Run pip, and say what failed and what to do when it does."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise NoInterpreterError(
            f"{' '.join(command)} ended with {done.returncode} (its own message stands above). Without a network, "
            "start from an interpreter that already has torch and pytest: PYTHON=/path/to/python ./ci/gate"
        )


def say(text: str) -> None:
    """One plain line to the person waiting."""
    print(f"gefen-offload: {text}", file=sys.stderr, flush=True)

"""The wheel under judgement: built offline from the checkout, put alone into a folder that the sessions import from."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from gefen_offload.gate import distinfo
from gefen_offload.gate.checkout import PACKAGE
from gefen_offload.gate.facts import Wheel
from gefen_offload.gate.session import inherited_path

SOURCES = ("pyproject.toml", "README.md", "LICENSE", PACKAGE)
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
EPOCH = "1704067200"
"""The time stamp of every file in the wheel, so that the same source gives the same digest."""


class WheelError(RuntimeError):
    """The wheel could not be built or installed; the message says what to do."""


def build(root: Path, python: str, into: Path) -> Path:
    """Build the wheel from a copy of the sources, with the interpreter's own setuptools and no network.

    The copy keeps a read-only checkout as it is, and keeps an old ``build/`` folder out of the wheel.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gefen-offload-build-") as scratch:
        copy = Path(scratch) / "source"
        copy.mkdir()
        for name in SOURCES:
            copy_source(root / name, copy / name)
        done = subprocess.run(
            [python, "-c", BUILD, str(into.resolve())],
            cwd=copy,
            env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "PYTHONPATH": os.pathsep.join(inherited_path(PACKAGE))},
            capture_output=True,
            text=True,
            timeout=300,
        )
    if done.returncode:
        raise WheelError(
            f"the wheel could not be built by {python}: {done.stderr.strip()[-600:]}\n"
            "It needs setuptools 77 or newer there; or give a wheel that was built elsewhere: --wheel FILE"
        )
    return into / done.stdout.splitlines()[-1]


def given(wheel: Path, into: Path) -> Path:
    """A wheel that was built elsewhere, copied to the evidence: what is published later is this copy."""
    if not wheel.is_file():
        raise WheelError(f"--wheel {wheel}: there is no such file")
    into.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, into / wheel.name))


def copy_source(source: Path, target: Path) -> None:
    """Copy a file or a folder, without caches and writable whatever the original was."""
    if source.is_file():
        shutil.copyfile(source, target)
        return
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copied = target / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)


def install(wheel: Path, site: Path, root: Path | None) -> Wheel:
    """Unpack a pure-Python wheel, which is all that installing one means, and compare it with the checkout."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            flavour = next((name for name in names if name.endswith(".dist-info/WHEEL")), None)
            if flavour is None or b"Root-Is-Purelib: true" not in archive.read(flavour):
                raise WheelError(f"{wheel.name} is not a pure-Python wheel; the gate installs no other")
            archive.extractall(site)
    except (zipfile.BadZipFile, OSError) as error:
        raise WheelError(f"{wheel} cannot be unpacked: {error}") from error
    files = installed(site)
    differs = differences(wheel.name, site, files, root) if root else ()
    return Wheel(wheel.name, sha256(wheel), str(site), files, differs)


def again(before: Wheel, wheel: Path) -> Wheel:
    """Read the installed wheel once more, after the sessions."""
    return Wheel(before.name, sha256(wheel), before.site, installed(Path(before.site)), before.differs)


def installed(site: Path) -> dict[str, str]:
    """The digest of each file below ``site``."""
    paths = [path.relative_to(site) for path in site.rglob("*") if path.is_file()]
    return {str(path): sha256(site / path) for path in sorted(paths) if "__pycache__" not in path.parts}


def differences(name: str, site: Path, files: Mapping[str, str], root: Path) -> tuple[str, ...]:
    """What the installed wheel holds that the checkout does not give, and the reverse: files, and lines of metadata."""
    inside = {path: digest for path, digest in files.items() if path.startswith(f"{PACKAGE}/")}
    ours = {f"{PACKAGE}/{path}": digest for path, digest in installed(root / PACKAGE).items()}
    wrong = sorted(path for path in {*inside, *ours} if inside.get(path) != ours.get(path))
    named = [] if name == distinfo.WHEEL else [f"{name}: this checkout's is {distinfo.WHEEL}"]
    return (*named, *wrong, *distinfo.differences(site, files, root))


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()

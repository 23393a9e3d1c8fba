"""What this machine can validate, and what is in the way: one line each, exit code 0 if nothing is."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gefen_offload.gate import checkout, environment, facts
from gefen_offload.gate.recorder import TIERS
from gefen_offload.gate.verdict import possible

TOOLS = ("pytest", "pytest_timeout", "setuptools", "jinja2", "rich", "xdist", "ruff", "mypy", "triton")
SHARED_MEMORY_MIB = 512
FILES = 4096


@dataclass(frozen=True)
class Line:
    """One thing looked at: ``ok``, ``note`` or ``problem``, and what to do about it."""

    state: str
    subject: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def main(arguments: argparse.Namespace) -> int:
    """Print every line; 1 if there is a problem."""
    lines = [*software(), *gpus(), *limits(), *source()]
    for line in lines:
        print(f"{line.state:8} {line.subject:14} {line.text}")
    return int(any(line.state == "problem" for line in lines))


def software() -> Iterator[Line]:
    """The interpreter and the packages."""
    found = facts.software()
    yield Line("ok", "python", f"{found.python} at {sys.executable}")
    if found.torch is None:
        yield Line(
            "problem", "torch", "cannot be imported; ./ci/gate makes an environment, or install torch 2.9 or newer"
        )
    else:
        yield Line("ok", "torch", f"{found.torch}, CUDA {found.cuda}, NCCL {found.nccl}, Triton {found.triton}")
    for name in TOOLS:
        if importlib.util.find_spec(name) is None:
            state = "problem" if name in ("pytest", "setuptools") else "note"
            yield Line(state, name, "not installed")
    if why := environment.lacking():
        yield Line("problem", "tests", why)


def gpus() -> Iterator[Line]:
    """The GPUs, who is on them, and the tiers that they allow."""
    present = facts.gpus()
    for gpu in present:
        yield Line(
            "ok", "gpu", f"{gpu.name} {gpu.uuid}, driver {gpu.driver}, {gpu.free_mib} of {gpu.total_mib} MiB free"
        )
    for who in facts.foreign_processes(present):
        yield Line("problem", "gpu", f"in use: {who}; the gate needs it idle")
    machine = facts.Facts(present, (), facts.Software("", None), None, None, cores=len(os.sched_getaffinity(0)))
    able = [tier for tier in TIERS if possible(tier, machine)]
    yield Line("ok", "tiers", f"can run: {', '.join(able)}")
    if "gpu2" not in able:
        yield Line("note", "tiers", "a release verdict needs two GPUs")


def limits() -> Iterator[Line]:
    """What ranks need of the system: shared memory, open files, a place for temporary files."""
    import resource

    free = shutil.disk_usage("/dev/shm").free // 2**20 if Path("/dev/shm").is_dir() else 0
    enough = free >= SHARED_MEMORY_MIB
    yield Line(
        "ok" if enough else "problem", "/dev/shm", f"{free} MiB free" + ("" if enough else "; NCCL needs 512 MiB")
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Line("ok" if soft >= FILES else "note", "open files", f"{soft} (ulimit -n)")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    yield Line(
        "ok" if unlimited else "note",
        "locked memory",
        "unlimited" if unlimited else f"{locked // 1024} KiB (ulimit -l)",
    )


def source() -> Iterator[Line]:
    """The checkout, if this is one."""
    root = checkout.root()
    if root is None:
        yield Line("note", "checkout", "none: this is an installed package; the gate judges foreign suites only")
        return
    found = checkout.source(root)
    if found.commit is None:
        yield Line("note", "checkout", f"{root} has no commit; verdicts on it are not releasable")
    elif found.dirty:
        yield Line("note", "checkout", f"{found.commit[:12]}, {len(found.dirty)} uncommitted changes: --allow-dirty")
    else:
        yield Line("ok", "checkout", f"{found.commit[:12]}, clean")

"""Looking at ranks that did not finish, before anything is torn down: what the kernel says, and Python stacks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gefen_offload.ranks.rank import DUMP_SIGNAL

if TYPE_CHECKING:
    from gefen_offload.ranks.process import RankProcess

PATIENCE = 0.4  # seconds for all stacks together, and again for all flight recorders
_QUIET = 0.04


@dataclass(frozen=True)
class Look:
    """What one stuck process showed."""

    state: str
    stack: str
    flight: str


def look(processes: Sequence[RankProcess]) -> list[Look]:
    """Look at every process at once; stopped ones are continued so that they can say where they are."""
    states = [p.state() for p in processes]
    before = [_size(p.boot.file("stack")) for p in processes]
    for process, found in zip(processes, states, strict=True):
        if found == "stopped":
            _send(process.pid, signal.SIGCONT)
        if _handles(process.pid, DUMP_SIGNAL):
            _send(process.pid, DUMP_SIGNAL)
    _wait_for([p.boot.file("stack") for p in processes], before)
    _ask_for_flights([p for p in processes if p.boot.torch])
    return [
        Look(found, _read(p.boot.file("stack"), start), _read(p.boot.file("flight"), 0))
        for p, found, start in zip(processes, states, before, strict=True)
    ]


def _ask_for_flights(processes: Sequence[RankProcess]) -> None:
    """Only when the stacks are written: a stack is read without the GIL, so no thread of ours should run meanwhile."""
    for process in processes:
        _ask(process.boot.file("ask"))
    if processes:
        _wait_for([p.boot.file("flight") for p in processes], [0] * len(processes))


def _wait_for(files: Sequence[Path], before: Sequence[int]) -> None:
    """Until every file has grown and rests, or patience ends."""
    limit = time.monotonic() + PATIENCE
    sizes = list(before)
    while time.monotonic() < limit:
        time.sleep(_QUIET)
        now = [_size(f) for f in files]
        if now == sizes and all(n > b for n, b in zip(now, before, strict=True)):
            return
        sizes = now


def _ask(pipe: Path) -> None:
    """Have the rank's watching thread write the flight recorder; it cannot while the GIL is held."""
    with contextlib.suppress(OSError):
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, b"?")
        os.close(fd)


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal: early in its start it has none and would die of it."""
    with contextlib.suppress(OSError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, start: int) -> str:
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", "replace").strip()

"""What a session left running: whatever is below its launcher, or carries its mark."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "GEFEN_OFFLOAD_GATE_RUN"
POLL = 0.05
KILL_PATIENCE = 5.0


def leftovers(launcher: int, nonce: str, grace: float) -> tuple[str, ...]:
    """Processes of a session after its end: they get a grace to go, are named, and then killed.

    The launcher adopts what detaches itself, also without the mark; the mark finds what outlived a launcher.
    """
    deadline = time.monotonic() + grace
    while (found := left(launcher, nonce)) and time.monotonic() < deadline:
        time.sleep(POLL)
    named = {pid: command_line(pid) for pid in found}
    deadline = time.monotonic() + KILL_PATIENCE
    while (found := left(launcher, nonce)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL)
    return tuple(f"process {pid}: {line}" for pid, line in sorted(named.items()))


def left(launcher: int, nonce: str) -> set[int]:
    """The session's live processes, without its launcher."""
    return (below(launcher) | marked(nonce)) - {launcher, os.getpid()}


def below(root: int) -> set[int]:
    """Live processes that a process, or one below it, is the parent of."""
    parents = {pid: parent for pid in pids() if (parent := parent_of(pid)) is not None}
    found, more = set[int](), {root}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more} - found
        found |= more
    return found


def parent_of(pid: int) -> int | None:
    """A live process's parent; None for one that is gone or waits to be reaped."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in (b"Z", b"X") else int(parent)


def marked(nonce: str) -> set[int]:
    """Live processes whose environment carries the mark."""
    name = f"{MARK}=".encode()
    found: set[int] = set()
    for pid in pids():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        marks = next((value for value in variables if value.startswith(name)), b"").partition(b"=")[2]
        if nonce.encode() in marks.split(b":"):
            found.add(pid)
    return found


def pids() -> list[int]:
    """Every process's id."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid: int) -> str:
    """What a process was started as, as far as it can still be read."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        line = b""
    return line.replace(b"\0", b" ").decode(errors="backslashreplace").strip()[:200]

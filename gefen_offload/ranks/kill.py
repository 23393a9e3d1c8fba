"""Ending recorded processes and what they started, and nothing else. Imports no torch: the reaper runs it too."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TOKEN = "GEFEN_RANKS_RUN"  # in the environment of every process of a run
SHARED = "/dev/shm/"


@dataclass(frozen=True)
class Member:
    """A recorded process: its start time tells it from a later process with the same number."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Member | None:
        fields = _stat(pid)
        return None if fields is None else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """Whether it runs still; a zombie does not."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.started and fields[0] not in "ZX"


def state(pid: int) -> str:
    """`running`, `sleeping`, `stopped`, `zombie`, ... as the kernel has it; "gone" when there is none."""
    fields = _stat(pid)
    if fields is None:
        return "gone"
    words = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "zombie"}
    return words.get(fields[0], fields[0])


def end(members: Iterable[Member], tokens: Iterable[str], patience: float = 5.0) -> list[int]:
    """Kill the members' process groups and every process that carries a token; the pids that outlived `patience`."""
    members = list(members)
    recorded = [m for m in members if m.alive]
    needles = list(tokens)
    shared: set[str] = set()
    limit = time.monotonic() + patience
    while True:
        strays = carriers(needles)
        alive = {m.pid for m in recorded if m.alive} | strays
        shared |= {path for pid in alive for path in _shared_files(pid)}
        for pid in alive:
            _kill(pid)
        for member in recorded:
            _kill_group(member.pid)
        if not alive or time.monotonic() > limit:
            break
        time.sleep(0.005)
    _remove_unused(shared | {path for member in members for path in _named_after(member.pid)})
    return sorted(alive)


def carriers(tokens: Iterable[str]) -> set[int]:
    """Processes of this user that were started with a token (or the beginning of one) in their environment."""
    needles = [f"{TOKEN}={token}".encode() for token in tokens]
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{name}/environ").read_bytes()
                if any(needle in environ for needle in needles) and state(int(name)) not in ("zombie", "gone"):
                    found.add(int(name))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    """The group that a recorded process leads; as long as it has a member, the number cannot be anyone else's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if leader != os.getpgrp():
            os.killpg(leader, signal.SIGKILL)


def _shared_files(pid: int) -> set[str]:
    """Files in /dev/shm that a process has mapped or open."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if SHARED in line and not line.endswith("(deleted)"):
                found.add(line[line.index(SHARED) :])
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith(SHARED) and not target.endswith("(deleted)"):
                    found.add(target)
    return found


def _named_after(pid: int) -> set[str]:
    """Files of torch's shared tensors carry their maker's number: who died is no longer seen to map them."""
    return {str(path) for path in Path(SHARED).glob(f"torch_{pid}_*")}


def _remove_unused(paths: set[str]) -> None:
    """Shared-memory files of ended processes that no other process has mapped."""
    if not paths:
        return
    used: set[str] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            used |= _shared_files(int(name))
    for path in paths - used:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: [0] is the state, [19] the start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None

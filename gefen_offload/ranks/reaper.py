"""The reaper: a process without torch that outlives its run by a moment, to leave nothing of it behind.

It reads a lifeline pipe from the run. While the run lives it is told which process groups and folders there are; when
the pipe breaks, however the run ended, it kills those groups, what they started, and removes the folders.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from gefen_offload.ranks.kill import Member, end

POLL = 0.5  # seconds between looks at whether the parent is still ours: a copy of the pipe may live in another process


class Reaper:
    """The run's end of the lifeline."""

    def __init__(self, token: str) -> None:
        root = str(Path(__file__).resolve().parents[2])
        code = f"import sys; sys.path.insert(0, {root!r}); from gefen_offload.ranks.reaper import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", code, token, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def record_folder(self, path: Path) -> None:
        self._tell(f"folder {path}")

    def record(self, member: Member) -> None:
        self._tell(f"add {member.pid} {member.started}")

    def forget(self, member: Member) -> None:
        self._tell(f"drop {member.pid} {member.started}")

    def close(self) -> None:
        """The run ends: the reaper cleans up what is left and goes."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()


def main() -> None:
    """Entry point of the reaper's process: TOKEN PARENT."""
    token, parent = sys.argv[1], int(sys.argv[2])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    members, folders = _listen(parent)
    end(members, [token])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    end(members, [token])
    os._exit(0)


def _listen(parent: int) -> tuple[set[Member], set[str]]:
    """Follow the lifeline until it breaks; what is recorded then."""
    members: set[Member] = set()
    folders: set[str] = set()
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL)
        chunk = os.read(0, 1 << 16) if ready else b""
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            word, _, text = line.decode().partition(" ")
            if word == "folder":
                folders.add(text)
            elif word in ("add", "drop"):
                pid, started = map(int, text.split())
                (members.add if word == "add" else members.discard)(Member(pid, started))
        if (ready and not chunk) or (not ready and os.getppid() != parent):
            return members, folders

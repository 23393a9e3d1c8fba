"""The reaper: a process without torch that outlives its run by a moment, to leave nothing of it behind.

It reads a lifeline, a socket, from the run. While the run lives it is told which process groups there are; when the
lifeline breaks, however the run ended, it kills those groups and what they started, and removes the run's folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gefen_offload.ranks.kill import Member, end

if TYPE_CHECKING:
    from gefen_offload.ranks.lease import Lease

POLL = 0.5  # seconds between looks at whether the parent is still ours: a copy of it may live in another process


class Reaper:
    """The run's end of the lifeline."""

    def __init__(self, token: str, folder: Path) -> None:
        root = str(Path(__file__).resolve().parents[2])
        code = f"import sys; sys.path.insert(0, {root!r}); from gefen_offload.ranks.reaper import main; main()"
        self._line, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", code, token, str(os.getpid()), str(folder)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def hold(self, lease: Lease) -> None:
        """Keep the lease's locks until the run's ranks are dead, if the run dies first."""
        fds = [lock.fd for lock in lease.locks]
        with contextlib.suppress(OSError):
            socket.send_fds(self._line, [f"sweep {lease.locks[0].path.parent}\n".encode()], fds)

    def record(self, member: Member) -> None:
        self._tell(f"add {member.pid} {member.started}")

    def forget(self, member: Member) -> None:
        self._tell(f"drop {member.pid} {member.started}")

    def close(self) -> None:
        """The run ends: the reaper cleans up what is left and goes."""
        self._line.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(line.encode() + b"\n")


def main() -> None:
    """Entry point of the reaper's process: TOKEN PARENT FOLDER."""
    token, parent, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    members, lease_folders = _listen(parent)
    end(members, [token])
    shutil.rmtree(folder, ignore_errors=True)
    end(members, [token])
    shutil.rmtree(folder, ignore_errors=True)
    if lease_folders:
        from gefen_offload.ranks.lease import sweep

        os.closerange(3, 256)  # the locks that were held for the dead
        for leases in lease_folders:
            sweep(Path(leases))
    os._exit(0)


def _listen(parent: int) -> tuple[set[Member], set[str]]:
    """Follow the lifeline until it breaks; what is recorded then."""
    members: set[Member] = set()
    leases: set[str] = set()
    rest = b""
    lifeline = socket.socket(fileno=0)
    while True:
        ready, _, _ = select.select([lifeline], [], [], POLL)
        chunk = _read(lifeline) if ready else b""
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            word, _, text = line.decode().partition(" ")
            if word == "sweep":
                leases.add(text)
            elif word in ("add", "drop"):
                pid, started = map(int, text.split())
                (members.add if word == "add" else members.discard)(Member(pid, started))
        if (ready and not chunk) or (not ready and os.getppid() != parent):
            return members, leases


def _read(lifeline: socket.socket) -> bytes:
    """What the run said; locks that came with it stay open until this process ends."""
    try:
        return socket.recv_fds(lifeline, 1 << 16, 16)[0]
    except ConnectionResetError:
        return b""

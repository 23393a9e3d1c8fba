"""Exclusive use of N physical GPUs, all or nothing, by file locks that the kernel frees when their holders die.

Every GPU has one lock file in a folder that all runs of a machine share. A run that finds too few free ones leaves a
ticket, itself a locked file; tickets are served in the order of their making, so that a large request is not starved by
small ones, and a run that only keeps idle ranks on a wanted GPU sees the ticket and lets go.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = "GEFEN_RANKS_LEASES"  # another folder than the machine's
POLL = 0.05


class LeaseTimeoutError(RuntimeError):
    """Too few GPUs became free in time."""


@dataclass(frozen=True)
class Lock:
    """A locked file."""

    path: Path
    fd: int

    def release(self) -> None:
        """Unlink and unlock; every copy of the descriptor, in whatever process, loses the lock."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)


@dataclass(frozen=True)
class Lease:
    """N GPUs by UUID, in order, until released."""

    devices: tuple[str, ...]
    locks: tuple[Lock, ...]

    def release(self) -> None:
        for lock in self.locks:
            lock.release()


def folder() -> Path:
    """The machine's folder of locks, writable by every user as /tmp is; TMPDIR may be one user's or one job's."""
    path = Path(os.environ.get(FOLDER) or "/tmp/gefen-ranks-leases")
    if not path.is_dir():
        path.mkdir(mode=0o1777, parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            path.chmod(0o1777)
    return path


def acquire(candidates: Sequence[str], count: int, patience: float, let_go: Callable[[], None]) -> Lease:
    """Lease `count` of the candidates, in their order; wait up to `patience` seconds for them.

    `let_go` is called once when too few are free: the caller gives back what it holds itself and does not use.
    """
    if count > len(candidates):
        raise LeaseTimeoutError(f"{count} GPUs wanted, {len(candidates)} are visible: {', '.join(candidates)}")
    limit = time.monotonic() + patience
    with _ticket(candidates) as ticket:
        lease = _try(candidates, count, ticket)
        if lease is None:
            let_go()
        while lease is None:
            if time.monotonic() > limit:
                holders = ", ".join(f"{uuid} by process {_holder(uuid)}" for uuid in candidates)
                raise LeaseTimeoutError(f"waited {patience:g} s for {count} GPU(s); held: {holders}")
            time.sleep(POLL)
            lease = _try(candidates, count, ticket)
    return lease


def wanted(devices: Sequence[str]) -> bool:
    """Whether a living run waits for any of these GPUs."""
    return any(set(devices) & set(_wants(path)) for path in _tickets() if _is_locked(path))


def sweep(path: Path) -> None:
    """Remove what dead runs left in the folder, and the folder when that empties it."""
    with contextlib.suppress(OSError):
        for entry in list(path.iterdir()):
            lock = _lock(entry, "")
            if lock is not None:
                lock.release()
        path.rmdir()


def _try(candidates: Sequence[str], count: int, ticket: Path) -> Lease | None:
    """One attempt, alone in the machine while it lasts; an earlier living ticket for the same GPUs goes first."""
    with _allocating():
        for other in _tickets():
            if other.name < ticket.name and set(_wants(other)) & set(candidates) and _is_locked(other):
                return None
        locks: list[Lock] = []
        for uuid in candidates:
            if len(locks) < count and (lock := _lock(_lock_path(uuid), str(os.getpid()))) is not None:
                locks.append(lock)
        if len(locks) == count:
            return Lease(tuple(lock.path.name.removeprefix("gpu-") for lock in locks), tuple(locks))
        for lock in locks:
            lock.release()
        return None


@contextlib.contextmanager
def _ticket(candidates: Sequence[str]) -> Iterator[Path]:
    path = folder() / f"ticket-{time.monotonic_ns():020d}-{os.getpid()}"
    lock = _lock(path, json.dumps(list(candidates)))
    if lock is None:
        raise RuntimeError(f"the ticket {path} is locked by someone else")
    try:
        yield path
    finally:
        lock.release()


@contextlib.contextmanager
def _allocating() -> Iterator[None]:
    while (lock := _lock(folder() / "allocating", str(os.getpid()))) is None:
        time.sleep(0.005)
    try:
        yield
    finally:
        lock.release()


def _lock(path: Path, text: str) -> Lock | None:
    """Lock the file without waiting, or None; a file that its last holder removed meanwhile is made anew."""
    for _ in range(100):
        fd = _open(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        if _same(path, fd):
            if text:
                os.ftruncate(fd, 0)
                os.write(fd, text.encode())
            return Lock(path, fd)
        os.close(fd)
    return None


def _open(path: Path) -> int:
    """[Note: protected files] A kernel may forbid O_CREAT on a file of another user's in a folder like /tmp."""
    how = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, how)
    except FileNotFoundError:
        folder()  # it may have been swept by another run a moment ago
    try:
        fd = os.open(path, how | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return _open(path)
    with contextlib.suppress(OSError):
        os.fchmod(fd, 0o666)
    return fd


def _same(path: Path, fd: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(fd).st_ino
    except OSError:
        return False


def _is_locked(path: Path) -> bool:
    """Whether a living process holds this file; a dead one's file is removed."""
    if not path.exists():
        return False
    lock = _lock(path, "")
    if lock is None:
        return True
    lock.release()
    return False


def _tickets() -> list[Path]:
    return sorted(folder().glob("ticket-*"))


def _wants(path: Path) -> list[str]:
    try:
        return list(json.loads(path.read_text()))
    except (OSError, ValueError):
        return []


def _lock_path(uuid: str) -> Path:
    return folder() / f"gpu-{uuid}"


def _holder(uuid: str) -> str:
    try:
        return _lock_path(uuid).read_text() or "unknown"
    except OSError:
        return "nobody"

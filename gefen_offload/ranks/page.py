"""A rank's status page: a small mapped file that the rank writes and the parent reads, also of a stuck or dead rank."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

SIZE = 1024
_HEAD = struct.Struct("<QQQqQB")  # version (odd while written), progress, collectives, time of change, fired, inside
_FIELDS = ("stage", "mark", "collective", "test")
_WIDTH = 200


@dataclass(frozen=True)
class Status:
    """One reading of the page."""

    progress: int
    collectives: int
    changed: int  # CLOCK_MONOTONIC, ns
    fired: tuple[int, ...]  # indices of the faults that fired during this task
    inside: bool
    stage: str
    mark: str
    collective: str
    test: str

    def collective_text(self) -> str:
        """`all_reduce (number 3, not left)`, or nothing when none was entered."""
        if not self.collectives:
            return ""
        return f"{self.collective} (number {self.collectives}, {'not left' if self.inside else 'left'})"


class StatusPage:
    """The page, from either side; only the rank writes."""

    def __init__(self, path: Path, create: bool = False) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(fd, SIZE)
            self._map = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
        self._version = self._progress = self._collectives = 0
        self._fired = 0
        self._inside = False

    def stage(self, name: str) -> None:
        """Enter a stage; the mark of an earlier one no longer says where the rank is."""
        self._write(stage=name, mark="")

    def mark(self, name: str) -> None:
        self._write(mark=name)

    def test(self, name: str) -> None:
        """Begin another test's task: its collectives are counted from zero."""
        self._collectives, self._inside, self._fired = 0, False, 0
        self._write(test=name, collective="")

    def enter(self, collective: str) -> int:
        """A collective begins; the number of collectives entered so far."""
        self._collectives += 1
        self._inside = True
        self._write(collective=collective)
        return self._collectives

    def leave(self) -> None:
        self._inside = False
        self._write()

    def fire(self, index: int) -> None:
        """A fault is about to act: written before it does, since the rank may not live to say so."""
        self._fired |= 1 << index
        self._write()

    def read(self) -> Status:
        """A consistent reading, or after a few tries (the rank died while it wrote) the last one."""
        for _ in range(20):
            raw = self._map[:SIZE]
            head = _HEAD.unpack_from(raw)
            if head[0] % 2 == 0 and head[0] == _HEAD.unpack_from(self._map)[0]:
                break
        texts = [_text(raw, _HEAD.size + i * _WIDTH) for i in range(len(_FIELDS))]
        fired = tuple(i for i in range(64) if head[4] >> i & 1)
        return Status(head[1], head[2], head[3], fired, bool(head[5]), *texts)

    def close(self) -> None:
        self._map.close()

    def _write(self, **texts: str) -> None:
        self._version += 1
        self._progress += 1
        struct.pack_into("<Q", self._map, 0, self._version)
        for name, text in texts.items():
            raw = text.encode("utf-8", "replace")[: _WIDTH - 1]
            at = _HEAD.size + _FIELDS.index(name) * _WIDTH
            self._map[at : at + len(raw) + 1] = raw + b"\0"
        self._version += 1
        head = (self._version, self._progress, self._collectives, time.monotonic_ns(), self._fired, self._inside)
        _HEAD.pack_into(self._map, 0, *head)


def _text(raw: bytes, at: int) -> str:
    return raw[at : at + _WIDTH].split(b"\0", 1)[0].decode("utf-8", "replace")

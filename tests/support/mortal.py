"""A pytest that is going to be killed, and what must be gone afterwards."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from support.child_pytest import ChildPytest, wait_until

SUITE = Path(__file__).parents[1] / "ranks" / "suites" / "mortal_suite.py"


class Mortal:
    """A child pytest on the mortal suite; `arguments` choose the test."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex[:12]
        self.pids_file, self.ready = folder / "pids", folder / "ready"
        environ = {"PIDS": str(self.pids_file), "READY": str(self.ready), "MORTAL": self.mark}
        self.child = ChildPytest(folder, [str(SUITE), *arguments], environ)

    def wait_for_ranks(self) -> None:
        wait_until(lambda: all(self.ready.with_suffix(f".{r}").exists() for r in (0, 1)), 90, "both ranks' bodies")

    def pids(self) -> set[int]:
        return {int(line) for line in self.pids_file.read_text().split()} if self.pids_file.exists() else set()

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if is_running(pid)] + carrying(str(self.pids_file))

    def check_gone(self, patience: float = 30) -> None:
        """No process of the run, no file of it in /dev/shm or in its temporary directory."""
        self.child.wait()
        wait_until(lambda: not self.alive(), patience, f"the end of {self.pids()}")
        wait_until(lambda: not self.child.left_behind(), patience, f"an empty {self.child.temp}")
        assert [p.name for p in Path("/dev/shm").iterdir() if self.mark in p.name] == []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def carrying(mark: str) -> list[int]:
    """Processes with this text in their environment: every process of the child's, also one we never heard of."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes() and is_running(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found

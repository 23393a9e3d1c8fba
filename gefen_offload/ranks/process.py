"""One rank process as its parent holds it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import shutil
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from gefen_offload.ranks import rank as child
from gefen_offload.ranks.kill import TOKEN, Member, state
from gefen_offload.ranks.outcome import Stage
from gefen_offload.ranks.page import StatusPage
from gefen_offload.ranks.wire import Channel

_starting = threading.Lock()


class RankProcess:
    """A spawned process, its pipe, its status page and its files."""

    def __init__(self, boot: child.Boot, run: str) -> None:
        self.boot = boot
        self.token = f"{run}.{boot.name}."
        self.page = StatusPage(boot.file("page"), create=True)
        self.page.stage(Stage.START)  # from here on only the rank writes
        os.mkfifo(boot.file("ask"), 0o600)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        self._process: BaseProcess = context.Process(target=child.main, args=(boot, theirs), name=f"rank-{boot.name}")
        resource_tracker.ensure_running()  # before the token is set: it is not of this run
        with _starting, _spawn_without_main(), _token_in_environment(self.token):
            self._process.start()
        theirs.close()
        self.channel = Channel(os.dup(ours.fileno()), blocking=False)
        ours.close()
        self.pid = int(self._process.pid or 0)
        self.member = Member.of(self.pid) or Member(self.pid, 0)
        self.pidfd = os.pidfd_open(self.pid)
        self.offsets = (0, 0)

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that killed it."""
        return self._process.exitcode

    def ends_within(self, patience: float) -> bool:
        """Whether it ends now or soon."""
        return bool(select.select([self.pidfd], [], [], patience)[0]) and self.exit_code() is not None

    def state(self) -> str:
        return state(self.pid)

    def output(self, stream: str, start: int = 0) -> str:
        """What the rank wrote to `out` or `err` since `start`; nothing if it died before it had the files."""
        with contextlib.suppress(FileNotFoundError), open(self.boot.file(stream), "rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", "replace")
        return ""

    def fatal_stack(self) -> str:
        """What faulthandler wrote when the process died of a fatal signal."""
        path = self.boot.file("stack")
        return path.read_bytes().decode("utf-8", "replace").strip() if path.exists() else ""

    def output_sizes(self) -> tuple[int, int]:
        sizes = []
        for stream in ("out", "err"):
            path = self.boot.file(stream)
            sizes.append(path.stat().st_size if path.exists() else 0)
        return sizes[0], sizes[1]

    def reap(self, patience: float = 5.0) -> None:
        """Wait for the end of a killed process and let go of what belonged to it."""
        self._process.join(patience)
        with contextlib.suppress(ValueError, OSError):
            self._process.close()
        self.channel.close()
        self.page.close()
        with contextlib.suppress(OSError):
            os.close(self.pidfd)
        shutil.rmtree(self.boot.file("tmp"), ignore_errors=True)
        for path in self.boot.folder.glob(f"{self.boot.name}.*"):
            path.unlink(missing_ok=True)


def boot_of(folder: Path, name: str, with_torch: bool) -> child.Boot:
    return child.Boot(folder, name, os.getpid(), with_torch)


@contextlib.contextmanager
def _spawn_without_main() -> Iterator[None]:
    """Spawn imports the parent's main module in the child; pytest's is of no use there and costs its import."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _token_in_environment(token: str) -> Iterator[None]:
    """Every process that comes of a rank can be told by this variable, whatever session it moves to."""
    before = os.environ.get(TOKEN)
    os.environ[TOKEN] = token
    try:
        yield
    finally:
        if before is None:
            del os.environ[TOKEN]
        else:
            os.environ[TOKEN] = before

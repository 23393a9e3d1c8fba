"""Progress of long work: a bar in a terminal that has rich, a plain line now and then elsewhere."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

EVERY = 30.0
Watch = Callable[[Sequence[Path]], None]
REFRESH = 0.5
Show = Callable[[int, int, float, str], None]
"""Shows how many tests are done and how many failed, after how many seconds, and which one runs."""


class Progress:
    """Says what is going on, on standard error; sessions may run side by side, each in a thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        terminal = self._stream.isatty() and importlib.util.find_spec("rich") is not None
        self._bars = Bars(self._stream) if terminal else None

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._bars is None:
            print(f"gate: {text}", file=self._stream, flush=True)
        else:
            self._bars.say(f"gate: {text}")

    @contextmanager
    def session(self, tier: str, total: int) -> Iterator[Watch]:
        """A callback for a running session: it reads its records' new lines and shows how far the session is."""
        self.say(f"{tier}: {total} tests")
        began = time.monotonic()
        if self._bars is not None:
            with self._bars.bar(tier, total) as show:
                yield watcher(show, REFRESH)
        else:
            yield watcher(lambda done, bad, seconds, last: self.say(line(tier, total, done, bad, seconds)), EVERY)
        self.say(f"{tier}: ended after {time.monotonic() - began:.0f} s")


def line(tier: str, total: int, done: int, bad: int, seconds: float) -> str:
    """The plain line."""
    return f"{tier}: {done} of {total} tests, {bad} failed, {seconds:.0f} s"


def watcher(show: Show, every: float) -> Watch:
    """Follow records, showing their state at most once in ``every`` seconds."""
    began = shown = time.monotonic()
    offsets: dict[Path, int] = {}
    done = bad = 0
    last = ""

    def watch(records: Sequence[Path]) -> None:
        nonlocal shown, done, bad, last
        now = time.monotonic()
        if now - shown < every:
            return
        shown = now
        for record in records:
            events, offsets[record] = new_events(record, offsets.get(record, 0))
            for event in events:
                kind = event.get("kind")
                done += kind == "phase" and event.get("when") == "teardown"
                bad += kind == "phase" and event.get("outcome") == "failed"
                last = str(event.get("id")) if kind == "start" else last
        show(done, bad, now - began, last)

    return watch


class Bars:
    """One rich bar for each running session, gone when it ends."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Rich

        columns = (TextColumn("gate: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        state = TextColumn("{task.fields[bad]} failed  {task.fields[last]}", markup=False)
        self._shown = Rich(*columns, state, console=Console(file=stream), transient=True)
        self._running, self._lock = 0, threading.Lock()

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._shown.console.print(text, markup=False, highlight=False)

    @contextmanager
    def bar(self, tier: str, total: int) -> Iterator[Show]:
        """A bar of one session; the first starts the display and the last ends it."""
        self._count(+1)
        task = self._shown.add_task(tier, total=total, bad=0, last="")

        def show(done: int, bad: int, seconds: float, last: str) -> None:
            self._shown.update(task, completed=done, bad=bad, last=last[-60:])

        try:
            yield show
        finally:
            self._count(-1)
            self._shown.remove_task(task)

    def _count(self, change: int) -> None:
        with self._lock:
            self._running += change
            if self._running == 1 and change > 0:
                self._shown.start()
            elif self._running == 0:
                self._shown.stop()


def new_events(record: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole events after ``offset``, and the offset after them."""
    try:
        with record.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except OSError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    events: list[dict[str, Any]] = []
    for written in whole.splitlines():
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # damage is the verdict's to find
            events.append({**json.loads(json.loads(written)["body"])})
    return events, offset + len(whole)

"""Progress of long work: a bar in a terminal that has rich, a plain line now and then elsewhere."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

EVERY = 30.0
REFRESH = 0.5
Show = Callable[[int, int, float, str], None]
"""Shows how many tests are done and how many failed, after how many seconds, and which one runs."""


class Progress:
    """Says what is going on, on standard error."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty() and importlib.util.find_spec("rich") is not None

    def say(self, text: str) -> None:
        """One line that stays."""
        print(f"gate: {text}", file=self._stream, flush=True)

    @contextmanager
    def session(self, tier: str, total: int) -> Iterator[Callable[[Path], None]]:
        """A callback for a running session: it reads its record's new lines and shows how far the session is."""
        self.say(f"{tier}: {total} tests")
        if self._terminal:
            with bar(self._stream, tier, total) as show:
                yield watcher(show, REFRESH)
        else:
            yield watcher(lambda done, bad, seconds, last: self.say(line(tier, total, done, bad, seconds)), EVERY)


def line(tier: str, total: int, done: int, bad: int, seconds: float) -> str:
    """The plain line."""
    return f"{tier}: {done} of {total} tests, {bad} failed, {seconds:.0f} s"


def watcher(show: Show, every: float) -> Callable[[Path], None]:
    """Follow a record, showing its state at most once in ``every`` seconds."""
    began = shown = time.monotonic()
    offset = done = bad = 0
    last = ""

    def watch(record: Path) -> None:
        nonlocal shown, offset, done, bad, last
        now = time.monotonic()
        if now - shown < every:
            return
        shown = now
        events, offset = new_events(record, offset)
        for event in events:
            done += event["kind"] == "phase" and event["when"] == "teardown"
            bad += event["kind"] == "phase" and event["outcome"] == "failed"
            last = event["id"] if event["kind"] == "start" else last
        show(done, bad, now - began, last)

    return watch


@contextmanager
def bar(stream: TextIO, tier: str, total: int) -> Iterator[Show]:
    """A rich progress bar, gone when the session ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(f"gate: {tier}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    state = TextColumn("{task.fields[bad]} failed  {task.fields[last]}", markup=False)
    with Bar(*columns, state, console=Console(file=stream), transient=True) as shown:
        task = shown.add_task(tier, total=total, bad=0, last="")

        def show(done: int, bad: int, seconds: float, last: str) -> None:
            shown.update(task, completed=done, bad=bad, last=last[-60:])

        yield show


def new_events(record: Path, offset: int) -> tuple[list[dict[str, str]], int]:
    """The whole events after ``offset``, and the offset after them."""
    try:
        with record.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except OSError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    events: list[dict[str, str]] = []
    for written in whole.splitlines():
        try:
            events.append(json.loads(json.loads(written)["body"]))
        except (ValueError, KeyError, TypeError):
            continue  # damage is the verdict's to find
    return events, offset + len(whole)

"""Progress of long work: one line that changes in a terminal, a plain line now and then in a log."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

EVERY = 30.0
REFRESH = 0.5


class Progress:
    """Says what is going on, on standard error."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._open = False

    def say(self, text: str) -> None:
        """One line that stays."""
        self._clear()
        print(f"gate: {text}", file=sys.stderr, flush=True)

    def watcher(self, tier: str, total: int) -> Callable[[Path], None]:
        """A callback for a running session: reads its record's new lines and shows how many tests are done."""
        began = shown = time.monotonic()
        offset = done = bad = 0
        last = ""

        def watch(record: Path) -> None:
            nonlocal shown, offset, done, bad, last
            now = time.monotonic()
            if now - shown < (REFRESH if self._terminal else EVERY):
                return
            shown = now
            lines, offset = new_lines(record, offset)
            for event in lines:
                done += event["kind"] == "phase" and event["when"] == "teardown"
                bad += event["kind"] == "phase" and event["outcome"] == "failed"
                last = event["id"] if event["kind"] == "start" else last
            self._show(f"{tier} {done}/{total} tests, {bad} failed, {now - began:.0f} s", last)

        return watch

    def _show(self, text: str, last: str) -> None:
        """The current state: over the last one in a terminal, below it in a log."""
        if self._terminal:
            print(f"\r\033[Kgate: {text}  {last[-60:]}", end="", file=sys.stderr, flush=True)
            self._open = True
        else:
            print(f"gate: {text}", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        """End the line that changes."""
        if self._open:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._open = False


def new_lines(record: Path, offset: int) -> tuple[list[dict[str, str]], int]:
    """The whole events after ``offset``, and the offset after them."""
    try:
        with record.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except OSError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    events: list[dict[str, str]] = []
    for line in whole.splitlines():
        try:
            events.append(json.loads(json.loads(line)["body"]))
        except (ValueError, KeyError, TypeError):
            continue  # damage is the verdict's to find
    return events, offset + len(whole)

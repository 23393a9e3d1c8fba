"""Where the time of tests on ranks went: `--ranks-timing`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

LAPS = ("boot", "dispatch", "restore", "load", "body", "result", "leaks")
SHOWN = 40


def table(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """One line a test, the dearest beside its body first, and their sum.

    test: its three phases; boot: until there were ranks; dispatch: messages, and waiting for the scheduler; load: the
    worker's modules and arguments; result: packing what it returned. Of several ranks the slowest counts.
    """
    tests: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("test", *LAPS), 0.0))
    seen: set[tuple[str, str]] = set()
    for report in reports:
        if (report.nodeid, report.when) not in seen:
            seen.add((report.nodeid, report.when))
            tests[report.nodeid]["test"] += report.duration
            runs: list[Any] = [value for name, value in report.user_properties if name == "ranks"]
            for run in runs if report.when == "teardown" else ():
                for lap, seconds in run["times"].items():
                    tests[report.nodeid][lap] += seconds
    on_ranks = {name: times for name, times in tests.items() if times["body"] or times["boot"]}
    names = sorted(on_ranks, key=lambda name: on_ranks[name]["body"] - on_ranks[name]["test"])
    yield "".join(f"{word:>10}" for word in ("test", *LAPS))
    for name in names[:SHOWN]:
        yield _line(on_ranks[name], name)
    total = {word: sum(times[word] for times in on_ranks.values()) for word in ("test", *LAPS)}
    yield _line(total, f"{len(names)} tests" + (f", {SHOWN} shown" if len(names) > SHOWN else ""))


def _line(times: dict[str, float], name: str) -> str:
    return "".join(f"{1000 * times[word]:>10.1f}" for word in ("test", *LAPS)) + f"  {name}"

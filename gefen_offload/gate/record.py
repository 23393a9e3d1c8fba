"""The record, read back: what one pytest session did, and how far its evidence can be believed.

The recorder (:mod:`gefen_offload.gate.recorder`) writes a line per event, each process of the session into a file of
its own; :func:`read` turns the files into a frozen :class:`Session`. What is wrong with a file itself is a
:class:`Damage`, never an exception: the verdict needs it.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gefen_offload.gate.recorder import LONGEST_TEXT, VERSION, link, worker_record


class Damage(enum.Enum):
    """What can be wrong with a record file."""

    MISSING = "there is no record, or it is empty"
    TRUNCATED = "the last line was cut short"
    EDITED = "a line is not what was written: the chain breaks there"
    FOREIGN = "the record was not written by this run"
    UNENDED = "the session has no end line: it stopped before it finished"
    VERSION = "the record was written by another version of the recorder"


@dataclass(frozen=True)
class Phase:
    """One phase (setup, call or teardown) of one test."""

    id: str
    when: str
    outcome: str
    xfail: bool = False
    subtest: bool = False
    body: bool = True
    """For a call: whether the test's own code ran to its end."""
    tries: int = 1
    """How often it had been set up or begun until this was reported."""
    raised: str = ""
    """What was seen to be raised in this phase, whatever its report says: skipped, xfailed, failed, or nothing."""
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Exit:
    """How the session's process ended, as its parent saw it."""

    code: int | None
    """The exit code, negative for a signal; None while it is unknown."""
    expired: bool = False
    """Whether the deadline passed and the session was killed."""
    seconds: float = 0.0
    leftovers: tuple[str, ...] = ()
    """Processes, files in shared memory and the like that outlived the session."""


@dataclass(frozen=True)
class Session:
    """One session's events, in the order in which each of its processes wrote them."""

    tier: str
    exit: Exit
    nonce: str = ""
    damage: tuple[tuple[Damage, str], ...] = ()
    collected: tuple[str, ...] = ()
    deselected: tuple[str, ...] = ()
    selected: tuple[tuple[str, tuple[str, ...]], ...] = ()
    started: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    collect_errors: tuple[tuple[str, str, str], ...] = ()
    """Node id, outcome (failed or skipped) and text of what was not collected."""
    internal_errors: tuple[str, ...] = ()
    properties: Mapping[str, tuple[tuple[str, Any], ...]] = field(default_factory=dict)
    """What each test noted with ``record_property``, and the ranks' proof."""
    modules: frozenset[tuple[str, str]] = frozenset()
    """Name and file of each module of the judged package that was loaded."""
    torch: frozenset[str] = frozenset()
    """The versions of torch that were loaded; one, if all is well."""
    lost: tuple[tuple[str, str], ...] = ()
    """Workers that did not end as they should, with what the session says about them."""
    optimize: int = 0
    """How far Python left out ``assert`` statements and docstrings (``-O``) in any of the session's processes."""
    status: int | None = None
    """The exit status that pytest itself reported at its end."""

    def noted(self, name: str) -> list[tuple[str, Any]]:
        """Every (test id, value) that was noted under ``name``."""
        return [(id, value) for id, entries in self.properties.items() for key, value in entries if key == name]


Event = dict[str, Any]


def is_text(value: object) -> bool:
    """A string."""
    return isinstance(value, str)


def is_number(value: object) -> bool:
    """A number that is one: neither NaN nor infinite, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """A whole number, or none."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def is_flag(value: object) -> bool:
    """True or false."""
    return isinstance(value, bool)


def are_texts(value: object) -> bool:
    """A list of strings."""
    return isinstance(value, list) and all(map(is_text, value))


def are_pairs(value: object, second: Callable[[object], bool]) -> bool:
    """A list of pairs: a string, and what ``second`` says."""
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(is_text(first) and second(other) for first, other in value)  # type: ignore[attr-defined]


SHAPES: Mapping[str, Mapping[str, Callable[[object], bool]]] = {
    "header": {"nonce": is_text, "worker": is_text, "optimize": is_whole},
    "worker": {"id": is_text},
    "worker-down": {"id": is_text, "error": is_text},
    "worker-exit": {"id": is_text, "code": is_whole},
    "collected": {"ids": are_texts},
    "deselected": {"ids": are_texts},
    "selected": {"tests": lambda value: are_pairs(value, are_texts)},
    "collect": {"id": is_text, "outcome": is_text, "text": is_text},
    "start": {"id": is_text},
    "phase": {
        **dict.fromkeys(("id", "when", "outcome", "raised", "text"), is_text),
        **dict.fromkeys(("xfail", "subtest", "body"), is_flag),
        **dict.fromkeys(("tries", "seconds"), is_number),
        "properties": lambda value: are_pairs(value, lambda _: True),
    },
    "internal": {"text": is_text},
    "imports": {
        "modules": lambda value: isinstance(value, dict) and all(map(is_text, value.values())),
        "torch": lambda value: value is None or is_text(value),
    },
    "end": {"status": is_whole},
}
"""The events that a recorder writes, with what must stand in each."""


def read(path: Path, tier: str, nonce: str, exit: Exit) -> Session:
    """Read a session's record and those of its workers; whatever is wrong with a file is in ``damage``."""
    main, damage = read_file(path, nonce, "")
    if damage and damage[0][0] is Damage.MISSING:
        damage = [(Damage.MISSING, f"{path.name}; {log_end(path.with_suffix('.log'))}")]
    processes = [main]
    for worker in [event["id"] for event in main if event["kind"] == "worker"]:
        events, wrong = read_file(worker_record(path, worker), nonce, worker)
        processes.append(events)
        damage += [(what, f"{worker}: {text}") for what, text in wrong]
    return assemble(tier, exit, nonce, processes, damage)


def log_end(path: Path) -> str:
    """What a session said last, where it cannot be asked otherwise."""
    try:
        text = path.read_text(encoding="utf-8", errors="backslashreplace").strip()
    except OSError:
        text = ""
    return f"its output ends:\n{text[-LONGEST_TEXT:]}" if text else "it printed nothing"


def read_file(path: Path, nonce: str, worker: str) -> tuple[list[Event], list[tuple[Damage, str]]]:
    """One process's events, and what is wrong with its file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return events_of(text, nonce, worker) if text.strip() else ([], [(Damage.MISSING, path.name)])


def events_of(text: str, nonce: str, worker: str) -> tuple[list[Event], list[tuple[Damage, str]]]:
    """The events up to the first line that does not belong, and what is wrong from there on."""
    events: list[Event] = []
    chain = ""
    lines = text.split("\n")
    complete, rest = lines[:-1], lines[-1]
    for number, line in enumerate(complete, 1):
        written = opened(line)
        if written is None:
            return events, [(Damage.EDITED, f"line {number} cannot be read")]
        claimed, body, event = written
        if number == 1 and (event.get("nonce"), event.get("worker", "")) != (nonce, worker):
            whose = f"{event.get('nonce')!r} {event.get('worker', '')}".rstrip()
            return [], [(Damage.FOREIGN, f"written under {whose}, not {nonce!r} {worker}".rstrip())]
        chain = link(nonce, chain, body)
        if chain != claimed:
            return events, [(Damage.EDITED, f"line {number}")]
        if number == 1 and event.get("version") != VERSION:
            return [], [(Damage.VERSION, f"{event.get('version')!r}, not {VERSION}")]
        if not shaped(event):
            return events, [(Damage.EDITED, f"line {number} is no event of a recorder: {body[:200]}")]
        events.append(event)
    if rest:
        return events, [(Damage.TRUNCATED, f"line {len(lines)}")]
    if events[-1]["kind"] != "end":
        return events, [(Damage.UNENDED, f"last event: {events[-1]['kind']} {events[-1].get('id', '')}".rstrip())]
    return events, []


def opened(line: str) -> tuple[str, str, Event] | None:
    """A line's chain value, its body as written, and the event in it; None where they are not there."""
    try:
        outer = json.loads(line)
        chain, body = outer["chain"], outer["body"]
        event = json.loads(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (chain, body, event) if is_text(chain) and is_text(body) and isinstance(event, dict) else None


def shaped(event: Event) -> bool:
    """Whether an event has what its kind must have."""
    kind = event.get("kind")
    shape = SHAPES.get(kind) if isinstance(kind, str) else None
    return shape is not None and all(name in event and fits(event[name]) for name, fits in shape.items())


def assemble(
    tier: str, exit: Exit, nonce: str, processes: list[list[Event]], damage: list[tuple[Damage, str]]
) -> Session:
    """A session from the events of its processes, the first being its own and the others its workers'."""

    def of(kind: str) -> list[Event]:
        return [event for events in processes for event in events if event["kind"] == kind]

    chosen = next((events for events in processes if any(event["kind"] == "selected" for event in events)), [])
    collecting = [event for event in chosen if event["kind"] in ("collected", "deselected", "selected")]
    end = next((event for event in processes[0] if event["kind"] == "end"), {})
    errors = [(event["id"], event["outcome"], event["text"]) for event in of("collect")]
    return Session(
        tier=tier,
        exit=exit,
        nonce=nonce,
        damage=tuple(damage),
        collected=tuple(id for event in collecting if event["kind"] == "collected" for id in event["ids"]),
        deselected=tuple(id for event in collecting if event["kind"] == "deselected" for id in event["ids"]),
        selected=selection(collecting),
        started=tuple(event["id"] for event in of("start")),
        phases=tuple(Phase(**{key: event[key] for key in Phase.__dataclass_fields__}) for event in of("phase")),
        collect_errors=tuple(dict.fromkeys([*errors, *disagreements(processes, selection(collecting))])),
        internal_errors=tuple(dict.fromkeys(event["text"] for event in of("internal"))),
        properties=properties_of(of("phase")),
        modules=frozenset(entry for event in of("imports") for entry in event["modules"].items()),
        torch=frozenset(event["torch"] for event in of("imports") if event["torch"] is not None),
        optimize=max((event["optimize"] for event in of("header")), default=0),
        status=end.get("status"),
        lost=lost(of("worker-down"), of("worker-exit")),
    )


def lost(downs: list[Event], exits: list[Event]) -> tuple[tuple[str, str], ...]:
    """Workers that told of no orderly end, or whose process then ended otherwise."""
    found = {event["id"]: f"its process ended with {event['code']}" for event in exits if event["code"] != 0}
    return tuple((found | {event["id"]: event["error"] for event in downs if event["error"]}).items())


def selection(events: list[Event]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What one process was going to run, each test with its tiers."""
    return tuple((id, tuple(tiers)) for event in events if event["kind"] == "selected" for id, tiers in event["tests"])


def disagreements(
    processes: list[list[Event]], selected: tuple[tuple[str, tuple[str, ...]], ...]
) -> list[tuple[str, str, str]]:
    """Workers that selected other tests than the first, as failed collections."""
    found = [(events[0].get("worker", ""), selection(events)) for events in processes if events]
    text = "this worker selected other tests than the first one"
    return [(worker, "failed", text) for worker, tests in found if tests and tests != selected]


def properties_of(phases: Iterable[Event]) -> dict[str, tuple[tuple[str, Any], ...]]:
    """What the tests noted, by test id."""
    noted: dict[str, tuple[tuple[str, Any], ...]] = {}
    for phase in phases:
        if phase["properties"]:
            noted[phase["id"]] = tuple((name, value) for name, value in phase["properties"])
    return noted

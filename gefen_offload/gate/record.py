"""The record, read back: what one pytest session did, and how far its evidence can be believed.

The recorder (:mod:`gefen_offload.gate.recorder`) writes a line per event; :func:`read` turns the file into a frozen
:class:`Session`. What is wrong with the file itself is a :class:`Damage`, never an exception: the verdict needs it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gefen_offload.gate.recorder import VERSION, link


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
    """One session's events, in the order in which they were written."""

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
    modules: Mapping[str, str] = field(default_factory=dict)
    torch: str | None = None
    status: int | None = None
    """The exit status that pytest itself reported at its end."""

    def noted(self, name: str) -> list[tuple[str, Any]]:
        """Every (test id, value) that was noted under ``name``."""
        return [(id, value) for id, entries in self.properties.items() for key, value in entries if key == name]


def read(path: Path, tier: str, nonce: str, exit: Exit) -> Session:
    """Read a session's record; whatever is wrong with the file is in ``damage``."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if not text.strip():
        return Session(tier, exit, nonce, ((Damage.MISSING, path.name),))
    events, damage = events_of(text, nonce)
    return assemble(tier, exit, nonce, events, damage)


def events_of(text: str, nonce: str) -> tuple[list[dict[str, Any]], list[tuple[Damage, str]]]:
    """The events up to the first line that does not belong, and what is wrong from there on."""
    events: list[dict[str, Any]] = []
    chain = ""
    lines = text.split("\n")
    complete, rest = lines[:-1], lines[-1]
    for number, line in enumerate(complete, 1):
        try:
            outer = json.loads(line)
            body, claimed = outer["body"], outer["chain"]
            event = json.loads(body)
        except (ValueError, KeyError, TypeError):
            return events, [(Damage.EDITED, f"line {number} cannot be read")]
        if number == 1 and event.get("nonce") != nonce:
            return [], [(Damage.FOREIGN, f"written under nonce {event.get('nonce')!r}, this run's is {nonce!r}")]
        chain = link(nonce, chain, body)
        if chain != claimed:
            return events, [(Damage.EDITED, f"line {number}")]
        events.append(event)
    if rest:
        return events, [(Damage.TRUNCATED, f"line {len(lines)}")]
    return events, after_the_end(events)


def after_the_end(events: list[dict[str, Any]]) -> list[tuple[Damage, str]]:
    """A whole file can still lack its end, or be of another version."""
    if events[0].get("version") != VERSION:
        return [(Damage.VERSION, f"{events[0].get('version')!r}, not {VERSION}")]
    ends = [event for event in events if event["kind"] == "end"]
    if not ends or events[-1]["kind"] != "end":
        return [(Damage.UNENDED, f"last event: {events[-1]['kind']} {events[-1].get('id', '')}".rstrip())]
    return []


def assemble(
    tier: str, exit: Exit, nonce: str, events: list[dict[str, Any]], damage: list[tuple[Damage, str]]
) -> Session:
    """A session from its events."""

    def of(kind: str) -> Iterable[dict[str, Any]]:
        return (event for event in events if event["kind"] == kind)

    end = next(iter(of("end")), {})
    imports = next(iter(of("imports")), {})
    return Session(
        tier=tier,
        exit=exit,
        nonce=nonce,
        damage=tuple(damage),
        collected=tuple(id for event in of("collected") for id in event["ids"]),
        deselected=tuple(id for event in of("deselected") for id in event["ids"]),
        selected=tuple((id, tuple(tiers)) for event in of("selected") for id, tiers in event["tests"]),
        started=tuple(event["id"] for event in of("start")),
        phases=tuple(Phase(**{key: event[key] for key in Phase.__dataclass_fields__}) for event in of("phase")),
        collect_errors=tuple((event["id"], event["outcome"], event["text"]) for event in of("collect")),
        internal_errors=tuple(event["text"] for event in of("internal")),
        properties=properties_of(of("phase")),
        modules=imports.get("modules", {}),
        torch=imports.get("torch"),
        status=end.get("status"),
    )


def properties_of(phases: Iterable[dict[str, Any]]) -> dict[str, tuple[tuple[str, Any], ...]]:
    """What the tests noted, by test id."""
    noted: dict[str, tuple[tuple[str, Any], ...]] = {}
    for phase in phases:
        if phase["properties"]:
            noted[phase["id"]] = tuple((name, value) for name, value in phase["properties"])
    return noted

"""``junit.xml`` made from the record, so that it exists and is right also after a crash."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from gefen_offload.gate.outcome import FAILURES, Ledger, attempts, outcome
from gefen_offload.gate.record import Session

UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold."""


def text(record: Sequence[Session]) -> bytes:
    """One suite for each session; a test that was selected and has no outcome is an error."""
    top = Xml.Element("testsuites")
    for session in record:
        top.append(suite(session))
    return bytes(Xml.tostring(top, encoding="utf-8", xml_declaration=True))


def suite(session: Session) -> Xml.Element:
    """One session's tests."""
    ledger = Ledger(session)
    element = Xml.Element("testsuite", name=session.tier, time=f"{session.exit.seconds:.3f}")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for id in ledger.selected:
        phases = ledger.phases.get(id, [])
        file, _, name = id.partition("::")
        classname, name = clean(file.removesuffix(".py").replace("/", ".")), clean(name)
        seconds = f"{sum(phase.seconds for phase in phases):.4f}"
        case = Xml.SubElement(element, "testcase", classname=classname, name=name, time=seconds)
        counts["tests"] += 1
        end = outcome(attempts(phases)[-1]) if phases else None
        kind = kind_of(end.word if end else "cut")
        if kind:
            counts[{"failure": "failures", "error": "errors", "skipped": "skipped"}[kind]] += 1
            child = Xml.SubElement(case, kind, message=clean(end.word if end else "has no outcome"))
            child.text = clean(end.text if end else "")
    for key, value in counts.items():
        element.set(key, str(value))
    return element


def kind_of(word: str) -> str:
    """The JUnit element for an outcome's word; empty for a pass."""
    if word == "passed":
        return ""
    if word in ("skipped", "xfailed"):
        return "skipped"
    return "failure" if word in FAILURES else "error"


def clean(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return UNPRINTABLE.sub("?", text)

"""The run directory: everything that a verdict was made from, and the verdict; enough to make it again.

``gate show`` decides anew from what is kept here, so a verdict that does not follow from its evidence is noticed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gefen_offload.gate import baseline as performance
from gefen_offload.gate import facts as facts_
from gefen_offload.gate.facts import Facts, to_json
from gefen_offload.gate.manifest import Manifest
from gefen_offload.gate.record import Exit, Session, read
from gefen_offload.gate.session import records
from gefen_offload.gate.verdict import Verdict, decide


@dataclass(frozen=True)
class Evidence:
    """The five arguments of :func:`~gefen_offload.gate.verdict.decide`."""

    manifest: Manifest
    record: tuple[Session, ...]
    before: Facts
    after: Facts
    baseline: performance.Measurement | None

    def verdict(self) -> Verdict:
        """The verdict on this evidence."""
        return decide(self.manifest, self.record, self.before, self.after, self.baseline)


def make(root: Path, asked: str | None, name: str) -> Path:
    """A new run directory: as asked, else under the checkout's ``.gate``, else in the user's cache, else temporary."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gefen_offload" / "gate"
    places = [Path(asked)] if asked else [root / ".gate" / f"{stamp}-{name}", cache / f"{stamp}-{name}"]
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / "sessions").mkdir(exist_ok=True)
            (place / ".gitignore").write_text("*\n", encoding="utf-8")  # evidence is no part of anybody's source
            return place.resolve()
        except OSError:
            if asked:
                raise
    place = Path(tempfile.mkdtemp(prefix="gefen-offload-gate-"))
    (place / "sessions").mkdir()
    return place


def write(folder: Path, evidence: Evidence, verdict: Verdict) -> None:
    """Write what the verdict was made from, and the verdict."""
    exits = [{"tier": s.tier, "nonce": s.nonce, "exit": to_json(s.exit)} for s in evidence.record]
    write_json(folder / "facts.json", {"before": evidence.before, "after": evidence.after, "sessions": exits})
    write_json(folder / "manifest.json", evidence.manifest)
    write_json(folder / "baseline.json", evidence.baseline)
    write_json(
        folder / "verdict.json",
        {
            "headline": verdict.headline,
            "exit_code": int(verdict.status),
            "releasable": verdict.releasable,
            **vars(verdict),
        },
    )
    with (folder / "record.jsonl").open("wb") as whole:
        for session in evidence.record:
            for path in records(folder / "sessions" / f"{session.tier}.jsonl"):
                whole.write(path.read_bytes() if path.is_file() else b"")


def write_json(path: Path, value: Any) -> None:
    """Write plain values for people and programs."""
    path.write_text(json.dumps(to_json(value), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load(folder: Path) -> Evidence:
    """Read a run directory back, the records from their own files."""
    facts = read_json(folder / "facts.json")
    manifest = read_json(folder / "manifest.json")
    baseline = read_json(folder / "baseline.json")
    return Evidence(
        manifest=manifest_from(manifest),
        record=tuple(session_from(folder, entry) for entry in facts["sessions"]),
        before=facts_.from_json(facts["before"]),
        after=facts_.from_json(facts["after"]),
        baseline=performance.from_json(baseline) if baseline else None,
    )


def read_json(path: Path) -> Any:
    """Plain values read back."""
    return json.loads(path.read_text(encoding="utf-8"))


def session_from(folder: Path, entry: Mapping[str, Any]) -> Session:
    """One session read back."""
    exit = Exit(**{**entry["exit"], "leftovers": tuple(entry["exit"]["leftovers"])})
    return read(folder / "sessions" / f"{entry['tier']}.jsonl", entry["tier"], entry["nonce"], exit)


def manifest_from(data: Mapping[str, Any]) -> Manifest:
    """A manifest read back."""
    lists = {tier: tuple(ids) for tier, ids in data["lists"].items()}
    tuples = {name: tuple(data[name]) for name in ("shadowed", "required", "tiers", "part")}
    return Manifest(**{**data, **tuples, "lists": lists})


def judged_as_written(folder: Path, verdict: Verdict) -> bool:
    """Whether ``verdict.json`` says what its evidence gives now."""
    written = read_json(folder / "verdict.json")
    return bool(written["exit_code"] == int(verdict.status) and written["findings"] == to_json(verdict.findings))

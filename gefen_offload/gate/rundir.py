"""The run directory: everything that a verdict was made from, and the verdict; enough to make it again.

``gate show`` decides anew from what is kept here, so a verdict or a statement that does not follow from its evidence is
noticed.
"""

from __future__ import annotations

import contextlib
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
from gefen_offload.gate import junit, statement, summary, wheel
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


class TakenError(RuntimeError):
    """The folder that was asked for is another run's, or somebody's own."""


def make(root: Path, asked: str | None, name: str) -> Path:
    """A new run directory: as asked, else under the checkout's ``.gate``, else in the user's cache, else temporary."""
    if asked:
        return claim(Path(asked))
    stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gefen_offload" / "gate"
    for place in (root / ".gate", cache):
        with contextlib.suppress(OSError):
            return first_free(place / stamp)
    return claim(Path(tempfile.mkdtemp(prefix="gefen-offload-gate-")))


def first_free(place: Path) -> Path:
    """This folder, or the first of its name with a number, that no other run has taken."""
    number = 1
    while True:
        with contextlib.suppress(TakenError):
            return claim(place if number == 1 else place.with_name(f"{place.name}-{number}"))
        number += 1


def claim(place: Path) -> Path:
    """Take a new or empty folder for one run; of two that ask at once one gets it."""
    with contextlib.suppress(FileExistsError):
        place.mkdir(parents=True)
    if any(place.iterdir()):
        raise TakenError(f"{place} already holds a run, or other files; name a new folder")
    try:
        (place / "sessions").mkdir()
    except FileExistsError:
        raise TakenError(f"{place} was taken by another run just now; name a new folder") from None
    (place / ".gitignore").write_text("*\n", encoding="utf-8")  # evidence is no part of anybody's source
    return place.resolve()


def write(folder: Path, evidence: Evidence, verdict: Verdict) -> None:
    """Write what the verdict was made from, and what follows from it."""
    exits = [{"tier": s.tier, "nonce": s.nonce, "exit": to_json(s.exit)} for s in evidence.record]
    write_json(folder / "facts.json", {"before": evidence.before, "after": evidence.after, "sessions": exits})
    write_json(folder / "manifest.json", evidence.manifest)
    write_json(folder / "baseline.json", evidence.baseline)
    for name, content in following(folder, evidence, verdict).items():
        (folder / name).write_bytes(content)


def following(folder: Path, evidence: Evidence, verdict: Verdict) -> dict[str, bytes]:
    """The files that hold nothing but what follows from the evidence."""
    words = {"headline": verdict.headline, "exit_code": int(verdict.status), "releasable": verdict.releasable}
    made = statement.statement(verdict, evidence.manifest, evidence.record, evidence.before)
    files = [path for s in evidence.record for path in records(folder / "sessions" / f"{s.tier}.jsonl")]
    return {
        "record.jsonl": b"".join(path.read_bytes() for path in files if path.is_file()),
        "verdict.json": json_text({**words, **vars(verdict)}).encode(),
        "statement.json": json_text(made).encode(),
        "junit.xml": junit.text(evidence.record),
        "summary.md": summary.markdown(verdict, evidence.before).encode(errors="backslashreplace"),
    }


def strange(folder: Path, evidence: Evidence, verdict: Verdict) -> list[str]:
    """The files of a run directory that do not follow from its evidence: changed since, or gone."""
    found = [
        name
        for name, content in following(folder, evidence, verdict).items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != content
    ]
    judged = evidence.after.wheel
    if judged is not None:
        path = folder / "wheel" / judged.name
        found += [] if path.is_file() and wheel.sha256(path) == judged.sha256 else [f"wheel/{judged.name}"]
        found += [] if wheel.installed(folder / "site") == judged.files else ["site"]
    return found


def json_text(value: Any) -> str:
    """Plain values for people and programs."""
    return json.dumps(to_json(value), indent=1, sort_keys=True) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write plain values for people and programs."""
    path.write_text(json_text(value), encoding="utf-8")


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

"""What a failing test leaves: one folder with everything its ranks said, and the command that runs it again."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gefen_offload.ranks.outcome import Outcome


@dataclass(frozen=True)
class Record:
    """One run on ranks as it will be kept if the test fails."""

    report: str
    outcomes: Sequence[Outcome]
    stdout: Sequence[str]
    stderr: Sequence[str]
    flights: Sequence[str] = ()


def write(base: Path, test: str, records: Sequence[Record], text: str, command: str) -> Path:
    """Make the folder of this test anew; `text` is pytest's own report of the failure."""
    folder = base / re.sub(r"[^\w.=-]+", "-", test).strip("-")[-150:]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (base / ".gitignore").write_text("*\n")
    _write(folder / "report.txt", text)
    _write(folder / "rerun.sh", command + "\n")
    _write(folder / "environment.json", json.dumps(environment(), indent=1))
    for number, record in enumerate(records):
        _write_run(folder / f"run{number}", record)
    return folder


def _write_run(folder: Path, record: Record) -> None:
    folder.mkdir()
    _write(folder / "report.txt", record.report)
    _write(folder / "outcomes.json", json.dumps([plain(o) for o in record.outcomes], indent=1))
    streams = {"out": record.stdout, "err": record.stderr, "flight": record.flights}
    streams["stack"] = [o.stack for o in record.outcomes]
    for suffix, texts in streams.items():
        for rank, text in enumerate(texts):
            if text:
                _write(folder / f"rank{rank}.{suffix}", text)


def _write(path: Path, text: str) -> None:
    """As UTF-8 whatever the locale; what is no text is escaped."""
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


def plain(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON data, without what the body returned."""
    data = dataclasses.asdict(dataclasses.replace(outcome, value=None))
    return {**data, "kind": outcome.kind.value}


def environment() -> dict[str, Any]:
    """What another machine may differ in; no variable whose name speaks of a secret."""
    secret = re.compile("key|token|secret|password|credential|auth", re.IGNORECASE)
    torch = sys.modules.get("torch")
    return {
        "python": sys.version,
        "torch": str(getattr(torch, "__version__", "not imported")),
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "cores": os.cpu_count(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if not secret.search(k)},
    }


def rerun_command(root: Path, test: str, options: Sequence[str] = ()) -> str:
    """One line that runs this test alone, from the folder its id is relative to."""
    words = [sys.executable, "-m", "pytest", test, *options]
    return f"cd {shlex.quote(str(root))} && {shlex.join(words)}"

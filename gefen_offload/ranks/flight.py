"""torch's flight recorder: what the last collective of each group was on each rank, also those that C++ started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the variable's name has changed with time
ENTRIES = 200  # kept by the recorder, and by this file's reports


def switch_on() -> None:
    """In the rank, before its first group: have the recorder keep entries."""
    for name in RECORDER:
        os.environ.setdefault(name, str(ENTRIES))


def dump(backend: str | None) -> str:
    """In the rank: the recorder's entries as JSON; "" where this torch has none for the backend."""
    if backend is None or "torch.distributed" not in sys.modules:
        return ""
    from torch._C import _distributed_c10d as c10d

    take = getattr(c10d, "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json", None)
    try:
        data = take(True, False) if take is not None else ""
    except Exception as error:
        return json.dumps({"problem": f"{type(error).__name__}: {error}", "entries": []})
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else str(data)


def answer(ask: int, to: Path, backend: str | None) -> None:
    """In the rank's watching thread: somebody asked; write the dump in one piece."""
    os.read(ask, 64)
    part = to.with_suffix(".part")
    part.write_text(dump(backend))
    part.replace(to)


def summary(dumps: Mapping[int, str]) -> list[str]:
    """In the parent: one line a group, and which ranks have not come to its last collective."""
    last = {rank: _last_of_groups(text) for rank, text in dumps.items() if text}
    lines = []
    for group in sorted({group for groups in last.values() for group in groups}):
        whole = group.endswith("default_pg")  # every rank is in it, also one that has not used it yet
        known = {rank: groups.get(group, {}) for rank, groups in last.items() if whole or group in groups}
        newest = max(known.values(), key=_number)
        behind = [rank for rank, entry in known.items() if _number(entry) < _number(newest)]
        told = ", ".join(f"rank {rank} at {_text(entry)}" for rank, entry in sorted(known.items()))
        lines.append(f"flight recorder, group {group}: {told}")
        if behind:
            ranks = ", ".join(map(str, behind))
            lines.append(f"flight recorder, group {group}: rank {ranks} did not enter {_text(newest)}")
    return lines


def _last_of_groups(text: str) -> dict[str, Mapping[str, Any]]:
    try:
        entries: Sequence[Mapping[str, Any]] = json.loads(text).get("entries", [])
    except (ValueError, AttributeError):
        return {}
    last: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        group = " ".join(str(part) for part in entry.get("process_group", ["?"]))
        if group not in last or _number(entry) >= _number(last[group]):
            last[group] = entry
    return last


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry.get("collective_seq_id", 0)) + int(entry.get("p2p_seq_id", 0))


def _text(entry: Mapping[str, Any]) -> str:
    if not entry:
        return "nothing yet"
    sizes = entry.get("input_sizes", [])
    return f"{entry.get('profiling_name', '?')} number {_number(entry)} of sizes {sizes}"

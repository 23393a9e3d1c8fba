"""The mandatory lists, ``ci/mandatory/<tier>.txt``: which tests each tier must have run.

A list begins with a line that holds its count and digest, so one that lost or gained a line by hand does not read as
the one that ``gefen-offload gate manifest --update`` wrote. A foreign suite's plain list needs no such line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
import tempfile
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gefen_offload.gate import checkout, session, shadow
from gefen_offload.gate.record import Session
from gefen_offload.gate.recorder import TIERS

HEADER = re.compile(r"# (?P<count>\d+) ids, sha256 (?P<sha256>[0-9a-f]{64})")
HARDWARE = re.compile(r"\b(?:[ABHVL]\d{1,2}0|(?i:rtx|geforce|tesla|nvidia|gpu-[0-9a-f]{8}|cuda:\d))\b")
COLLECT_TIMEOUT = 900.0


@dataclass(frozen=True)
class Manifest:
    """What must have run."""

    lists: Mapping[str, tuple[str, ...]]
    """The mandatory test ids of each tier."""
    exact: bool = True
    """Whether each collected test of a tier must be in its list; a foreign suite's list may name a part."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Tiers whose list is not what was written, with what is wrong."""
    shadowed: tuple[str, ...] = ()
    """Tests that a later statement of the same file replaced, and test files that cannot be parsed."""
    required: tuple[str, ...] = ()
    """Tiers that must have run on this machine."""
    tiers: tuple[str, ...] = ()
    """The tiers asked for; all, if empty."""
    part: tuple[str, ...] = ()
    """The files or tests to which the lists were cut down; all of them, if empty."""
    allow_dirty: bool = False
    """Whether uncommitted changes are judged anyway, the result then not being releasable."""
    performance: bool = True
    """Whether the measurements are judged, on a machine with a GPU."""
    selftest: bool = True
    """Whether the gate told each fault from its clean twin before this run."""


def within(id: str, part: Sequence[str]) -> bool:
    """Whether a test is one of these, or stands in one of these files, classes or folders."""
    return any(id == name or id.startswith((f"{name}::", f"{name}[", f"{name.rstrip('/')}/")) for name in part)


def cut_down(whole: Manifest, part: Sequence[str]) -> Manifest:
    """The manifest of a part of the tests; tiers that have none in it are not asked for."""
    lists = {tier: tuple(id for id in ids if within(id, part)) for tier, ids in whole.lists.items()}
    kept = {tier: ids for tier, ids in lists.items() if ids}
    wanted = tuple(tier for tier in kept if tier in (whole.tiers or TIERS))
    return dataclasses.replace(whole, lists=kept, tiers=wanted, part=tuple(part))


def load(folder: Path) -> dict[str, tuple[str, ...]]:
    """The lists in ``folder``, by tier; damage is left to :func:`read`."""
    return dict(read(folder).lists)


def read(folder: Path) -> Manifest:
    """Read every tier's list from ``folder``."""
    lists: dict[str, tuple[str, ...]] = {}
    damaged: dict[str, str] = {}
    for tier in TIERS:
        path = folder / f"{tier}.txt"
        if path.is_file():
            lists[tier], wrong = parse(path.read_bytes(), headed=True)
            if wrong:
                damaged[tier] = wrong
    return Manifest(lists, damaged=damaged)


def parse(content: bytes, headed: bool) -> tuple[tuple[str, ...], str]:
    """The ids of one list, and what is wrong with it (empty if nothing).

    An editor may have added a byte order mark and CRs; a name that is no UTF-8 reads as Python names that file.
    """
    if b"\0" in content:
        return (), f"is no text: byte 0 at {content.index(0)}"
    text = content.removeprefix(BOM_UTF8).decode(errors="surrogateescape")
    ids = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    twice = [id for id, times in Counter(ids).items() if times > 1]
    if twice:
        return ids, f"lists {twice[0]} twice"
    header = HEADER.search(text)
    if header is None:
        return ids, "has no line with its count and digest" if headed else ""
    if int(header["count"]) != len(ids) or header["sha256"] != digest(ids):
        return ids, f"says {header['count']} ids and another digest than its {len(ids)} lines have"
    return ids, ""


def digest(ids: Iterable[str]) -> str:
    """The digest of a list of ids."""
    return hashlib.sha256("\n".join(ids).encode(errors="surrogatepass")).hexdigest()


def render(tier: str, ids: Iterable[str]) -> str:
    """A list as a file."""
    ordered = sorted(ids)
    head = f"# Tests that the {tier} tier must run; written by: gefen-offload gate manifest --update\n"
    return f"{head}# {len(ordered)} ids, sha256 {digest(ordered)}\n" + "".join(f"{id}\n" for id in ordered)


def collect(root: Path, into: Path) -> Session:
    """Collect the checkout's tests without running any and without a GPU; ``into`` receives ``collect.log``."""
    path = checkout.view(root, into / "path")
    arguments = ("--collect-only", "-q", "-p", "no:cacheprovider")
    blind = {"CUDA_VISIBLE_DEVICES": ""}
    plan = session.Plan(
        "collect", sys.executable, root, arguments, COLLECT_TIMEOUT, checkout.PACKAGE, (str(path),), blind
    )
    return session.run(plan, into)


def by_tier(found: Session) -> dict[str, list[str]]:
    """The collected ids of each tier."""
    tiers: dict[str, list[str]] = {}
    for id, marks in found.selected:
        for mark in marks:
            tiers.setdefault(mark, []).append(id)
    return tiers


def complaints(root: Path, found: Session, manifest: Manifest) -> list[str]:
    """Everything that keeps the lists from being the collected tests, one line each."""
    lines = [f"collection: {damage.value} ({text})" for damage, text in found.damage]
    lines += [f"collection {outcome}: {id}: {last_line(text)}" for id, outcome, text in found.collect_errors]
    lines += [f"internal error while collecting: {text[-300:]}" for text in found.internal_errors]
    lines += [f"{tier}.txt {wrong}" for tier, wrong in manifest.damaged.items()]
    lines += [f"replaced later in its file, so it never runs: {where}" for where in shadow.shadowed(root)]
    lines += [f"not in exactly one tier ({', '.join(m) or 'none'}): {id}" for id, m in found.selected if len(m) != 1]
    lines += [f"names hardware: {id}" for id, _ in found.selected if HARDWARE.search(id)]
    lines += [f"collected {n} times: {id}" for id, n in Counter(found.collected).items() if n > 1]
    return lines + differences(by_tier(found), manifest.lists)


def last_line(text: str) -> str:
    """The last line of a traceback: the error itself."""
    return (text.strip().splitlines() or [""])[-1]


def differences(found: Mapping[str, list[str]], lists: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Where the lists and the collected tests differ."""
    lines: list[str] = []
    for tier in TIERS:
        have, want = set(found.get(tier, ())), set(lists.get(tier, ()))
        lines += [f"listed in {tier}.txt, not collected: {id}" for id in sorted(want - have)]
        lines += [f"collected, not listed in {tier}.txt: {id}" for id in sorted(have - want)]
    return lines


def check(root: Path) -> list[str]:
    """What is wrong with the committed lists; nothing, if they are exactly the collected tests."""
    with tempfile.TemporaryDirectory(prefix="gefen-offload-manifest-") as scratch:
        found = collect(root, Path(scratch))
        wrong = complaints(root, found, read(root / "ci" / "mandatory"))
        return wrong + log_of(found, Path(scratch))


def update(root: Path) -> list[str]:
    """Write the lists anew from what is collected; returns what keeps that from being possible."""
    with tempfile.TemporaryDirectory(prefix="gefen-offload-manifest-") as scratch:
        found = collect(root, Path(scratch))
        log = log_of(found, Path(scratch))
    tiers = by_tier(found)
    wrong = complaints(root, found, Manifest({tier: tuple(ids) for tier, ids in tiers.items()})) + log
    if wrong:
        return wrong
    folder = root / "ci" / "mandatory"
    folder.mkdir(exist_ok=True)
    for tier in TIERS:
        path = folder / f"{tier}.txt"
        if tier in tiers:
            path.write_text(render(tier, tiers[tier]), encoding="utf-8", errors="surrogateescape")
        elif path.exists():
            path.unlink()
    return []


def log_of(found: Session, folder: Path) -> list[str]:
    """The end of the collecting session's output, where its record alone does not say what went wrong."""
    return [f"  {line}" for line in session.tail(folder / "collect.log")] if found.damage else []

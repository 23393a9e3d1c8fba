"""A kept run of an imaginary release, as its run directory holds it, made without running anything."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from gefen_offload.gate import rundir, wheel
from gefen_offload.gate.checkout import PACKAGE
from gefen_offload.gate.facts import Wheel
from gefen_offload.gate.record import Session
from gefen_offload.gate.recorder import VERSION, Recorder
from gefen_offload.gate.rundir import Evidence
from gefen_offload.gate.selftest.case import released

WHEEL = "imaginary-1.0-py3-none-any.whl"
NONCE = "0123456789abcdef"


def kept(folder: Path) -> Evidence:
    """Fill ``folder`` with a releasable run, its wheel and its records; what it was made from."""
    rundir.claim(folder)
    module = folder / "site" / PACKAGE / "__init__.py"
    for path in (module, folder / "wheel" / WHEEL):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"# judged\n")
    judged = wheel.sha256(folder / "wheel" / WHEEL)
    facts_of_it = Wheel(WHEEL, judged, str(folder / "site"), wheel.installed(folder / "site"))
    made = released(folder)
    facts = replace(made.before, wheel=facts_of_it)
    modules = frozenset({(PACKAGE, str(module))})
    for session in made.record:
        write(folder / "sessions" / f"{session.tier}.jsonl", replace(session, modules=modules))
    record = tuple(replace(session, nonce=NONCE) for session in made.record)
    rundir.write(folder, Evidence(made.manifest, record, facts, facts, made.baseline), made.verdict())
    evidence = rundir.load(folder)
    rundir.write(folder, evidence, evidence.verdict())
    return evidence


def write(path: Path, session: Session) -> None:
    """The record that a session would have left."""
    recorder = Recorder(path, NONCE, PACKAGE)
    recorder.write("header", version=VERSION, nonce=NONCE, worker="", optimize=0)
    recorder.write("collected", ids=list(session.collected))
    recorder.write("selected", tests=[[id, list(tiers)] for id, tiers in session.selected])
    for id in session.started:
        recorder.write("start", id=id)
    for phase in session.phases:
        noted = [list(entry) for entry in session.properties.get(phase.id, ())]
        recorder.write("phase", **asdict(phase), properties=noted if phase.when == "teardown" else [])
    recorder.write("imports", modules=dict(session.modules), torch=next(iter(session.torch)))
    recorder.write("end", status=session.status)

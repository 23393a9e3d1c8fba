"""Complete evidence of an imaginary release, built without a process: what the cases about facts start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gefen_offload.gate.baseline import Identity, Measurement
from gefen_offload.gate.checkout import Source
from gefen_offload.gate.manifest import Manifest
from gefen_offload.gate.record import Exit, Phase, Session
from gefen_offload.gate.selftest.case import GPUS, MACHINE, SOFTWARE, Evidence, wheel

TIERS = ("cpu", "gloo2", "gloo4", "gpu1", "gpu2")
MEASURED = Measurement(
    Identity("Imaginary 9", "1.0", "2.0+imaginary", "step@1"),
    {"bytes_in": 1000, "launches": 10, "peak_bytes": 50_000_000},
    {"offloaded_step": 1.2},
    {"offloaded_step": 0.01},
)
MODULE = "imaginary/__init__.py"


def evidence(folder: Path) -> Evidence:
    """Every tier with one test and its proof, a wheel, a clean source, and a measurement equal to its baseline."""
    site = folder / "site"
    facts = replace(MACHINE, source=Source("c" * 40, False, (), "d" * 64), wheel=wheel(site, {MODULE: "e" * 64}))
    record = [session(tier, str(site / MODULE)) for tier in TIERS]
    record.append(session("performance", str(site / MODULE), measurement=plain(MEASURED)))
    lists = {tier: (id_of(tier),) for tier in TIERS}
    return Evidence(Manifest(lists), tuple(record), facts, facts, MEASURED)


def id_of(tier: str) -> str:
    """The one test of a tier."""
    return f"test_{tier}.py::test_it"


def session(tier: str, module: str, **noted: Any) -> Session:
    """A session in which one test of a tier passed, with its ranks' proof."""
    id = id_of(tier)
    world = int("".join(c for c in tier if c.isdigit()) or 0)
    devices = [gpu.uuid for gpu in GPUS[:world]] if tier.startswith("gpu") else ["cpu"] * world
    entries = list(noted.items())
    if world:
        entries.append(("ranks", {"world": world, "devices": devices, "finished": list(range(world))}))
    return Session(
        tier=tier,
        exit=Exit(0, seconds=1.0),
        collected=(id,),
        selected=((id, (tier,) if tier in TIERS else ()),),
        started=(id,),
        phases=tuple(Phase(id, when, "passed") for when in ("setup", "call", "teardown")),
        properties={id: tuple(entries)},
        modules=frozenset({("imaginary", module)}),
        torch=frozenset({SOFTWARE.torch or ""}),
        status=0,
    )


def plain(measurement: Measurement) -> dict[str, Any]:
    """A measurement as a test notes it."""
    return {**vars(measurement), "identity": vars(measurement.identity)}

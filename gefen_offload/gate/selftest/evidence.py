"""Evidence that was altered: records, lists, wheels, imports, facts of the machine, measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gefen_offload.gate import manifest
from gefen_offload.gate.facts import Facts
from gefen_offload.gate.reason import Reason
from gefen_offload.gate.record import Session, read
from gefen_offload.gate.recorder import link
from gefen_offload.gate.selftest.case import GPUS, IDS, Case, Evidence, Suite, facts_case
from gefen_offload.gate.selftest.release import MEASURED
from gefen_offload.gate.wheel import sha256

Alter = Callable[[list[str]], str]
"""From a record's lines to the text that a reader finds."""


def record_case(name: str, *expected: Reason, alter: Alter, nonce: str | None = None) -> Case:
    """A real session's record, altered before it is read."""

    def make(change: Alter | None) -> Callable[[Path], Evidence]:
        def evidence(folder: Path) -> Evidence:
            suite = Suite({})
            done = suite.session(folder)
            path = folder / "cpu.jsonl"
            if change is not None:
                path.write_text(change(path.read_text(encoding="utf-8").splitlines()), encoding="utf-8")
            again = read(path, "cpu", nonce or done.nonce if change else done.nonce, done.exit)
            return Evidence(suite.manifest(folder), (again,))

        return evidence

    return Case(name, frozenset(expected), make(alter), make(None))


def joined(lines: list[str]) -> str:
    """Lines as a whole file."""
    return "".join(f"{line}\n" for line in lines)


def forged_version(lines: list[str]) -> str:
    """Every line as written, its chain made anew after the header claims another version."""
    bodies = [json.loads(line)["body"] for line in lines]
    header = json.loads(bodies[0])
    bodies[0] = json.dumps({**header, "version": 999})
    chain, out = "", []
    for body in bodies:
        chain = link(header["nonce"], chain, body)
        out.append(json.dumps({"chain": chain, "body": body}))
    return joined(out)


RECORDS = [
    record_case("record gone", Reason.NO_RECORD, alter=lambda lines: ""),
    record_case(
        "record cut within a line",
        Reason.RECORD_TRUNCATED,
        Reason.INTERRUPTED,
        alter=lambda lines: joined([*lines[:-3]]) + lines[-3][:20],
    ),
    record_case("record cut between lines", Reason.NO_END, alter=lambda lines: joined(lines[:-1])),
    record_case(
        "record edited",
        Reason.RECORD_EDITED,
        alter=lambda lines: joined([lines[0], lines[1].replace("test_one", "test_uno"), *lines[2:]]),
    ),
    record_case(
        "record with a line taken out", Reason.RECORD_EDITED, alter=lambda lines: joined([*lines[:5], *lines[6:]])
    ),
    record_case(
        "record with a line written twice", Reason.RECORD_EDITED, alter=lambda lines: joined([*lines, lines[-1]])
    ),
    record_case("record of another run", Reason.RECORD_FOREIGN, alter=joined, nonce="another"),
    record_case("record of another version", Reason.RECORD_VERSION, alter=forged_version),
]

WIDGET = {
    "test_it.py": """
    import widget
    def test_one():
        assert widget.answer() == 42
    def test_two():
        assert widget.__name__ == "widget"
"""
}
GOOD, OTHER = "def answer():\n    return 42\n", "def answer():\n    return 6 * 7\n"
TORCH = "__version__ = {version!r}\ndef answer():\n    return 42\n"


def package_case(name: str, *expected: Reason, broken: dict[str, str], clean: dict[str, str]) -> Case:
    """A suite about a package that stands in ``site``; the session may find another one before it."""

    def make(files: dict[str, str]) -> Callable[[Path], Evidence]:
        def evidence(folder: Path) -> Evidence:
            for where, text in {"site/widget.py": GOOD, **files}.items():
                (folder / where).parent.mkdir(parents=True, exist_ok=True)
                (folder / where).write_text(text, encoding="utf-8")
            suite = Suite(
                WIDGET if "suite/test_it.py" not in files else {"test_it.py": files["suite/test_it.py"]},
                package="widget",
            )
            judged = {str(folder / "site" / "widget.py"): sha256(folder / "site" / "widget.py")}
            done = suite.session(folder)  # which lays the suite's files, as they are then looked at
            facts = replace(Evidence(suite.manifest(folder), ()).before, package=judged)
            return Evidence(suite.manifest(folder), (done,), facts)

        return evidence

    return Case(name, frozenset(expected), make(broken), make(clean))


CLEAN_TORCH = {
    "suite/torch.py": TORCH.format(version="2.0+imaginary"),
    "suite/test_it.py": "    import torch\n" + WIDGET["test_it.py"],
}
SHADOW = {
    "suite/conftest_path.py": "",
    "suite/test_it.py": """
    import sys, pathlib
    sys.path.insert(0, str(pathlib.Path(__file__).parent / "shadow"))
"""
    + WIDGET["test_it.py"],
    "suite/shadow/widget.py": OTHER,
}
IMPORTS = [
    package_case("import from the checkout instead", Reason.IMPORT_SHADOWED, broken=SHADOW, clean={}),
    package_case(
        "a stub in the place of the package",
        Reason.IMPORT_SHADOWED,
        clean={},
        broken={
            "suite/test_it.py": """
    import sys, types
    sys.modules["widget"] = types.ModuleType("widget")
    sys.modules["widget"].answer = lambda: 42
"""
            + WIDGET["test_it.py"]
        },
    ),
    package_case(
        "package never imported",
        Reason.IMPORT_UNPROVEN,
        clean={},
        broken={
            "suite/test_it.py": """
    def test_one():
        assert 6 * 7 == 42
    def test_two():
        assert True
"""
        },
    ),
    package_case(
        "another torch",
        Reason.WRONG_TORCH,
        clean=CLEAN_TORCH,
        broken={**CLEAN_TORCH, "suite/torch.py": TORCH.format(version="9.9")},
    ),
]


def before(**changes: Any) -> Callable[[Evidence], Evidence]:
    """Facts that were so from the start."""
    return lambda e: replace(e, before=replace(e.before, **changes), after=replace(e.before, **changes))


def after(**changes: Any) -> Callable[[Evidence], Evidence]:
    """Facts that became so during the run."""
    return lambda e: replace(e, after=replace(e.before, **changes))


def nested(
    which: str, when: Callable[..., Callable[[Evidence], Evidence]], **changes: Any
) -> Callable[[Evidence], Evidence]:
    """The same for a fact inside a fact."""
    return lambda e: when(**{which: replace(getattr(e.before, which), **changes)})(e)


def listed(**changes: Any) -> Callable[[Evidence], Evidence]:
    """Another manifest."""
    return lambda e: replace(e, manifest=replace(e.manifest, **changes))


def measured(**changes: Any) -> Callable[[Evidence], Evidence]:
    """Another measurement, judged by the same baseline."""

    def change(session: Session) -> Session:
        noted = {
            id: tuple((k, {**v, **changes} if k == "measurement" else v) for k, v in entries)
            for id, entries in session.properties.items()
        }
        return replace(session, properties=noted)

    return lambda e: replace(e, record=tuple(change(session) for session in e.record))


def without(tier: str) -> Callable[[Evidence], Evidence]:
    """The same without one session."""
    return lambda e: replace(e, record=tuple(session for session in e.record if session.tier != tier))


def emptied(e: Evidence) -> Evidence:
    """The gpu2 list without its ids: the session runs as before."""
    return replace(e, manifest=replace(e.manifest, lists={**e.manifest.lists, "gpu2": ()}))


def edited_by_hand(e: Evidence) -> Evidence:
    """A list from which a line was taken, read as the gate reads it."""
    text = manifest.render("cpu", IDS).replace(f"{IDS[1]}\n", "")
    return replace(e, manifest=replace(e.manifest, damaged={"cpu": manifest.parse(text.encode(), headed=True)[1]}))


def less_memory(facts: Facts) -> Any:
    """The GPUs with 500 MiB less on the second."""
    return (facts.gpus[0], replace(facts.gpus[1], free_mib=facts.gpus[1].free_mib - 500))


def nowhere_due(e: Evidence) -> Evidence:
    """A run of the GPU tiers on a machine without GPUs, which has nothing to run."""
    return listed(tiers=("gpu1", "gpu2"))(before(gpus=())(replace(e, record=(), baseline=None)))


def asked_for_less(e: Evidence) -> Evidence:
    """A run of the cpu tier alone, in which gpu2 was required."""
    few = tuple(session for session in e.record if session.tier in ("cpu", "performance"))
    return listed(tiers=("cpu",), required=("gpu2",))(replace(e, record=few))


def list_lost(e: Evidence) -> Evidence:
    """A checkout that lost the list of gloo4, and so never ran that tier."""
    lists = {tier: ids for tier, ids in e.manifest.lists.items() if tier != "gloo4"}
    return listed(lists=lists)(without("gloo4")(e))


def without_torch(e: Evidence) -> Evidence:
    """Sessions of which none loaded torch."""
    return replace(e, record=tuple(replace(session, torch=frozenset()) for session in e.record))


NAN = float("nan")
COUNTERS, TIMES = dict(MEASURED.counters), dict(MEASURED.times)
FACTS = [
    facts_case("dirty tree", Reason.DIRTY_TREE, change=nested("source", before, dirty=(" M gefen_offload/cli.py",))),
    facts_case("commit moved during the run", Reason.SOURCE_CHANGED, change=nested("source", after, commit="f" * 40)),
    facts_case("dirty after the run alone", Reason.SOURCE_CHANGED, change=nested("source", after, dirty=("?? a.py",))),
    facts_case("source changed during the run", Reason.SOURCE_CHANGED, change=nested("source", after, digest="0" * 64)),
    facts_case("no wheel", Reason.NO_WHEEL, change=before(wheel=None)),
    facts_case("stale wheel", Reason.STALE_WHEEL, change=nested("wheel", before, differs=("gefen_offload/cli.py",))),
    facts_case("wheel swapped during the run", Reason.WHEEL_CHANGED, change=nested("wheel", after, sha256="1" * 64)),
    facts_case(
        "installed file changed",
        Reason.WHEEL_CHANGED,
        change=nested("wheel", after, files={"imaginary/__init__.py": "2" * 64}),
    ),
    facts_case("no torch", Reason.NO_TORCH, Reason.WRONG_TORCH, change=nested("software", before, torch=None)),
    facts_case("software changed", Reason.SOFTWARE_CHANGED, change=nested("software", after, nccl="9")),
    facts_case("driver changed", Reason.GPU_CHANGED, change=after(gpus=(GPUS[0], replace(GPUS[1], driver="2.0")))),
    facts_case("GPU memory kept", Reason.GPU_MEMORY_KEPT, change=lambda e: after(gpus=less_memory(e.before))(e)),
    facts_case(
        "somebody on the GPU before",
        Reason.FOREIGN_PROCESS,
        change=lambda e: replace(e, before=replace(e.before, foreign=("process 7",))),
    ),
    facts_case("somebody on the GPU after", Reason.FOREIGN_PROCESS, change=after(foreign=("process 8",))),
    facts_case("smoke failed", Reason.SMOKE_FAILED, change=before(smoke="expected 3.0, got 2.0")),
    facts_case("required tier without its GPUs", Reason.TIER_UNAVAILABLE, change=listed(required=("gpu4",))),
    facts_case("no tier is due", Reason.TIER_UNAVAILABLE, change=nowhere_due),
    facts_case("required tier left out of the run", Reason.TIER_UNAVAILABLE, change=asked_for_less),
    facts_case(
        "required tier without a list",
        Reason.TIER_UNAVAILABLE,
        change=lambda e: listed(required=("gloo8",))(before(cores=8)(e)),
    ),
    facts_case("a list that is gone", Reason.EMPTY_LIST, change=list_lost),
    facts_case("no session loaded torch", Reason.IMPORT_UNPROVEN, change=without_torch),
    facts_case("empty list", Reason.EMPTY_LIST, Reason.UNLISTED, change=emptied),
    facts_case("list edited by hand", Reason.LIST_EDITED, change=edited_by_hand),
    facts_case("a tier without a session", Reason.NO_RECORD, change=without("gpu2")),
    facts_case("nothing measured", Reason.NOT_MEASURED, change=without("performance")),
    facts_case("no baseline", Reason.NO_BASELINE, change=lambda e: replace(e, baseline=None)),
    facts_case(
        "baseline of other hardware",
        Reason.BASELINE_MISMATCH,
        change=lambda e: replace(e, baseline=replace(MEASURED, identity=replace(MEASURED.identity, gpu="Imaginary 8"))),
    ),
    facts_case(
        "a counter no longer measured",
        Reason.BASELINE_PARTIAL,
        change=measured(counters={name: value for name, value in COUNTERS.items() if name != "launches"}),
    ),
    facts_case(
        "a counter that is no number", Reason.BASELINE_PARTIAL, change=measured(counters={**COUNTERS, "launches": NAN})
    ),
    facts_case(
        "a time that is no number",
        Reason.BASELINE_PARTIAL,
        change=measured(times={**TIMES, "offloaded_step": NAN}),
    ),
    facts_case("noise that is no number", Reason.TOO_NOISY, change=measured(noise={"offloaded_step": NAN})),
    facts_case("noise", Reason.TOO_NOISY, change=measured(noise={"offloaded_step": 0.4})),
    facts_case(
        "50 MiB more at the peak",
        Reason.COUNTER_EXCEEDED,
        change=measured(counters={**COUNTERS, "peak_bytes": COUNTERS["peak_bytes"] + 50 * 2**20}),
    ),
    facts_case(
        "20% slower", Reason.TIME_EXCEEDED, change=measured(times={name: 1.2 * value for name, value in TIMES.items()})
    ),
]
CASES: list[Case] = [*RECORDS, *IMPORTS, *FACTS]

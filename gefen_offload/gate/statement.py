"""The statement: an in-toto test-result attestation, unsigned, whose subject is the judged wheel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gefen_offload.gate.facts import Facts
from gefen_offload.gate.manifest import Manifest, digest
from gefen_offload.gate.outcome import Ledger
from gefen_offload.gate.reason import Status
from gefen_offload.gate.record import Session
from gefen_offload.gate.verdict import Verdict

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"


def statement(verdict: Verdict, manifest: Manifest, record: Sequence[Session], facts: Facts) -> dict[str, Any]:
    """The statement as JSON values: PASSED only for a release verdict, WARNED for any other pass."""
    passed, failed = tests(manifest, record)
    return {
        "_type": TYPE,
        "subject": subject(facts),
        "predicateType": PREDICATE,
        "predicate": {
            "result": result(verdict),
            "configuration": configuration(manifest, facts),
            "passedTests": passed,
            "failedTests": failed,
            "warnedTests": list(verdict.not_release),
        },
    }


def result(verdict: Verdict) -> str:
    """The statement's word for a verdict."""
    if verdict.releasable:
        return "PASSED"
    return "WARNED" if verdict.status is Status.PASS else "FAILED"


def subject(facts: Facts) -> list[dict[str, Any]]:
    """What the statement is about: the wheel, or the digest of a foreign package's files."""
    if facts.wheel is not None:
        return [{"name": facts.wheel.name, "digest": {"sha256": facts.wheel.sha256}}]
    whole = digest(f"{path} {value}" for path, value in sorted(facts.package.items()))
    return [{"name": "package", "digest": {"sha256": whole}}]


def configuration(manifest: Manifest, facts: Facts) -> list[dict[str, Any]]:
    """What the result depended on: the source and the mandatory lists, each by digest, and the machine by name."""
    lists = [{"name": f"mandatory/{tier}", "digest": {"sha256": digest(ids)}} for tier, ids in manifest.lists.items()]
    machine = {"name": "machine", "annotations": machine_of(facts)}
    if facts.source is None:
        return [*lists, machine]
    digests = {"sha256": facts.source.digest}
    if facts.source.commit and not facts.source.claimed:
        digests["gitCommit"] = facts.source.commit
    return [{"name": "source", "digest": digests}, *lists, machine]


def machine_of(facts: Facts) -> Mapping[str, Any]:
    """The machine and its software."""
    software = facts.software
    return {
        "gpus": [{"uuid": gpu.uuid, "name": gpu.name, "driver": gpu.driver} for gpu in facts.gpus],
        "torch": software.torch,
        "cuda": software.cuda,
        "nccl": software.nccl,
        "triton": software.triton,
        "python": software.python,
        "host": facts.host,
    }


def tests(manifest: Manifest, record: Sequence[Session]) -> tuple[list[str], list[str]]:
    """The mandatory tests of the tiers that ran, by whether they count."""
    passed: list[str] = []
    failed: list[str] = []
    for session in record:
        ledger = Ledger(session)
        for id in manifest.lists.get(session.tier, ()):
            (failed if ledger.mandatory(id) else passed).append(id)
    return passed, failed

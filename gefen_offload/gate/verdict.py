"""The verdict: a pure function of what must have run, what did, what it ran on before and after, and the baseline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gefen_offload.gate import baseline as performance
from gefen_offload.gate.checkout import Source
from gefen_offload.gate.facts import Facts
from gefen_offload.gate.manifest import Manifest
from gefen_offload.gate.outcome import Ledger, is_proof, rank_proof, world_of
from gefen_offload.gate.reason import Finding, Reason, Status, worst
from gefen_offload.gate.record import Damage, Session
from gefen_offload.gate.recorder import TIERS

RELEASE_TIERS = ("cpu", "gloo2", "gpu1", "gpu2")
"""Without these nothing is a release verdict."""
LISTED_TIERS = (*RELEASE_TIERS, "gloo4", "gpu4", "gpu8")
"""Tiers whose list belongs to a checkout, so that one that is lost is noticed where the tier could run."""
MEMORY_SLACK_MIB = 64
DAMAGES = {
    Damage.MISSING: Reason.NO_RECORD,
    Damage.TRUNCATED: Reason.RECORD_TRUNCATED,
    Damage.EDITED: Reason.RECORD_EDITED,
    Damage.FOREIGN: Reason.RECORD_FOREIGN,
    Damage.VERSION: Reason.RECORD_VERSION,
    Damage.UNENDED: Reason.NO_END,
}
WORTHLESS = {Damage.MISSING, Damage.EDITED, Damage.FOREIGN, Damage.VERSION}
"""Damage after which nothing that the record says about single tests counts."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    tier: str
    status: Status | None
    """None for what was not run."""
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The answer, its reasons, and the table."""

    status: Status
    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    not_release: tuple[str, ...]
    """Why even a pass would not be a release verdict; empty where it is one."""

    @property
    def releasable(self) -> bool:
        """Whether this verdict lets the wheel be published."""
        return self.status is Status.PASS and not self.not_release

    @property
    def headline(self) -> str:
        """The first line that a person reads."""
        if self.not_release:
            return f"{self.status.name} (not a release verdict: {'; '.join(self.not_release)})"
        return self.status.name


def decide(
    manifest: Manifest,
    record: Sequence[Session],
    facts_before: Facts,
    facts_after: Facts,
    baseline: performance.Measurement | None,
) -> Verdict:
    """Judge a run. No input or output; the same arguments give the same verdict."""
    due = due_tiers(manifest, facts_before)
    findings = lists(manifest, due, facts_before)
    findings += source(manifest, facts_before, facts_after)
    findings += judged_files(facts_before, facts_after)
    findings += machine(facts_before, facts_after)
    sessions = {session.tier: session for session in record}
    refused = not record and worst(findings) is Status.UNFIT
    findings += torch(manifest, record, facts_before)
    for tier in () if refused else due:
        if tier in sessions:
            findings += tier_findings(manifest, sessions[tier], facts_before)
        else:
            findings.append(Finding(Reason.NO_RECORD, tier, detail="the tier was due and no session was run"))
    if manifest.performance and facts_before.gpus and not refused:
        findings += measurement(sessions.get(performance.CHECK), facts_before, baseline)
    return Verdict(
        worst(findings),
        tuple(findings),
        rows(manifest, due, sessions, findings, facts_before),
        not_release(manifest, due, facts_before),
    )


def due_tiers(manifest: Manifest, facts: Facts) -> tuple[str, ...]:
    """The tiers with a list that were asked for and that the machine can run; a foreign suite's one tier always is."""
    wanted = manifest.tiers or TIERS
    return tuple(tier for tier in manifest.lists if (tier in wanted and possible(tier, facts)) or tier not in TIERS)


def possible(tier: str, facts: Facts) -> bool:
    """Whether the machine can run a tier: enough GPUs, and for eight CPU ranks as many cores."""
    if tier.startswith("gpu"):
        return len(facts.gpus) >= world_of(tier)
    return tier != "gloo8" or facts.cores >= world_of(tier)


def not_release(manifest: Manifest, due: Sequence[str], facts: Facts) -> tuple[str, ...]:
    """Why a pass would not be a release verdict."""
    if not manifest.exact:
        return ("another project's suite",)
    absent = [tier for tier in RELEASE_TIERS if tier not in due]
    why = [f"{len(facts.gpus)} GPUs; not run: {', '.join(absent)}"] if absent else []
    if manifest.part:
        why.append(f"a part of the tests: {', '.join(manifest.part)}")
    if not manifest.performance:
        why.append("performance not judged")
    if not manifest.selftest:
        why.append("selftest skipped")
    if facts.source is None or facts.source.commit is None:
        why.append("no commit, judged by the digest of its source")
    elif facts.source.claimed:
        why.append("the commit is claimed, not read from git")
    if facts.source and facts.source.dirty:
        why.append("uncommitted changes")
    return tuple(why)


def lists(manifest: Manifest, due: Sequence[str], facts: Facts) -> list[Finding]:
    """What is wrong with the mandatory lists, and which tiers that must run do not."""
    wanted = set(manifest.tiers or TIERS)
    needed = {tier for tier in LISTED_TIERS if tier in wanted and possible(tier, facts)} if manifest.exact else set()
    empty = sorted({tier for tier in {*due, *needed} if not manifest.lists.get(tier)})
    return [
        *(Finding(Reason.EMPTY_LIST, "lists", tier) for tier in empty),
        *(Finding(Reason.LIST_EDITED, "lists", tier, wrong) for tier, wrong in manifest.damaged.items()),
        *(Finding(Reason.SHADOWED, "lists", where) for where in manifest.shadowed),
        *(Finding(Reason.TIER_UNAVAILABLE, "machine", tier, why) for tier, why in unavailable(manifest, due, facts)),
    ]


def unavailable(manifest: Manifest, due: Sequence[str], facts: Facts) -> list[tuple[str, str]]:
    """Tiers that must run and do not, with what is in the way: those required, and where none is due those wanted."""
    must = manifest.required if due else (*manifest.required, *(manifest.tiers or RELEASE_TIERS))
    absent = [
        tier for tier in dict.fromkeys(must) if not (possible(tier, facts) and (tier in due or not manifest.exact))
    ]
    return [(tier, in_the_way(tier, manifest, facts)) for tier in absent]


def in_the_way(tier: str, manifest: Manifest, facts: Facts) -> str:
    """Why a tier is not due."""
    if not possible(tier, facts):
        have, what = (len(facts.gpus), "GPUs") if tier.startswith("gpu") else (facts.cores, "cores")
        return f"{what} here: {have}, needed: {world_of(tier)}"
    if manifest.tiers and tier not in manifest.tiers:
        return f"this run was asked for {', '.join(manifest.tiers)} alone"
    return f"there is no list of its tests, ci/mandatory/{tier}.txt"


def source(manifest: Manifest, before: Facts, after: Facts) -> list[Finding]:
    """Whether the checkout is clean and stayed as it was."""
    if before.source is None:
        return []
    findings = []
    if before.source.dirty and not manifest.allow_dirty:
        some = ", ".join(line.strip() for line in before.source.dirty[:5])
        findings.append(Finding(Reason.DIRTY_TREE, "source", detail=f"{some}; --allow-dirty judges it anyway"))
    if before.source != after.source:
        findings.append(Finding(Reason.SOURCE_CHANGED, "source", detail=difference(before.source, after.source)))
    return findings


def difference(before: Source, after: Source | None) -> str:
    """What changed between two readings of the source."""
    if after is None:
        return "it can no longer be read"
    if before.commit != after.commit:
        return f"commit {before.commit} -> {after.commit}"
    new = sorted({*after.dirty} ^ {*before.dirty})
    return ", ".join(line.strip() for line in new[:5]) or "the content of its files"


def judged_files(before: Facts, after: Facts) -> list[Finding]:
    """Whether what is judged is the source's wheel, and stayed as it was."""
    if before.source is None:
        files = sorted({*before.package, *after.package})
        changed = [path for path in files if before.package.get(path) != after.package.get(path)]
        return [Finding(Reason.WHEEL_CHANGED, "wheel", path) for path in changed]
    if before.wheel is None or after.wheel is None:
        return [Finding(Reason.NO_WHEEL, "wheel")]
    findings = [Finding(Reason.STALE_WHEEL, "wheel", path) for path in before.wheel.differs]
    if (before.wheel.sha256, before.wheel.files) != (after.wheel.sha256, after.wheel.files):
        findings.append(Finding(Reason.WHEEL_CHANGED, "wheel", before.wheel.name))
    return findings


def torch(manifest: Manifest, record: Sequence[Session], facts: Facts) -> list[Finding]:
    """Whether a whole run loaded the torch on record: without it nothing was computed that a wheel can be judged by."""
    ended = [session for session in record if session.status is not None]
    if not ended or facts.wheel is None or manifest.part or any(session.torch for session in record):
        return []
    return [Finding(Reason.IMPORT_UNPROVEN, "wheel", "torch", "no session loaded it")]


def machine(before: Facts, after: Facts) -> list[Finding]:
    """Whether the machine was fit, stayed the same, and was left as it was found."""
    findings: list[Finding] = []
    if before.software.torch is None:
        findings.append(Finding(Reason.NO_TORCH, "machine"))
    if before.software != after.software:
        findings.append(Finding(Reason.SOFTWARE_CHANGED, "machine", detail=f"{before.software} -> {after.software}"))
    same = [(gpu.uuid, gpu.driver) for gpu in before.gpus] == [(gpu.uuid, gpu.driver) for gpu in after.gpus]
    if not same:
        findings.append(Finding(Reason.GPU_CHANGED, "machine"))
    for one, other in zip(before.gpus, after.gpus, strict=False):
        if same and other.free_mib < one.free_mib - MEMORY_SLACK_MIB:
            kept = f"{one.free_mib - other.free_mib} MiB less than before"
            findings.append(Finding(Reason.GPU_MEMORY_KEPT, "machine", one.uuid, kept))
    for when, facts in (("before", before), ("after", after)):
        findings += [Finding(Reason.FOREIGN_PROCESS, "machine", who, when) for who in facts.foreign]
    if before.smoke is not None:
        findings.append(Finding(Reason.SMOKE_FAILED, "machine", detail=before.smoke))
    return findings


def tier_findings(manifest: Manifest, session: Session, facts: Facts) -> list[Finding]:
    """Everything that one session says against its tier."""
    findings = evidence(session)
    if any(damage in WORTHLESS for damage, _ in session.damage):
        return findings
    ledger, listed = Ledger(session), manifest.lists.get(session.tier, ())
    findings += [Finding(Reason.COLLECTION_ERROR, session.tier, id, text) for id, text in uncollected(session)]
    findings += listed_tests(ledger, listed, facts)
    findings += unlisted_tests(ledger, set(listed), manifest.exact)
    findings += imports(session, facts)
    if session.status not in (0, None) and not any(f.reason is not Reason.EXIT_MISMATCH for f in findings):
        findings.append(Finding(Reason.UNEXPLAINED_EXIT, session.tier, detail=f"status {session.status}"))
    return findings


def evidence(session: Session) -> list[Finding]:
    """What the record and the process's end are worth."""
    tier, exit = session.tier, session.exit
    findings = [Finding(DAMAGES[damage], tier, detail=text) for damage, text in session.damage]
    findings += [Finding(Reason.INTERNAL_ERROR, tier, detail=text) for text in session.internal_errors]
    findings += [Finding(Reason.LEFTOVER, tier, who) for who in exit.leftovers]
    findings += [Finding(Reason.WORKER_LOST, tier, worker, why) for worker, why in session.lost]
    if session.optimize:
        findings.append(Finding(Reason.OPTIMIZED, tier, detail=f"-O or PYTHONOPTIMIZE, level {session.optimize}"))
    if exit.expired:
        return [*findings, Finding(Reason.DEADLINE, tier, detail=f"after {exit.seconds:.0f} s")]
    if exit.code is not None and exit.code < 0:
        return [*findings, Finding(Reason.CRASHED, tier, detail=f"signal {-exit.code}")]
    if session.status is not None and exit.code != session.status:
        ended = f"pytest reported {session.status}, the process {exit.code}"
        findings.append(Finding(Reason.EXIT_MISMATCH, tier, detail=ended))
    return findings


def uncollected(session: Session) -> list[tuple[str, str]]:
    """Files that could not be collected; a file that was skipped whole shows in its missing tests."""
    return [(id, text) for id, outcome, text in session.collect_errors if outcome == "failed"]


def listed_tests(ledger: Ledger, listed: Sequence[str], facts: Facts) -> list[Finding]:
    """Each mandatory test that was not collected once and passed once, or whose ranks are not proven."""
    findings: list[Finding] = []
    known = {gpu.uuid for gpu in facts.gpus}
    proofs: dict[str, list[dict[str, object]]] = {}
    for id, value in ledger.session.noted("ranks"):
        if is_proof(value):
            proofs.setdefault(id, []).append(value)
    for id in listed:
        why = ledger.mandatory(id)
        if why is not None:
            findings.append(Finding(why[0], ledger.session.tier, id, why[1]))
            continue
        for tier in ledger.tiers.get(id, ()):
            if world_of(tier):
                why = rank_proof(tier, proofs.get(id, []), known)
                findings += [Finding(why[0], ledger.session.tier, id, why[1])] if why else []
    return findings


def unlisted_tests(ledger: Ledger, listed: set[str], exact: bool) -> list[Finding]:
    """Tests outside the list: failed ones always count, others where the list must be exact, and GPU tests always."""
    tier = ledger.session.tier
    failed = dict(ledger.failed_elsewhere(listed))
    findings = [Finding(Reason.UNLISTED_FAILURE, tier, id, text) for id, text in failed.items()]
    for id, marks in ledger.tiers.items():
        if len(marks) > 1:
            findings.append(Finding(Reason.WRONG_TIER, tier, id, ", ".join(marks)))
        on_gpu = any(mark.startswith("gpu") for mark in marks)
        if id not in listed and id not in failed and (exact or on_gpu):
            findings.append(Finding(Reason.UNLISTED, tier, id))
    return findings


def whole_session(session: Session, facts: Facts) -> list[Finding]:
    """What is wrong with a session of the gate's own, in which every selected test is mandatory."""
    ids = tuple(id for id, _ in session.selected)
    return tier_findings(Manifest({session.tier: ids or (session.tier,)}), session, facts)


def measurement(session: Session | None, facts: Facts, baseline: performance.Measurement | None) -> list[Finding]:
    """What is wrong with the session that measured, and with what it measured."""
    if session is None:
        return performance.compare(None, baseline)
    return [*whole_session(session, facts), *performance.compare(measured([session]), baseline)]


def imports(session: Session, facts: Facts) -> list[Finding]:
    """Whether the session imported what is judged, file by file, and the torch on record."""
    tier, findings = session.tier, []
    for torch in sorted(session.torch - {facts.software.torch}):
        findings.append(Finding(Reason.WRONG_TORCH, tier, detail=f"session {torch}, on record {facts.software.torch}"))
    judged = set(facts.package)
    if facts.wheel is not None:
        judged |= {f"{facts.wheel.site}/{name}" for name in facts.wheel.files if ".dist-info/" not in name}
    if not judged:
        return findings
    strange = [f"{name} from {path}" for name, path in sorted(session.modules) if not comes_from(path, judged)]
    findings += [Finding(Reason.IMPORT_SHADOWED, tier, detail=where) for where in strange[:3]]
    if not session.modules and session.status is not None:
        findings.append(Finding(Reason.IMPORT_UNPROVEN, tier, min(judged)))
    return findings


def comes_from(path: str, judged: set[str]) -> bool:
    """Whether a module's file is judged, or each folder of a namespace, which ends in a slash, holds such files."""
    if path in judged:
        return True
    folders = path.split(os.pathsep)
    return all(folder.endswith("/") and any(file.startswith(folder) for file in judged) for folder in folders)


def measured(record: Sequence[Session]) -> performance.Measurement | None:
    """The measurement that the performance session noted, if there is one."""
    for session in record:
        for _, value in session.noted("measurement") if session.tier == performance.CHECK else ():
            return performance.from_json(value)
    return None


def rows(
    manifest: Manifest, due: Sequence[str], sessions: dict[str, Session], findings: Sequence[Finding], facts: Facts
) -> tuple[Row, ...]:
    """The table: the checks, the tiers that ran, and by name those that did not."""

    def status(check: str) -> Status:
        return worst([finding for finding in findings if finding.check == check])

    # another project's suite has no checkout, and files to look at only where its package was named
    absent = {"source", "wheel"} if facts.source is None else set()
    if facts.package:
        absent.discard("wheel")
    checks = ("lists", "source", "wheel", "machine")
    table = [Row(check, "", None if check in absent else status(check)) for check in checks]
    for tier in [*due, *(tier for tier in manifest.lists if tier not in due)]:
        session = sessions.get(tier)
        count = f"{len(manifest.lists[tier])} tests"
        if tier in due and (session or status(tier) is not Status.PASS):
            table.append(Row("tests", tier, status(tier), session.exit.seconds if session else 0.0, count))
        else:
            table.append(Row("tests", tier, None, 0.0, f"{count}, not run here"))
    ran = performance.CHECK in {finding.check for finding in findings} or measured(list(sessions.values())) is not None
    spent = sessions[performance.CHECK].exit.seconds if performance.CHECK in sessions else 0.0
    table.append(Row(performance.CHECK, "", status(performance.CHECK) if ran else None, spent))
    return tuple(table)

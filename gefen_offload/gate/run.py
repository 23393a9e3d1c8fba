"""One run of the gate, from an empty folder to a verdict."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from gefen_offload.gate import baseline as performance
from gefen_offload.gate import (
    checkout,
    environment,
    facts,
    manifest,
    report,
    rundir,
    schedule,
    session,
    shadow,
    summary,
    wheel,
)
from gefen_offload.gate.baseline import BaselineError
from gefen_offload.gate.facts import Facts
from gefen_offload.gate.manifest import Manifest
from gefen_offload.gate.progress import Progress
from gefen_offload.gate.reason import Status
from gefen_offload.gate.record import Session
from gefen_offload.gate.rundir import Evidence
from gefen_offload.gate.schedule import Turn
from gefen_offload.gate.selftest import run as selftest
from gefen_offload.gate.verdict import Verdict, due_tiers, whole_session
from gefen_offload.gate.wheel import WheelError

SUITES = ("tests", "tests_distributed")
TIMEOUT = 3600.0
"""Seconds that the session of one tier may take."""
SMOKE_TIMEOUT = 240.0


@dataclass(frozen=True)
class Options:
    """What a run was asked for."""

    run_dir: str | None = None
    tiers: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    allow_dirty: bool = False
    commit: str | None = None
    wheel: str | None = None
    timeout: float = TIMEOUT
    selftest: bool = True
    performance: bool | None = None
    """Whether to measure; None measures unless the run is of some tiers or of a part of the tests."""
    part: tuple[str, ...] = ()
    """Files or test ids to run instead of all."""


@dataclass(frozen=True)
class Foreign:
    """Another project's suite: its folder, its mandatory list, and the package that it is about."""

    tests: Path
    mandatory: Path
    package: str | None = None


def own(root: Path, options: Options) -> int:
    """Judge this checkout's wheel; the exit code."""
    progress = Progress()
    if not options.part and (why := environment.lacking()):
        print(f"gefen-offload gate: {why}", file=sys.stderr)
        return Status.UNFIT
    source = checkout.source(root, options.commit)
    folder = rundir.make(root, options.run_dir, (source.commit or source.digest)[:10])
    progress.say(f"run directory {folder}")
    try:
        built = wheel.given(Path(options.wheel), folder / "wheel") if options.wheel else build(root, folder)
        installed = wheel.install(built, folder / "site", root)
        before = facts.gather(sys.executable, source, installed)
        made = baseline_for(root, before)
    except (WheelError, BaselineError) as error:
        print(f"gefen-offload gate: {error}", file=sys.stderr)
        return Status.UNFIT
    lists = mandatory(root, options)
    stopped = preflight(folder, lists, before)
    if stopped is not None:
        return finish(folder, stopped)
    if options.selftest and not selftested(progress):
        return Status.INCOMPLETE
    if not options.part:
        progress.say("smoke: two ranks, an all-reduce of a known value")
        before = dataclasses.replace(before, smoke=smoke(folder, before))
    record = sessions(root, folder, lists, before, options, progress) if before.smoke is None else ()
    after = facts.gather(sys.executable, checkout.source(root, options.commit), wheel.again(installed, built))
    return finish(folder, Evidence(lists, record, before, after, made))


def mandatory(root: Path, options: Options) -> Manifest:
    """What this run must have run."""
    whole = dataclasses.replace(
        manifest.read(root / "ci" / "mandatory"),
        shadowed=shadow.shadowed(root),
        required=options.required,
        tiers=options.tiers,
        allow_dirty=options.allow_dirty,
        selftest=options.selftest,
        performance=not (options.tiers or options.part) if options.performance is None else options.performance,
    )
    return manifest.cut_down(whole, options.part) if options.part else whole


def build(root: Path, folder: Path) -> Path:
    """The checkout's wheel, in the run directory."""
    return wheel.build(root, sys.executable, folder / "wheel")


def selftested(progress: Progress) -> bool:
    """Whether the gate itself still tells each fault from its clean twin."""
    progress.say("selftest: one miniature suite for each way to be green wrongly")
    wrong = selftest.failures()
    for line in wrong:
        print(f"gefen-offload gate: selftest: {line}", file=sys.stderr)
    return not wrong


def preflight(folder: Path, lists: Manifest, before: Facts) -> Evidence | None:
    """Evidence of an unfit box or checkout, found before anything long is run; None where all is well."""
    evidence = Evidence(lists, (), before, before, None)
    unfit = any(finding.reason.status is Status.UNFIT for finding in evidence.verdict().findings)
    return evidence if unfit else None


def sessions(
    root: Path, folder: Path, lists: Manifest, before: Facts, options: Options, progress: Progress
) -> tuple[Session, ...]:
    """One session for each tier that is due, in lanes side by side; then on a GPU, alone, the measurements."""
    due = due_tiers(lists, before)
    spread = importlib.util.find_spec("xdist") is not None
    stopping = threading.Event()

    def one_after_the_other(lane: tuple[Turn, ...]) -> list[Session]:
        done = []
        for turn in lane:
            with progress.session(turn.tier, len(lists.lists[turn.tier])) as watch:
                done.append(session.run(planned(root, folder, turn, options), folder / "sessions", watch, stopping))
        return done

    lanes = schedule.lanes(due, before.cores, len(before.gpus), spread)
    done = side_by_side(lanes, one_after_the_other, stopping)
    done.sort(key=lambda session: due.index(session.tier))
    if before.gpus and lists.performance:
        progress.say("performance: counters and times")
        done.append(session.run(ours(folder, performance.CHECK, "step.py", "gpu1", options), folder / "sessions"))
    return tuple(done)


def side_by_side(
    lanes: Sequence[tuple[Turn, ...]], run: Callable[[tuple[Turn, ...]], list[Session]], stopping: threading.Event
) -> list[Session]:
    """Run the lanes at the same time; whatever ends this call ends them first."""
    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        try:
            futures = [pool.submit(run, lane) for lane in lanes]
            wait(futures, return_when=FIRST_EXCEPTION)
            broken = [future for future in futures if future.done() and future.exception()]
            return [session for future in broken or futures for session in future.result()]
        except BaseException:
            stopping.set()
            raise


def planned(root: Path, folder: Path, turn: Turn, options: Options) -> session.Plan:
    """The session of one tier on the judged wheel."""
    where = options.part or [name for name in SUITES if (root / name).is_dir()]
    required = [f"--require-gpus={turn.tier.removeprefix('gpu')}"] if turn.tier.startswith("gpu") else []
    spread = session.spread(turn.workers)
    arguments = ("-m", turn.tier, "-p", "no:cacheprovider", *spread, "--rootdir", str(root), *required, *where)
    return session.Plan(
        turn.tier,
        sys.executable,
        root,
        arguments,
        options.timeout,
        checkout.PACKAGE,
        (str(folder / "site"),),
        {} if turn.threads is None or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(turn.threads)},
    )


def ours(folder: Path, check: str, name: str, tier: str, options: Options) -> session.Plan:
    """A session of the gate's own suites, which stand in the wheel."""
    file = folder / "site" / checkout.PACKAGE / "gate" / "suites" / name
    arguments = ("-m", tier, "-p", "no:cacheprovider", "--rootdir", str(file.parent), "-c", os.devnull, str(file))
    return session.Plan(
        check, sys.executable, folder, arguments, options.timeout, checkout.PACKAGE, (str(folder / "site"),)
    )


def smoke(folder: Path, before: Facts) -> str | None:
    """Two ranks, an all-reduce of a known value: None if it was right, else what went wrong."""
    tier = "gpu2" if len(before.gpus) >= 2 else "gloo2"
    plan = ours(folder, "smoke", "all_reduce.py", tier, Options(timeout=SMOKE_TIMEOUT))
    done = session.run(plan, folder / "sessions")
    wrong = whole_session(done, before)
    if not wrong:
        return None
    last = [*session.tail(folder / "sessions" / "smoke.log", 3)]
    return "; ".join([*(f"{finding.reason.name} {finding.detail}".strip() for finding in wrong), *last])[:1000]


def baseline_for(root: Path, before: Facts) -> performance.Measurement | None:
    """The baseline of this machine's GPU model."""
    return performance.load(root / "ci" / "baseline", before.gpus[0].name) if before.gpus else None


def foreign(suite: Foreign, options: Options) -> int:
    """Judge another project's suite by the same rules; the exit code."""
    ids, wrong = manifest.parse(suite.mandatory.read_bytes(), headed=False)
    lists = Manifest(
        {"suite": ids},
        exact=False,
        damaged={"suite": wrong} if wrong else {},
        shadowed=shadow.shadowed(suite.tests, (".",)),
        required=options.required,
        performance=False,
    )
    folder = rundir.make(suite.tests, options.run_dir, suite.tests.name)
    path = tuple(entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)
    before = facts.gather(sys.executable, None, None, package_files(suite.package))
    stopped = preflight(folder, lists, before)
    if stopped is not None:
        return finish(folder, stopped)
    arguments = ("-p", "no:cacheprovider", "--rootdir", str(suite.tests), str(suite.tests))
    plan = session.Plan("suite", sys.executable, suite.tests, arguments, options.timeout, suite.package, path)
    with Progress().session("suite", len(ids)) as watch:
        record = (session.run(plan, folder / "sessions", watch),)
    after = facts.gather(sys.executable, None, None, package_files(suite.package))
    return finish(folder, Evidence(lists, record, before, after, None))


def package_files(package: str | None) -> dict[str, str]:
    """The digest of each file of a foreign package, wherever it imports from; none where it does not."""
    try:
        spec = importlib.util.find_spec(package) if package else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return {}
    places = spec.submodule_search_locations  # of a namespace package several
    files = [Path(spec.origin or "")] if places is None else [f for place in places for f in inside(Path(place))]
    return {str(path): wheel.sha256(path) for path in files if path.is_file()}


def inside(folder: Path) -> list[Path]:
    """What a package's folder holds, without caches, and without what is hidden: the evidence may be there."""
    parts = {path: path.relative_to(folder).parts for path in folder.rglob("*")}
    return [path for path, names in parts.items() if not any(name.startswith((".", "__pycache__")) for name in names)]


def finish(folder: Path, evidence: Evidence) -> int:
    """Decide, keep the evidence, print the verdict, and only then draw what is for people; the exit code.

    Where something cannot be written, the verdict is printed all the same, and a pass is incomplete.
    """
    verdict = evidence.verdict()
    wrong = problem(rundir.write, folder, evidence, verdict)
    if wrong:
        print(f"{Status.INCOMPLETE.name}: the evidence could not be kept; without it this is what the run gave:")
    print(summary.text(verdict, str(folder)), flush=True)
    wrong = wrong or problem(told, folder, evidence, verdict)
    if wrong:
        print(f"gefen-offload gate: the run directory {folder} is incomplete: {wrong}", file=sys.stderr)
        return int(verdict.status or Status.INCOMPLETE)
    return int(verdict.status)


def problem(
    write: Callable[[Path, Evidence, Verdict], None], folder: Path, evidence: Evidence, verdict: Verdict
) -> str:
    """What kept something from being written; empty if nothing."""
    try:
        write(folder, evidence, verdict)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def told(folder: Path, evidence: Evidence, verdict: Verdict) -> None:
    """The verdict for people: the report, and the summary of the workflow's step."""
    report.write(folder / "report.html", evidence, verdict)
    if os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(os.environ["GITHUB_STEP_SUMMARY"], "ab") as step:
            step.write((folder / "summary.md").read_bytes())

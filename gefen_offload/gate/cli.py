"""``gefen-offload gate``: run, show, selftest, drill, manifest and baseline.

Exit codes of a verdict: 0 pass, 1 product failed, 2 usage, 3 box unfit, 4 evidence incomplete.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gefen_offload.gate import checkout, manifest
from gefen_offload.gate.recorder import TIERS

USAGE, UNFIT, INCOMPLETE = 2, 3, 4
TIMEOUT = 3600.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True)
    run_arguments(commands.add_parser("run", help="judge this checkout's wheel, or another project's suite"))

    show = commands.add_parser("show", help="decide a kept run again from its evidence, and print it")
    show.add_argument("run_dir", type=Path)
    show.add_argument("--report", metavar="FILE", type=Path, help="also draw report.html anew, into this file")
    show.set_defaults(run=show_command)

    itself = commands.add_parser("selftest", help="does the gate still tell each fault from its clean twin")
    itself.add_argument("--only", default="", help="cases whose name contains this")
    itself.set_defaults(run=selftest_command)

    drill = commands.add_parser("drill", help="plant regressions, and see that the gate names each")
    drill.add_argument("--recorded", action="store_true", help="in recorded evidence, also where there is a GPU")
    drill.add_argument("--keep", metavar="DIR", type=Path, help="leave the copies and their run directories here")
    drill.set_defaults(run=drill_command)

    lists = commands.add_parser("manifest", help="the mandatory lists against what is collected")
    how = lists.add_mutually_exclusive_group(required=True)
    how.add_argument("--check", action="store_true", help="say where they differ; exit 1 if they do")
    how.add_argument("--update", action="store_true", help="write them anew")
    lists.set_defaults(run=manifest_command)

    base = commands.add_parser("baseline", help="the performance baseline of this machine's GPU")
    how = base.add_mutually_exclusive_group(required=True)
    how.add_argument("--update", metavar="RUN_DIR", type=Path, help="make it from a kept run")
    how.add_argument("--check", action="store_true", help="exit 1 if a commit changed one together with other files")
    base.set_defaults(run=baseline_command)


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``gate run``."""
    parser.add_argument("--run-dir", metavar="DIR", help="where the evidence goes (a new one under .gate)")
    parser.add_argument("--tier", action="append", default=[], choices=TIERS, help="run only this tier; repeatable")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATH",
        help="only this file or test; never releasable",
    )
    parser.add_argument("--require", action="append", default=[], choices=TIERS, help="exit 3 where it cannot run")
    parser.add_argument(
        "--timeout", type=seconds, default=TIMEOUT, metavar="SECONDS", help="deadline of each session (%(default).0f)"
    )
    parser.add_argument("--allow-dirty", action="store_true", help="judge uncommitted changes; never releasable")
    parser.add_argument("--commit", metavar="SHA", help="the commit of a copy without git; never releasable")
    parser.add_argument("--wheel", metavar="FILE", help="judge this wheel instead of building one")
    parser.add_argument("--no-selftest", action="store_true", help="skip the selftest; never releasable")
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument(
        "--without-performance",
        dest="performance",
        action="store_const",
        const=False,
        help="judge no measurement; never releasable",
    )
    measured.add_argument(
        "--with-performance",
        dest="performance",
        action="store_const",
        const=True,
        help="measure also in a run of some tiers or tests",
    )
    parser.add_argument("--tests", metavar="DIR", type=Path, help="judge the suite in this folder instead")
    parser.add_argument("--mandatory", metavar="FILE", type=Path, help="the ids, relative to DIR, that it must run")
    parser.add_argument("--package", metavar="NAME", help="the package that the suite in DIR is about")
    parser.set_defaults(run=run_command)


def seconds(text: str) -> float:
    """A time that ends, for argparse."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def main(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand; what keeps it from its end is missing evidence, and never a failed product."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the output's encoding lacks is printed escaped
    try:
        return int(arguments.run(arguments))
    except OSError as error:
        why = str(error)
    except Exception as error:
        traceback.print_exc()
        why = f"an error of its own: {type(error).__name__}: {error}"
    print(f"gefen-offload gate {arguments.action}: did not come to its end: {why}", file=sys.stderr)
    return INCOMPLETE


def run_command(arguments: argparse.Namespace) -> int:
    """Judge the checkout, or a foreign suite."""
    from gefen_offload.gate import run, rundir

    options = run.Options(
        run_dir=arguments.run_dir,
        tiers=tuple(arguments.tier),
        required=tuple(arguments.require),
        allow_dirty=arguments.allow_dirty,
        commit=arguments.commit,
        wheel=arguments.wheel,
        timeout=arguments.timeout,
        selftest=not arguments.no_selftest,
        performance=arguments.performance,
        part=tuple(arguments.only),
    )
    own = arguments.tests is None and arguments.mandatory is None and arguments.package is None
    wrong = own_problem(arguments) if own else foreign_problem(arguments)
    if wrong:
        print(f"gefen-offload gate run: {wrong}", file=sys.stderr)
        return USAGE
    listen()
    try:
        if own:
            return run.own(the_checkout(), options)
        suite = run.Foreign(arguments.tests.resolve(), arguments.mandatory.resolve(), arguments.package)
        return run.foreign(suite, options)
    except rundir.TakenError as error:
        print(f"gefen-offload gate run: --run-dir: {error}", file=sys.stderr)
        return USAGE


def listen() -> None:
    """Let signals end the run, but for one that whoever started it has chosen to ignore: nohup, a background job."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, ended)


def ended(number: int, frame: object) -> NoReturn:
    """A signal that ends the gate ends its sessions first, and leaves no verdict; no further one disturbs that."""
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # the terminal that hung up
        print("gefen-offload gate: ended before its verdict; its sessions are ended too", file=sys.stderr)
    sys.exit(128 + number)


def own_problem(arguments: argparse.Namespace) -> str:
    """What is wrong with the arguments for this checkout; empty if nothing."""
    root = the_checkout()
    if arguments.wheel and not Path(arguments.wheel).is_file():
        return f"--wheel {arguments.wheel}: there is no such file"
    if why := misplaced(arguments.run_dir, [root / name for name in checkout.DIGESTED]):
        return why
    if why := checkout.contradiction(root, arguments.commit):
        return why
    lists = manifest.load(root / "ci" / "mandatory")
    ids = [id for tier in arguments.tier or lists for id in lists.get(tier, ())]
    lost = [name for name in arguments.only if not any(manifest.within(id, (name,)) for id in ids)]
    if not lost:
        return ""
    tiers = f" of {', '.join(arguments.tier)}" if arguments.tier else ""
    return f"--only {lost[0]}: no mandatory test{tiers} is there; name a file or a test as ci/mandatory does"


def misplaced(run_dir: str | None, judged: Sequence[Path], own: Path | None = None) -> str:
    """Whether the evidence would go into what is judged; ``own`` is a folder of the gate's in there."""
    place = Path(run_dir or "/").resolve()
    inside = [folder for folder in judged if place.is_relative_to(folder.resolve())]
    if not inside or (own and place.is_relative_to(own)):
        return ""
    return f"--run-dir {run_dir}: it lies in {inside[0]}, which is judged; name a folder elsewhere"


def foreign_problem(arguments: argparse.Namespace) -> str:
    """What is wrong with the arguments for a foreign suite; empty if nothing."""
    from gefen_offload.gate import run

    if arguments.tests is None or arguments.mandatory is None:
        return "--tests DIR and --mandatory FILE belong together"
    if not arguments.tests.is_dir():
        return f"--tests {arguments.tests}: there is no such folder"
    if not arguments.mandatory.is_file():
        return f"--mandatory {arguments.mandatory}: there is no such file"
    tests = arguments.tests.resolve()
    if why := misplaced(arguments.run_dir, [tests], tests / ".gate"):
        return why
    if arguments.package and not run.package_files(arguments.package):
        return f"--package {arguments.package}: no file of such a package can be imported here"
    given = {
        "--tier": arguments.tier,
        "--only": arguments.only,
        "--wheel": arguments.wheel,
        "--commit": arguments.commit,
        "--with-performance": arguments.performance,
    }
    if any(given.values()):
        ours = ", ".join(name for name, value in given.items() if value)
        return f"{ours}: for this checkout alone; another project's suite (--tests) runs whole, as it is installed"
    return ""


def show_command(arguments: argparse.Namespace) -> int:
    """Decide a kept run again; a verdict that does not follow from its evidence is incomplete evidence."""
    from gefen_offload.gate import report, rundir, summary

    try:
        evidence = rundir.load(arguments.run_dir)
        verdict = evidence.verdict()
        strange = rundir.strange(arguments.run_dir, evidence, verdict)
    except Exception as error:  # whatever is wrong with it, it is no proof
        print(f"gefen-offload gate show: {arguments.run_dir} is no complete run directory: {error!r}", file=sys.stderr)
        return INCOMPLETE
    print(summary.text(verdict, str(arguments.run_dir)))
    if arguments.report:
        report.write(arguments.report, evidence, verdict)
    for name in strange:
        print(f"{name} does not follow from the evidence beside it")
    return INCOMPLETE if strange else int(verdict.status)


def selftest_command(arguments: argparse.Namespace) -> int:
    """Run the fault suite and print one line for each fault."""
    from gefen_offload.gate.selftest import run

    return run.main(arguments.only)


def drill_command(arguments: argparse.Namespace) -> int:
    """Run the regression drill."""
    from gefen_offload.gate import drill

    return drill.main(the_checkout(), arguments.recorded, arguments.keep)


def baseline_command(arguments: argparse.Namespace) -> int:
    """Make the baseline of a GPU model from a kept run's measurement, or look at how the baselines were committed."""
    from gefen_offload.gate import promotion

    if arguments.check:
        return check_baselines(the_checkout())
    try:
        path = promotion.promote(the_checkout(), arguments.update)
    except promotion.PromotionError as error:
        print(f"gefen-offload gate baseline: {arguments.update} makes no baseline: {error}", file=sys.stderr)
        return USAGE
    print(f"written: {path}, and beside it the report that it was made from; commit the two alone")
    return 0


def check_baselines(root: Path) -> int:
    """Say how the baselines were committed; UNFIT where there is no whole history that could tell."""
    from gefen_offload.gate import baseline

    try:
        if why := baseline.untold(root):
            print(f"baseline: how each was committed is not judged: {why}")
            return UNFIT
        wrong = baseline.mixed_commits(root)
    except checkout.GitError as error:
        print(f"baseline: how each was committed cannot be read: {error}")
        return INCOMPLETE
    for line in wrong:
        print(f"baseline: {line}")
    if not wrong:
        print("baseline: each was changed alone, with the report that it was made from, or there is none")
    return int(bool(wrong))


def the_checkout() -> Path:
    """The checkout, or an end with what to do."""
    root = checkout.root()
    if root is None:
        print("gefen-offload gate: run it from a checkout (./ci/gate)", file=sys.stderr)
        sys.exit(USAGE)
    return root


def manifest_command(arguments: argparse.Namespace) -> int:
    """Check or update the mandatory lists."""
    root = the_checkout()
    wrong = manifest.update(root) if arguments.update else manifest.check(root)
    for line in wrong[:200]:
        print(f"manifest: {line}")
    if wrong:
        print(f"manifest: {len(wrong)} things to put right")
        return 1
    sizes = {tier: len(ids) for tier, ids in manifest.load(root / "ci" / "mandatory").items()}
    print("manifest: " + ("written" if arguments.update else "the lists are exactly the collected tests"), sizes)
    return 0

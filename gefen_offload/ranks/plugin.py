"""The pytest plugin: tier markers, the `ranks` fixture, and the options of a run.

Every pytest run of an environment that has this package loads it, so it imports nothing that such a run would not have
anyway; the harness, and torch, are imported when a test first asks for ranks.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from gefen_offload.ranks.tier import TIERS, Tier

if TYPE_CHECKING:
    from gefen_offload.ranks.artifacts import Record
    from gefen_offload.ranks.attach import Attached, Launch
    from gefen_offload.ranks.group import RankGroup
    from gefen_offload.ranks.inventory import Inventory
    from gefen_offload.ranks.run import Host, Options

_inventory_key: pytest.StashKey[Inventory] = pytest.StashKey()
_host_key: pytest.StashKey[Host] = pytest.StashKey()
_troubles_key: pytest.StashKey[list[str]] = pytest.StashKey()
_began_key: pytest.StashKey[float] = pytest.StashKey()
_launch_key: pytest.StashKey[Launch | None] = pytest.StashKey()
_attached_key: pytest.StashKey[Attached] = pytest.StashKey()


_LAUNCHERS = {"WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}  # see attach.LAUNCHERS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the harness."""
    group = parser.getgroup("ranks", "tests on several ranks")
    add = group.addoption
    add("--require-gpus", type=int, default=0, metavar="N", help="lacking up to N GPUs is an error, not a skip")
    add("--ranks-fresh", action="store_true", help="new rank processes for every test")
    add("--ranks-timeout", type=float, default=120.0, metavar="S", help="deadline of one run on ranks (default: 120 s)")
    add("--ranks-stall", type=float, default=None, metavar="S", help="a run without progress for S seconds is hung")
    add("--ranks-leaks", choices=("warn", "error"), default="warn", help="what a thread, file or group left behind is")
    add("--ranks-no-spare", action="store_true", help="keep no spare imported ranks after a failure")
    add("--ranks-lease-timeout", type=float, default=600.0, metavar="S", help="how long to wait for GPUs in use")
    add("--ranks-no-attach", action="store_true", help="spawn ranks also under torchrun, SLURM or MPI")
    add("--ranks-timing", action="store_true", help="say where the time of tests on ranks went")
    add("--ranks-artifacts", default=None, metavar="DIR", help="where failing tests leave a folder (default: .ranks)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The markers; under a launcher rank 0 alone writes a report's file."""
    for tier in TIERS.values():
        config.addinivalue_line("markers", f"{tier.name}: {tier.summary}")
    launch = config.stash[_launch_key] = _launched(config)
    if launch is not None and launch.rank != 0:
        config.option.xmlpath = None  # of --junitxml: one report for all ranks


def _launched(config: pytest.Config) -> Launch | None:
    """The launcher's ranks, if there are any and they are to be used; looked for without importing anything heavy."""
    if config.getoption("--ranks-no-attach") or not _LAUNCHERS & os.environ.keys():
        return None
    from gefen_offload.ranks.attach import launched

    return launched()


def tier_of(item: pytest.Item) -> Tier | None:
    """The tier that a test's marker names."""
    names = sorted({mark.name for mark in item.iter_markers() if mark.name in TIERS})
    if len(names) > 1:
        raise pytest.UsageError(f"{item.nodeid} has several tiers: {', '.join(names)}; a test has one")
    return TIERS[names[0]] if names else None


def _mistakes(items: list[pytest.Item]) -> Iterator[str]:
    """What is wrong with the markers of the tests that were selected."""
    for item in items:
        try:
            tier_of(item)
        except pytest.UsageError as error:
            yield str(error)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or refuse to skip, a test whose GPUs are not there."""
    item.stash[_began_key] = time.monotonic()
    tier = tier_of(item)
    launch = item.config.stash.get(_launch_key, None)
    if tier is not None and launch is not None and tier.world != launch.world:
        pytest.skip(f"needs {tier.world} ranks, the launcher started {launch.world}")
    if tier is None or not tier.gpus:
        return
    found = _inventory(item.config)
    needed = launch.local + 1 if launch else tier.gpus
    if len(found.gpus) >= needed:
        return
    why = f"needs {needed} GPU(s), found {len(found.gpus)}" + (f" ({found.problem})" if found.problem else "")
    required = item.config.getoption("--require-gpus")
    if tier.gpus <= required:
        pytest.fail(f"{why}, and --require-gpus {required} was given", pytrace=False)
    pytest.skip(why)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """The ranks that the test's marker asks for; see :class:`gefen_offload.ranks.RankGroup`."""
    tier = tier_of(request.node)
    if tier is None:
        pytest.fail(f"the fixture `ranks` needs a tier marker: one of {', '.join(TIERS)}", pytrace=False)
    if _attached_key in request.config.stash:
        yield from _attached_ranks(request.node, tier)
        return
    host = _host(request.node)
    try:
        yield _group(request.node, tier, host)
    finally:
        _finish(request.node, host)


def _attached_ranks(item: pytest.Item, tier: Tier) -> Iterator[RankGroup]:
    """The same on a launcher's ranks, of which this process is one."""
    from gefen_offload.ranks.attach_run import AttachedGroup
    from gefen_offload.ranks.run import Host

    attached = item.config.stash[_attached_key]
    host = item.stash[_host_key] = Host(item.nodeid, _skip)
    try:
        yield AttachedGroup(attached, _options(item, tier), host, tier.gpus)
    finally:
        if attached.over:
            item.session.shouldstop = "a rank is stuck, and a launcher's ranks cannot be replaced"
        _tell(item, host, [])


def _skip(reason: str) -> NoReturn:
    pytest.skip(reason)


def _host(item: pytest.Item) -> Host:
    from gefen_offload.ranks.harness import harness
    from gefen_offload.ranks.run import Host

    run = harness()
    run.spare = not item.config.getoption("--ranks-no-spare")
    run.lease_patience = item.config.getoption("--ranks-lease-timeout")
    item.stash[_host_key] = Host(item.nodeid, _skip, _said_by(item.config))
    return item.stash[_host_key]


def _group(item: pytest.Item, tier: Tier, host: Host) -> RankGroup:
    from gefen_offload.ranks.group import RankGroup

    return RankGroup(tier.world, _options(item, tier), host, tier.gpus)


def _options(item: pytest.Item, tier: Tier) -> Options:
    from gefen_offload.ranks.run import Options

    config = item.config
    simulated = tier.gpus > 0 and _inventory(config).simulated
    return Options(
        timeout=config.getoption("--ranks-timeout"),
        until=_cut_off(item),
        stall=config.getoption("--ranks-stall"),
        fresh=config.getoption("--ranks-fresh"),
        backend="gloo" if simulated else tier.backend,
        verbosity=max(0, config.get_verbosity()),
    )


def _finish(item: pytest.Item, host: Host) -> None:
    """What the test's runs proved goes to the item; what they left behind is told."""
    from gefen_offload.ranks.harness import harness

    host.close()
    troubles, harness().troubles = harness().troubles, []
    _tell(item, host, troubles)


def _tell(item: pytest.Item, host: Host, troubles: list[str]) -> None:
    item.user_properties.extend(("ranks", proof) for proof in host.proofs)
    left = f"{item.nodeid} left behind: {'; '.join(host.leaks)}"
    if host.leaks and item.config.getoption("--ranks-leaks") == "error":
        troubles.append(left)
    elif host.leaks:
        item.warn(pytest.PytestWarning(left))
    if troubles:
        pytest.fail("\n".join(troubles), pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failing test leaves its artifacts, and its report says where and how to run it again."""
    report = yield
    summary = getattr(call.excinfo and call.excinfo.value, "summary_of_ranks", None)
    crash = getattr(report.longrepr, "reprcrash", None)
    if summary is not None and crash is not None:
        crash.message = summary  # pytest's last lines have no room for the class and the test
    if (attached := item.config.stash.get(_attached_key, None)) is not None:
        _agree(attached, report)
    host = item.stash.get(_host_key, None)
    if report.failed and host is not None and host.records and (attached is None or attached.launch.rank == 0):
        report.sections.append(("ranks", _keep(item.config, item.nodeid, host.records, report.longreprtext)))
    return report


def _agree(attached: Attached, report: pytest.TestReport) -> None:
    """Under a launcher a phase passes if it passed on every rank, and rank 0 can tell what failed elsewhere."""
    from gefen_offload.ranks.attach import disagreement

    if attached.over:
        return
    text = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
    try:
        told = disagreement(attached.agree_on_phase(report.outcome, text if not report.passed else ""))
    except RuntimeError as error:
        attached.over = True
        told = f"rank 0 can no longer be reached: {error}"
    if told and report.failed:
        report.sections.append(("ranks", told))
    elif told:
        report.outcome, report.longrepr = "failed", told


def _keep(config: pytest.Config, test: str, records: Sequence[Record], text: str) -> str:
    """Write the artifacts of a failing test; what to say of them."""
    from gefen_offload.ranks import artifacts

    base = Path(config.getoption("--ranks-artifacts") or config.rootpath / ".ranks")
    command = artifacts.rerun_command(config.rootpath, test)
    try:
        return f"artifacts: {artifacts.write(base, test, records, text, command)}\nrun again: {command}"
    except OSError as error:
        return f"artifacts: none, {error}\nrun again: {command}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Two tiers are a usage error. Under a launcher only tests on ranks run: every process would run the others too."""
    if mistakes := list(_mistakes(items)):
        raise pytest.UsageError("\n".join(mistakes))
    if config.stash.get(_launch_key, None) is not None:
        others = [item for item in items if tier_of(item) is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if tier_of(item) is not None]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Under a launcher: join the others, and go on only if all have collected the same."""
    launch = session.config.stash.get(_launch_key, None)
    if launch is None or not session.items or session.config.getoption("collectonly"):
        return
    from gefen_offload.ranks.attach import Attached

    keep = functools.partial(_keep, session.config)
    attached = session.config.stash[_attached_key] = Attached(launch, _said_by(session.config), keep)
    difference = attached.agree_on([item.nodeid for item in session.items])
    if difference is not None:
        attached.meet("disagreed", 10)
        pytest.exit(f"the ranks collected different tests: {difference}", pytest.ExitCode.USAGE_ERROR)


def _said_by(config: pytest.Config) -> Callable[[str], None]:
    """How to say something while a test is captured that will have no report."""

    def say(text: str) -> None:
        capture = config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        sys.stdout.write(f"\n{text}\n")
        sys.stdout.flush()

    return say


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Under a launcher rank 0 alone reports, on the terminal and in files."""
    launch = session.config.stash.get(_launch_key, None)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if launch is not None and launch.rank != 0 and reporter is not None:
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End every rank; one that had died unasked since its last test fails the session."""
    module = sys.modules.get("gefen_offload.ranks.harness")
    troubles = module.close() if module is not None else []
    if troubles:
        session.config.stash[_troubles_key] = troubles
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if hasattr(session.config, "workerinput"):
            print("\n".join(troubles), file=sys.__stderr__)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what died after the last test."""
    for trouble in config.stash.get(_troubles_key, []):
        terminalreporter.section("ranks", red=True)
        terminalreporter.line(trouble)
    if config.getoption("--ranks-timing"):
        from gefen_offload.ranks.timing import table

        terminalreporter.section("time of tests on ranks, in milliseconds")
        reports = [r for group in terminalreporter.stats.values() for r in group if isinstance(r, pytest.TestReport)]
        terminalreporter.write("\n".join([*table(reports), ""]))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what a session that never finished has left; under a launcher leave together, when all is reported."""
    if _attached_key in config.stash:
        config.stash[_attached_key].close()
    module = sys.modules.get("gefen_offload.ranks.harness")
    if module is not None:
        module.close()


def _inventory(config: pytest.Config) -> Inventory:
    if _inventory_key not in config.stash:
        from gefen_offload.ranks.inventory import inventory

        config.stash[_inventory_key] = inventory()
    return config.stash[_inventory_key]


def _cut_off(item: pytest.Item) -> float | None:
    """When runs must be over, so that a hang is explained before pytest-timeout cuts the test off."""
    if not item.config.pluginmanager.hasplugin("timeout"):
        return None
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        limit = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    else:
        limit = item.config.getoption("timeout", None) or item.config.getini("timeout")
    return item.stash[_began_key] + 0.8 * float(limit) if limit and float(limit) > 0 else None

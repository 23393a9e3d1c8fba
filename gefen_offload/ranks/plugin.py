"""The pytest plugin: tier markers, the `ranks` fixture, and the options of a run.

Every pytest run of an environment that has this package loads it, so it imports nothing that such a run would not have
anyway; the harness, and torch, are imported when a test first asks for ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from gefen_offload.ranks.tier import TIERS, Tier

if TYPE_CHECKING:
    from gefen_offload.ranks.group import Host, RankGroup
    from gefen_offload.ranks.inventory import Inventory


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the harness."""
    group = parser.getgroup("ranks", "tests on several ranks")
    group.addoption(
        "--require-gpus",
        type=int,
        default=0,
        metavar="N",
        help="tests that need up to N GPUs and lack them are errors",
    )
    group.addoption("--ranks-fresh", action="store_true", help="new rank processes for every test")
    group.addoption(
        "--ranks-timeout", type=float, default=120.0, metavar="S", help="deadline of one run on ranks (default 120 s)"
    )
    group.addoption(
        "--ranks-stall", type=float, default=None, metavar="S", help="a run without any progress for S seconds is hung"
    )
    group.addoption(
        "--ranks-leaks",
        choices=("warn", "error"),
        default="warn",
        help="what a thread, file or group left behind is",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The markers."""
    for tier in TIERS.values():
        config.addinivalue_line("markers", f"{tier.name}: {tier.summary}")


def tier_of(item: pytest.Item) -> Tier | None:
    """The tier that a test's marker names; a usage error if there are two."""
    names = sorted({mark.name for mark in item.iter_markers() if mark.name in TIERS})
    if len(names) > 1:
        raise pytest.UsageError(f"{item.nodeid} has several tiers: {', '.join(names)}; a test has one")
    return TIERS[names[0]] if names else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or refuse to skip, a test whose GPUs are not there."""
    tier = tier_of(item)
    if tier is None or not tier.gpus:
        return
    found = _inventory(item.config)
    if len(found.gpus) >= tier.gpus:
        return
    why = f"needs {tier.gpus} GPU(s), found {len(found.gpus)}" + (f" ({found.problem})" if found.problem else "")
    if tier.gpus <= item.config.getoption("--require-gpus"):
        pytest.fail(f"{why}, and --require-gpus {item.config.getoption('--require-gpus')} was given", pytrace=False)
    pytest.skip(why)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """The ranks that the test's marker asks for; see :class:`gefen_offload.ranks.RankGroup`."""
    tier = tier_of(request.node)
    if tier is None:
        pytest.fail(f"the fixture `ranks` needs a tier marker: one of {', '.join(TIERS)}", pytrace=False)
    host = _host(request.node)
    try:
        yield _group(request.node, tier, host)
    finally:
        _finish(request.node, host)


def _host(item: pytest.Item) -> Host:
    from gefen_offload.ranks.group import Host

    def skip(reason: str) -> Any:
        pytest.skip(reason)

    return Host(item.nodeid, _devices(item.config), skip)


def _group(item: pytest.Item, tier: Tier, host: Host) -> RankGroup:
    from gefen_offload.ranks.group import Options, RankGroup

    config = item.config
    simulated = tier.gpus and _inventory(config).simulated
    options = Options(
        timeout=_within_pytest_timeout(item, config.getoption("--ranks-timeout")),
        stall=config.getoption("--ranks-stall"),
        fresh=config.getoption("--ranks-fresh"),
        backend="gloo" if simulated else tier.backend,
        verbosity=max(0, config.get_verbosity()),
    )
    return RankGroup(tier.world, options, host, tier.gpus)


def _finish(item: pytest.Item, host: Host) -> None:
    """What the test's runs proved goes to the item; what they left behind is told."""
    from gefen_offload.ranks.harness import harness

    host.close()
    item.user_properties.extend(("ranks", proof) for proof in host.proofs)
    troubles, harness().troubles = harness().troubles, []
    if host.leaks and item.config.getoption("--ranks-leaks") == "error":
        troubles.append(f"{item.nodeid} left behind: {'; '.join(host.leaks)}")
    elif host.leaks:
        item.warn(pytest.PytestWarning(f"{item.nodeid} left behind: {'; '.join(host.leaks)}"))
    if troubles:
        pytest.fail("\n".join(troubles), pytrace=False)


def _devices(config: pytest.Config) -> Any:
    def devices(count: int) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in _inventory(config).gpus[:count])

    return devices


_inventory_key = pytest.StashKey["Inventory"]()


def _inventory(config: pytest.Config) -> Inventory:
    if _inventory_key not in config.stash:
        from gefen_offload.ranks.inventory import inventory

        config.stash[_inventory_key] = inventory()
    return config.stash[_inventory_key]


def _within_pytest_timeout(item: pytest.Item, seconds: float) -> float:
    """Our deadline comes before pytest-timeout's, so that a hang is explained before the test is cut off."""
    mark = item.get_closest_marker("timeout")
    limits = [*(mark.args if mark else ()), mark.kwargs.get("timeout") if mark else None]
    if not mark and item.config.pluginmanager.hasplugin("timeout"):
        limits = [item.config.getoption("timeout", None) or item.config.getini("timeout")]
    given = [float(limit) for limit in limits if limit not in (None, "")]
    return min(seconds, 0.8 * given[0]) if given and given[0] > 0 else seconds


def pytest_unconfigure() -> None:
    """End every rank."""
    import sys

    module = sys.modules.get("gefen_offload.ranks.harness")
    if module is not None:
        module.close()

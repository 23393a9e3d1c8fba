"""Two machines on one: two network namespaces joined by a cable, or the loopback where that is not allowed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """How to run a command there, and the address that others reach it under."""

    prefix: list[str]
    address: str
    environ: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Separate network stacks if this process may make them."""
    names = [f"ranks{os.getpid()}{end}" for end in "ab"]
    if not _join(names):
        yield Machine([], "127.0.0.1"), Machine([], "127.0.0.1")
        return
    try:
        made = [
            Machine(["ip", "netns", "exec", n], f"10.77.0.{i}", {"GLOO_SOCKET_IFNAME": n}) for i, n in _numbered(names)
        ]
        yield made[0], made[1]
    finally:
        for name in names:
            _ip("netns", "delete", name)


def free_port() -> int:
    """A port that was free a moment ago; a launcher wants to be told one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _numbered(names: list[str]) -> list[tuple[int, str]]:
    return list(enumerate(names, start=1))


def _join(names: list[str]) -> bool:
    """Two namespaces and a pair of interfaces between them; False, and nothing made, without the privileges."""
    if shutil.which("ip") is None or not all(_ip("netns", "add", name) for name in names):
        for name in names:
            _ip("netns", "delete", name)
        return False
    done = _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
    for number, name in _numbered(names):
        done = done and _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", name)
        done = done and _ip("-n", name, "link", "set", name, "up") and _ip("-n", name, "link", "set", "lo", "up")
    if not done:
        for name in names:
            _ip("netns", "delete", name)
    return done


def _ip(*arguments: str) -> bool:
    if shutil.which("ip") is None:
        return False
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0

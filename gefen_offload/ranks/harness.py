"""One run's rank processes: the pools, the store they meet at, the leases, the spare ranks, the reaper.

There is one harness per parent process, made when the first rank is needed and closed when the run ends.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gefen_offload.ranks.inventory import Inventory, inventory
from gefen_offload.ranks.kill import end
from gefen_offload.ranks.outcome import Outcome
from gefen_offload.ranks.pool import Key, Pool
from gefen_offload.ranks.process import RankProcess, boot_of
from gefen_offload.ranks.reaper import Reaper
from gefen_offload.ranks.wire import Join

if TYPE_CHECKING:
    from gefen_offload.ranks.lease import Lease

BOOT_PATIENCE = 180.0
IDLE_POOLS = 2  # more than this many pools of healthy ranks are not kept


@dataclass
class Harness:
    """Everything that must be given back."""

    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    pools: dict[Key, Pool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="gefen-ranks-"))
        self._reaper = Reaper(self.token)
        self._reaper.record_folder(self.folder)
        self._store: Any = None
        self._names = itertools.count()
        self._spares: list[RankProcess] = []
        self._leases: dict[Pool, Lease] = {}
        self._inventory: Inventory | None = None
        self.troubles: list[str] = []  # between tests: to be reported by whoever asks next
        self.retired = 0
        atexit.register(self.close)

    # pools

    def pool(self, key: Key, fresh: bool = False, faults: Sequence[Any] = ()) -> tuple[Pool, list[Outcome]]:
        """A pool that has joined its group, and the outcomes of its joining if it had to be made now."""
        pool = None if fresh else self.pools.get(key)
        if pool is not None and (dead := pool.dead()):
            self.troubles.append(
                f"between tests: {'; '.join(dead)} ({key}), after {pool.last_test}; the pool was replaced"
            )
            self.retire(pool)
            pool = None
        if pool is not None:
            return pool, []
        return self._make(key, fresh, faults)

    def _make(self, key: Key, fresh: bool, faults: Sequence[Any]) -> tuple[Pool, list[Outcome]]:
        self._make_room(keep=key)
        processes = self._processes(key)
        store = self._address() if key.backend is not None else None
        prefix = f"{self.token}/{next(self._names)}"
        simulated = self.inventory().simulated if key.devices else False
        joins = [
            Join(r, key.world, key.backend, key.devices, simulated, store, prefix, BOOT_PATIENCE, tuple(faults))
            for r in range(key.world)
        ]
        pool = Pool(key, processes, joins)
        if not fresh:
            self.pools[key] = pool
        return pool, self._joined(pool)

    def _joined(self, pool: Pool) -> list[Outcome]:
        try:
            return pool.join(BOOT_PATIENCE)
        except BaseException:
            self.retire(pool)
            raise

    def retire(self, pool: Pool) -> None:
        """Kill, reap, forget: nothing is destroyed politely."""
        self.retired += 1
        self.pools = {key: other for key, other in self.pools.items() if other is not pool}
        self._end(pool.processes)
        lease = self._leases.pop(pool, None)
        if lease is not None:
            lease.release()

    def _make_room(self, keep: Key) -> None:
        """Retire the longest idle pools beyond the limit."""
        idle = sorted((p for k, p in self.pools.items() if k != keep), key=lambda p: p.used)
        for pool in idle[: max(0, len(idle) - IDLE_POOLS + 1)]:
            self.retire(pool)

    # processes

    def _processes(self, key: Key) -> list[RankProcess]:
        return [self._spawn(key) for _ in range(key.world)]

    def _spawn(self, key: Key) -> RankProcess:
        threads = max(1, (os.cpu_count() or 1) // key.world)
        boot = boot_of(self.folder, f"p{next(self._names)}", threads, key.backend is not None)
        process = RankProcess(boot, self.token)
        self._reaper.record(process.member)
        return process

    def _end(self, processes: Iterable[RankProcess]) -> None:
        """Kill the processes and all that came of them, except what belongs to other pools."""
        ended = list(processes)
        left = end([p.member for p in ended], [p.token for p in ended])
        for process in ended:
            process.reap()
            self._reaper.forget(process.member)
        if left:
            self.troubles.append(f"processes {left} could not be killed")

    # the store

    def _address(self) -> tuple[str, int]:
        """The store that all groups of this run meet at; the kernel chose its port, and it stays ours."""
        if self._store is None:
            from datetime import timedelta

            from torch._C._distributed_c10d import TCPStore

            self._store = TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
        return "127.0.0.1", int(self._store.port)

    def prefix(self) -> str:
        """A key prefix that no group has had."""
        return f"{self.token}/{next(self._names)}"

    def inventory(self) -> Inventory:
        if self._inventory is None:
            self._inventory = inventory()
        return self._inventory

    def close(self) -> None:
        """Give everything back; harmless when it was done, and in a forked child."""
        if os.getpid() != self._pid or not self.folder.exists():
            return
        for pool in list(self.pools.values()):
            self.retire(pool)
        self._end(self._spares)
        self._reaper.close()
        self._store = None
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)
        atexit.unregister(self.close)


_current: list[Harness] = []


def harness() -> Harness:
    """This process's harness, made on first use."""
    if not _current or _current[0]._pid != os.getpid():
        _current[:] = [Harness()]
    return _current[0]


def close() -> None:
    """End this process's harness if there is one."""
    for one in _current:
        one.close()
    _current.clear()

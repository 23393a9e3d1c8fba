"""One run's rank processes: its pools, the store they meet at, the spare ranks, the leases, the reaper.

There is one harness per parent process, made when the first rank is needed and closed when the run ends.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gefen_offload.ranks import lease as leasing
from gefen_offload.ranks.inventory import Inventory, inventory
from gefen_offload.ranks.kill import end
from gefen_offload.ranks.outcome import Outcome
from gefen_offload.ranks.pool import Key, Pool
from gefen_offload.ranks.process import RankProcess, boot_of
from gefen_offload.ranks.reaper import Reaper
from gefen_offload.ranks.wire import Join

BOOT_PATIENCE = 180.0
LEASE_PATIENCE = 600.0
MOST_SPARES = 4  # pools that spare ranks are kept for
IDLE_POOLS = 2  # beside the one in use; the longest idle is retired first
LOOK = 0.3  # seconds between looks at whether another run waits for a GPU that we hold idle


@dataclass(eq=False)
class Harness:
    """Everything that must be given back. Its lock guards the pools: a watching thread retires idle ones."""

    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    spare: bool = True
    lease_patience: float = LEASE_PATIENCE

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.gettempdir()) / f"gefen-ranks-{self.token}"
        self.troubles: list[str] = []  # found between tests, for whoever reports next
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._reaper = Reaper(self.token, self.folder)
        self.folder.mkdir(mode=0o700)  # after the reaper: who is killed between the two leaves nothing
        self._pools: list[Pool] = []
        self._spares: list[RankProcess] = []
        self._names = itertools.count()
        self._store: Any = None
        self._inventory: Inventory | None = None
        self._watch: threading.Thread | None = None
        self._closed = threading.Event()
        atexit.register(self.close)

    # pools

    def take(
        self, key: Key, patience: float = BOOT_PATIENCE, fresh: bool = False, faults: Sequence[Any] = ()
    ) -> tuple[Pool, list[Outcome]]:
        """A pool in use by the caller until `give` or `retire`, and the outcomes of joining if it was made now.

        `patience`: seconds that new ranks have to join. `fresh`: new ones, that nobody else will get.
        """
        if not fresh:
            with self._lock:
                pool = self._idle(key)
                if pool is not None:
                    pool.busy = True
                    return pool, []
        pool = self._make(key, fresh, faults)
        try:
            return pool, pool.join(patience)
        except BaseException:
            self.retire(pool)
            raise

    def give(self, pool: Pool) -> None:
        """The caller is done with the pool for now."""
        with self._lock:
            pool.busy = False

    def retire(self, pool: Pool, refill: bool = False) -> None:
        """Kill, reap, forget: nothing is destroyed politely. `refill`: make spare ranks, a pool will be wanted."""
        with self._lock:
            if pool not in self._pools:
                return
            self._pools.remove(pool)
            pool.retired = True
            self._end(pool.processes)
            if pool.lease is not None:
                pool.lease.release()
            if refill and self.spare and pool.key.backend is not None:
                missing = pool.key.world * _spare_sets() - len(self._spares)
                self._spares += [self._spawn(True) for _ in range(missing)]

    def _idle(self, key: Key) -> Pool | None:
        for pool in [p for p in self._pools if p.key == key and not p.busy and not p.private]:
            dead = pool.dead()
            if not dead:
                return pool
            self.troubles.append(
                f"between tests: {'; '.join(dead)} ({key}) after {pool.last_test} had passed; the pool was replaced"
            )
            self.retire(pool)
        return None

    def _make(self, key: Key, fresh: bool, faults: Sequence[Any]) -> Pool:
        lease = self._lease(key.gpus) if key.gpus else None
        with self._lock:
            self._make_room()
            processes = [self._process(key) for _ in range(key.world)]  # they import torch while we do
            try:
                join = self._invitation(key, lease.devices if lease is not None else (), faults)
            except BaseException:
                self._end(processes)
                if lease is not None:
                    lease.release()
                raise
            pool = Pool(key, processes, join, lease, private=fresh)
            self._pools.append(pool)
            return pool

    def _invitation(self, key: Key, devices: tuple[str, ...], faults: Sequence[Any]) -> Join:
        return Join(
            rank=0,
            world=key.world,
            backend=key.backend,
            devices=devices,
            simulated=bool(devices) and self.inventory().simulated,
            store=self._address() if key.backend is not None else None,
            prefix=self.prefix(),
            timeout=BOOT_PATIENCE,
            threads=_threads(),
            faults=tuple(faults),
        )

    def _make_room(self) -> None:
        idle = sorted((p for p in self._pools if not p.busy and not p.private), key=lambda p: p.used)
        for pool in idle[: max(0, len(idle) - IDLE_POOLS)]:
            self.retire(pool)

    # leases

    def _lease(self, count: int) -> leasing.Lease:
        candidates = [gpu.uuid for gpu in self.inventory().gpus]
        lease = leasing.acquire(candidates, count, self.lease_patience, self._let_go)
        self._reaper.hold(lease)
        if self._watch is None:
            self._watch = threading.Thread(target=self._yield_idle, name="ranks-lease-watch", daemon=True)
            self._watch.start()
        return lease

    def _let_go(self) -> None:
        """Retire our own idle pools that hold GPUs."""
        with self._lock:
            for pool in self._idle_with_lease():
                self.retire(pool, refill=True)

    def _idle_with_lease(self) -> list[Pool]:
        return [p for p in self._pools if p.lease is not None and not p.busy and not p.private]

    def _yield_idle(self) -> None:
        """The watching thread: an idle lease that another run waits for is given back."""
        while not self._closed.wait(LOOK):
            with self._lock:
                for pool in self._idle_with_lease():
                    if leasing.wanted(pool.lease.devices if pool.lease else ()):
                        self.retire(pool, refill=True)

    # processes

    def _process(self, key: Key) -> RankProcess:
        """The oldest living spare rank, which has imported most, if one fits; else a new one."""
        while self._spares and key.backend is not None:
            process = self._spares.pop(0)
            if process.exit_code() is None:
                return process
            self._end([process])
        return self._spawn(key.backend is not None)

    def _spawn(self, with_torch: bool) -> RankProcess:
        process = RankProcess(boot_of(self.folder, f"p{next(self._names)}", with_torch), self.token)
        self._reaper.record(process.member)
        return process

    def _end(self, processes: Iterable[RankProcess]) -> None:
        """Kill processes and all that came of them."""
        ended = list(processes)
        left = end([p.member for p in ended], [p.token for p in ended]) if ended else []
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

            with _interrupts_afterwards():
                from torch._C._distributed_c10d import TCPStore

            patience = timedelta(seconds=60)
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
        return "127.0.0.1", int(self._store.port)

    def prefix(self) -> str:
        """A key prefix that no group has had."""
        return f"{self.token}/{next(self._names)}"

    def inventory(self) -> Inventory:
        if self._inventory is None:
            self._inventory = inventory()
        return self._inventory

    @property
    def reaper_pid(self) -> int:
        return self._reaper.pid

    def close(self) -> None:
        """Give everything back; harmless when it was done, and in a forked child."""
        if os.getpid() != self._pid or self._closed.is_set():
            return
        self._closed.set()
        for pool in self._pools:
            if dead := pool.dead():
                self.troubles.append(f"after the last test: {'; '.join(dead)} ({pool.key}), last in {pool.last_test}")
        for pool in list(self._pools):
            self.retire(pool)
        self._end(self._spares)
        self._reaper.close()
        self._store = None
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)
        atexit.unregister(self.close)


def _threads() -> int:
    """Threads of a rank: what OMP_NUM_THREADS says, or one, as torchrun has it: ranks are many, their tensors small."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdigit() and int(given) > 0 else 1


def _spare_sets() -> int:
    """For how many pools there are spare ranks: one for every four cores, which pytest-xdist's workers share."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return min(MOST_SPARES, max(1, len(os.sched_getaffinity(0)) // (4 * workers)))


@contextlib.contextmanager
def _interrupts_afterwards() -> Iterator[None]:
    """Keep a Ctrl-C until the import of torch is done: inside, somebody else's `except` may swallow it."""
    if threading.current_thread() is not threading.main_thread() or "torch" in sys.modules:
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, None)


_current: list[Harness] = []


def harness() -> Harness:
    """This process's harness, made on first use."""
    if not _current or _current[0]._pid != os.getpid():
        _current[:] = [Harness()]
    return _current[0]


def close() -> list[str]:
    """End this process's harness if there is one; troubles that nobody has reported yet."""
    troubles: list[str] = []
    for one in _current:
        one.close()
        troubles += one.troubles
    _current.clear()
    return troubles

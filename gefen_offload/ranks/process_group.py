"""The default process group of a rank: entered once per pool, renewed on request, and watched while a body runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from gefen_offload.ranks import flight
from gefen_offload.ranks.outcome import Stage
from gefen_offload.ranks.page import StatusPage
from gefen_offload.ranks.wire import Join

if TYPE_CHECKING:
    from gefen_offload.ranks.faults import FaultPlan

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "isend",
    "irecv",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "batch_isend_irecv",
)


def enter(join: Join, stage: Callable[[str], None], page: StatusPage, store: Store | None) -> None:
    """Connect to the parent's store, unless there is one, and make the default group under this pool's prefix."""
    flight.switch_on()
    stage(Stage.STORE)
    _Connection.store = store if store is not None else _connect(join)
    stage(Stage.GROUP)
    _make(join, join.prefix)
    _Watch.page = page
    _watch_collectives()


def renew(join: Join, prefix: str) -> None:
    """Replace the default group, and with it every group made from it."""
    leave()
    _make(join, prefix)


def leave() -> None:
    """Destroy the groups of this rank, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_timeout(seconds: float) -> None:
    """Collectives of the default group give up after this long."""
    if dist.is_initialized():
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


@contextlib.contextmanager
def observed_by(plan: FaultPlan) -> Iterator[None]:
    """Collectives called through `torch.distributed` come to this plan first."""
    _Watch.plan = plan
    try:
        yield
    finally:
        _Watch.plan = None


class _Connection:
    store: Store | None = None


class _Watch:
    """What the wrapped collectives tell; one process, one watch."""

    page: StatusPage | None = None
    plan: FaultPlan | None = None
    depth = 0


def _connect(join: Join) -> Store:
    if join.store is None:
        raise RuntimeError("the parent sent no address of its store")
    host, port = join.store
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=join.timeout))


def _make(join: Join, prefix: str) -> None:
    if _Connection.store is None:
        raise RuntimeError("no store: the group was never entered")
    dist.init_process_group(
        join.backend,
        store=PrefixStore(prefix, _Connection.store),
        rank=join.rank,
        world_size=join.world,
        timeout=timedelta(seconds=join.timeout),
    )
    if join.backend == "nccl":  # NCCL connects at the first collective: that belongs to the setup, not to a test
        dist.all_reduce(torch.ones(1, device=torch.device("cuda", join.gpu)))
        torch.cuda.synchronize()


def _watch_collectives() -> None:
    for name in COLLECTIVES:
        original = getattr(distributed_c10d, name, None)
        if original is None or hasattr(original, "_ranks_watched"):
            continue
        watched = _watched(name, original)
        setattr(distributed_c10d, name, watched)
        if getattr(dist, name, None) is original:
            setattr(dist, name, watched)


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, with its entry and exit on the status page; one that another one calls is not counted."""

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if _Watch.depth or _Watch.page is None:
            return original(*args, **kwargs)
        if _Watch.plan is not None:
            _Watch.plan.at_collective(name, _tensors((*args, *kwargs.values())))
        _Watch.page.enter(name)
        _Watch.depth += 1
        try:
            answer = original(*args, **kwargs)
        finally:
            _Watch.depth -= 1
        _Watch.page.leave()  # not in the finally: a collective that raised was never left
        return answer

    watched._ranks_watched = True  # type: ignore[attr-defined]
    return watched


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found

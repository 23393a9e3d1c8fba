"""What the rank harness costs: warm dispatch, boot, and failure, against a new set of processes for every test."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gefen_offload.ranks import RankContext, RankFailure, RankGroup
from gefen_offload.ranks import faults as fault
from gefen_offload.ranks.harness import close
from gefen_offload.ranks.run import Options


@dataclass(frozen=True)
class Timing:
    """Times of one thing, in milliseconds."""

    what: str
    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def __str__(self) -> str:
        last = sorted(self.times)[int(0.95 * (len(self.times) - 1))]
        return f"{self.what:<58} {self.median:>10.2f} {min(self.times):>10.2f} {last:>10.2f} {len(self.times):>5}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gefen-offload bench ranks`."""
    parser.add_argument("--world", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default=None, help="default: nccl if there are GPUs")
    parser.add_argument("--repeat", type=int, default=200, help="warm dispatches (default 200)")
    parser.add_argument("--warm-up", type=int, default=20, help="warm dispatches before them (default 20)")
    parser.add_argument(
        "--boots", type=int, default=None, help="boots, failures and processes per test (default 5, 1 on NCCL)"
    )
    parser.add_argument("--json", type=Path, default=None, help="also write every time to this file")


def main(args: argparse.Namespace) -> int:
    """Measure, then print one table; 0."""
    backend = args.backend or default_backend(args.world)
    group = RankGroup(args.world, Options(backend=backend), gpus=args.world if backend == "nccl" else 0)
    args.boots = args.boots or (1 if backend == "nccl" else 5)
    timings = measure(group, backend, args)
    print(f"{os.cpu_count()} cores, {backend}, world {args.world}")
    print(f"{'milliseconds':<58} {'median':>10} {'least':>10} {'95%':>10} {'n':>5}")
    print("\n".join(map(str, timings)))
    if args.json is not None:
        facts = {"cores": os.cpu_count(), "backend": backend, "world": args.world, "system": platform.platform()}
        args.json.write_text(json.dumps({**facts, "timings": [asdict(t) for t in timings]}, indent=1))
    return 0


def default_backend(world: int) -> str:
    """NCCL where there are enough GPUs."""
    from gefen_offload.ranks.inventory import inventory

    found = inventory()
    return "nccl" if len(found.gpus) >= world and not found.simulated else "gloo"


def measure(group: RankGroup, backend: str, args: argparse.Namespace) -> list[Timing]:
    """All timings; what is being measured goes to the standard error."""
    jobs: list[tuple[str, Callable[[], float], int, int]] = [
        ("first test of a run (spawn, import, group)", lambda: boot(group), args.boots, 0),
        ("warm test, empty body", lambda: seconds(lambda: group.run(nothing)), args.repeat, args.warm_up),
        ("warm test, one all-reduce", lambda: seconds(lambda: group.run(reduce)), args.repeat, args.warm_up),
        ("raise to verdict, peer in an all-reduce", lambda: failure(group, fault.throw), args.boots, 0),
        ("kill to verdict, peer in an all-reduce", lambda: failure(group, fault.kill), args.boots, 0),
        ("test after a failure (spare ranks)", lambda: after_failure(group), args.boots, 0),
        ("process per test, one all-reduce", lambda: per_test(group.world, backend), args.boots, 0),
    ]
    timings = []
    for what, job, repeat, warm_up in jobs:
        print(f"{what}, {repeat} times ...", file=sys.stderr, flush=True)
        for _ in range(warm_up):
            job()
        timings.append(Timing(what, tuple(1000 * job() for _ in range(repeat))))
    close()
    return timings


def seconds(action: Callable[[], Any]) -> float:
    """How long the action takes."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def boot(group: RankGroup) -> float:
    """The first test of a run, from nothing; torch is imported in the parent already."""
    close()
    return seconds(lambda: group.run(reduce))


def failure(group: RankGroup, kind: Callable[..., fault.Fault]) -> float:
    """From the moment rank 1 fails to the verdict in the parent."""
    group.run(nothing)
    try:
        group.options(faults=[kind(1, fault.collective("all_reduce"))]).run(reduce)
    except RankFailure as error:
        if error.first is None or error.first.rank != 1:
            raise
        return time.monotonic() - error.first.ended / 1e9
    raise RuntimeError("the injected fault did not fail the run")


def after_failure(group: RankGroup) -> float:
    """The next test after a failure, some seconds later."""
    failure(group, fault.kill)
    time.sleep(4)
    return seconds(lambda: group.run(reduce))


def per_test(world: int, backend: str) -> float:
    """What a test costs that starts its own processes: spawn, import, group, all-reduce, destroy, exit."""
    return seconds(lambda: _spawn_and_join(world, backend))


def _spawn_and_join(world: int, backend: str) -> None:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_whole_life, args=(r, world, backend, store.port)) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    codes: Sequence[int | None] = [process.exitcode for process in ranks]
    if any(codes):
        raise RuntimeError(f"the processes of a test ended with {codes}")


def _whole_life(rank: int, world: int, backend: str, port: int) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    dist.all_reduce(torch.ones(1, device=device))
    if backend == "nccl":
        torch.cuda.synchronize()
    dist.destroy_process_group()


def nothing(context: RankContext) -> None:
    """Worker: an empty body."""


def reduce(context: RankContext) -> float:
    """Worker: one all-reduce of one number."""
    import torch
    import torch.distributed as dist

    value = torch.ones(1, device=context.device)
    dist.all_reduce(value)
    return float(value)

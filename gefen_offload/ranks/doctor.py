"""Is this machine fit for ranks? Facts, problems, and a two-rank smoke test: `python -m gefen_offload.ranks doctor`."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from gefen_offload.ranks import inventory as gpus
from gefen_offload.ranks.context import RankContext

MIN_SHM = 1 << 30
MIN_FILES = 1024
MIN_PROCESSES = 256
LEASE_PATIENCE = 20.0  # seconds to wait for GPUs that another run holds


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer; `fit` is None for a mere fact."""

    what: str
    found: str
    fit: bool | None = None
    advice: str = ""

    def __str__(self) -> str:
        sign = {True: "ok  ", False: "BAD ", None: "    "}[self.fit]
        return f"{sign} {self.what}: {self.found}" + (f" -- {self.advice}" if self.fit is False else "")


def examine(smoke: bool = True) -> list[Finding]:
    """Everything the doctor looks at."""
    findings = [*_python(), *_limits(), *_space(), *_gpus()]
    return [*findings, *_smoke()] if smoke else findings


def main(smoke: bool = True) -> int:
    """Print the findings; 0 if the machine is fit."""
    findings = examine(smoke)
    for finding in findings:
        print(finding)
    bad = [f for f in findings if f.fit is False]
    print(f"{len(bad)} problem(s)" if bad else "fit")
    return 1 if bad else 0


def _python() -> list[Finding]:
    torch = importlib.util.find_spec("torch")
    return [
        Finding("python", sys.version.split()[0], sys.version_info >= (3, 10), "3.10 or later is needed"),
        Finding("platform", sys.platform, sys.platform == "linux", "the harness needs Linux"),
        Finding("torch", "installed" if torch else "missing", torch is not None, "pip install torch"),
        Finding("pidfd_open", str(hasattr(os, "pidfd_open")), _pidfd(), "Linux 5.3 or later is needed"),
        Finding("cores", str(os.cpu_count())),
    ]


def _pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _limits() -> list[Finding]:
    files, processes = (resource.getrlimit(r)[0] for r in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    return [
        Finding("open files", _limit(files), _enough(files, MIN_FILES), f"ulimit -n {MIN_FILES} or more"),
        Finding("processes", _limit(processes), _enough(processes, MIN_PROCESSES), f"ulimit -u {MIN_PROCESSES}"),
    ]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _enough(value: int, least: int) -> bool:
    return value == resource.RLIM_INFINITY or value >= least


def _space() -> list[Finding]:
    findings = []
    for path in ("/dev/shm", tempfile.gettempdir()):
        if not os.path.isdir(path):
            findings.append(Finding(path, "missing", False, "NCCL and torch keep shared memory there"))
            continue
        free = shutil.disk_usage(path).free
        advice = f"{MIN_SHM >> 20} MiB free is little enough (docker run --shm-size=8g)"
        findings.append(Finding(path, f"{free >> 20} MiB free", free >= MIN_SHM and os.access(path, os.W_OK), advice))
    return findings


def _gpus() -> list[Finding]:
    found = gpus.inventory()
    findings = [Finding("GPUs", f"{len(found.gpus)}" + (f" ({found.problem})" if found.problem else ""))]
    for gpu in found.gpus:
        memory = f"{gpu.memory_used} of {gpu.memory_total} MiB in use"
        findings.append(Finding(f"GPU {gpu.index}", f"{gpu.name}, {gpu.uuid}, driver {gpu.driver}, {memory}"))
    for process in gpus.processes() if found.gpus else ():
        findings.append(Finding("GPU process", f"{process.pid} ({process.name}) on {process.gpu}"))
    return findings


def _smoke() -> list[Finding]:
    """An all-reduce of a known value on two CPU ranks, and on two GPUs where there are two."""
    from gefen_offload.ranks.group import RankGroup
    from gefen_offload.ranks.run import Options

    groups = {"smoke, 2 ranks, Gloo": RankGroup(2)}
    count = len(gpus.inventory().gpus)
    if count and not gpus.inventory().simulated:
        world = min(2, count)
        groups[f"smoke, {world} GPU(s), NCCL"] = RankGroup(world, Options(backend="nccl"), gpus=world)
    return [_one_smoke(name, group) for name, group in groups.items()]


def _one_smoke(name: str, group: Any) -> Finding:
    from gefen_offload.ranks import harness
    from gefen_offload.ranks.lease import LeaseTimeoutError
    from gefen_offload.ranks.outcome import RankFailure

    harness.harness().lease_patience = LEASE_PATIENCE
    try:
        result = group.run(known_sum)
    except (RankFailure, LeaseTimeoutError) as failure:
        return Finding(name, "failed", False, str(failure))
    finally:
        harness.close()
    right = result.values == [sum(range(1, group.world + 1))] * group.world
    return Finding(name, f"{result.values} in {result.seconds:.2f} s", right, "the sum is wrong")


def known_sum(context: RankContext) -> float:
    """Worker: the sum of rank + 1 over the ranks."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(context.rank + 1), device=context.device)
    dist.all_reduce(value)
    return float(value)

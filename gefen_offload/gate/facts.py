"""What the machine, the software and the source were, before a run and after it; read without initialising CUDA."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gefen_offload.gate.checkout import Source
from gefen_offload.ranks import inventory

PROBE = """
import importlib.metadata, importlib.util, json, pathlib, runpy, sys
found = {"python": sys.version.split()[0], "torch": None}
spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin:
    version = runpy.run_path(str(pathlib.Path(spec.origin).with_name("version.py")))
    found.update(torch=version["__version__"], cuda=version["cuda"])
    if version["cuda"]:
        import torch
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
try:
    found["triton"] = importlib.metadata.version("triton")
except importlib.metadata.PackageNotFoundError:
    pass
print(json.dumps(found))
"""
"""Reads versions without importing torch, except for a CUDA build, whose NCCL only torch can name."""


@dataclass(frozen=True)
class Gpu:
    """One physical GPU, as the driver names it."""

    uuid: str
    name: str
    driver: str
    free_mib: int
    total_mib: int


@dataclass(frozen=True)
class Software:
    """The versions that decide bits and times; None for what is absent."""

    python: str
    torch: str | None
    cuda: str | None = None
    nccl: str | None = None
    triton: str | None = None


@dataclass(frozen=True)
class Wheel:
    """The wheel under judgement and the folder into which it alone was installed."""

    name: str
    sha256: str
    site: str
    files: Mapping[str, str]
    """SHA-256 of each installed file, by its path below ``site``, read from disk."""
    differs: tuple[str, ...] = ()
    """Files, and lines of metadata, that are not the same in the wheel and in the checkout."""


@dataclass(frozen=True)
class Facts:
    """One reading of everything that a verdict depends on and that a test cannot know."""

    gpus: tuple[Gpu, ...]
    foreign: tuple[str, ...]
    """Processes that hold a GPU and that this run did not start."""
    software: Software
    source: Source | None
    wheel: Wheel | None
    package: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For a foreign suite: SHA-256 of each file of the judged package, by its absolute path."""
    cores: int = 1
    host: str = ""
    topology: str = ""
    smoke: str | None = None
    """None where the smoke all-reduce gave the known value or was not due; else what went wrong."""


def gather(python: str, source: Source | None, wheel: Wheel | None, package: Mapping[str, str] | None = None) -> Facts:
    """Read the machine and the interpreter that the sessions will use."""
    present = gpus()
    return Facts(
        gpus=present,
        foreign=foreign_processes(present),
        software=software(python),
        source=source,
        wheel=wheel,
        package=package or {},
        cores=len(os.sched_getaffinity(0)),
        host=f"{platform.system()} {platform.release()} {platform.machine()}",
        topology=topology() if present else "",
    )


def gpus() -> tuple[Gpu, ...]:
    """The real GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES."""
    found = inventory.inventory({name: value for name, value in os.environ.items() if name != inventory.SIMULATED})
    return tuple(
        Gpu(gpu.uuid, gpu.name, gpu.driver, gpu.memory_total - gpu.memory_used, gpu.memory_total) for gpu in found.gpus
    )


def foreign_processes(mine: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Compute processes on these GPUs: before a run nobody's should be there, after it none of the run's."""
    uuids = {gpu.uuid for gpu in mine}
    return tuple(
        f"process {one.pid} ({one.name}) on {one.gpu}, {one.memory} MiB"
        for one in inventory.processes()
        if one.gpu in uuids
    )


def topology() -> str:
    """How the GPUs hang together, as nvidia-smi draws it; empty where it cannot say."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def software(python: str = sys.executable) -> Software:
    """The versions that the sessions' interpreter sees."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=300)
    if done.returncode:
        return Software(platform.python_version(), None)
    return Software(**json.loads(done.stdout.splitlines()[-1]))


def to_json(value: Any) -> Any:
    """Facts, findings and the like as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(entry) for entry in value]
    if hasattr(value, "value") and hasattr(value, "name"):
        return value.name
    return str(value) if isinstance(value, Path) else value


def from_json(data: Mapping[str, Any]) -> Facts:
    """Facts read back from ``facts.json``."""
    source, wheel = data["source"], data["wheel"]
    return Facts(
        gpus=tuple(Gpu(**gpu) for gpu in data["gpus"]),
        foreign=tuple(data["foreign"]),
        software=Software(**data["software"]),
        source=Source(**{**source, "dirty": tuple(source["dirty"])}) if source else None,
        wheel=Wheel(**{**wheel, "differs": tuple(wheel["differs"])}) if wheel else None,
        package=data["package"],
        cores=data["cores"],
        host=data["host"],
        topology=data["topology"],
        smoke=data["smoke"],
    )

"""The GPUs of this machine, counted without CUDA: UUIDs, names, driver, memory and who uses them."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SIMULATED = "GEFEN_RANKS_INVENTORY"  # a JSON file that stands in for the machine's GPUs; for tests of leases only
_PATIENCE = 60


@dataclass(frozen=True)
class Gpu:
    """One physical GPU; memory in MiB."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_total: int
    memory_used: int
    simulated: bool = False


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    gpu: str
    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Inventory:
    """The GPUs that the caller may use, in the order of CUDA_VISIBLE_DEVICES; `problem` says why there are none."""

    gpus: tuple[Gpu, ...]
    problem: str = ""

    @property
    def simulated(self) -> bool:
        return any(gpu.simulated for gpu in self.gpus)


def inventory(environ: Mapping[str, str] = os.environ) -> Inventory:
    """Ask `nvidia-smi`, or read the simulated inventory, and keep what CUDA_VISIBLE_DEVICES allows."""
    simulated = environ.get(SIMULATED)
    found = Inventory(_read_simulated(Path(simulated))) if simulated else _ask()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else Inventory(select(found.gpus, visible), found.problem)


def select(gpus: Sequence[Gpu], visible: str) -> tuple[Gpu, ...]:
    """The GPUs named by a CUDA_VISIBLE_DEVICES value (numbers or UUIDs); like CUDA, stop at the first unknown one."""
    chosen: list[Gpu] = []
    for word in (w.strip() for w in visible.split(",")):
        match = [g for g in gpus if (word.isdigit() and g.index == int(word)) or (word and g.uuid.startswith(word))]
        if len(match) != 1 or match[0] in chosen:
            break
        chosen.append(match[0])
    return tuple(chosen)


def processes() -> tuple[GpuProcess, ...]:
    """Processes that compute on a GPU now; none where `nvidia-smi` cannot say."""
    rows, _ = _query("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    return tuple(GpuProcess(r[0], int(r[1]), r[2], int(r[3]) if r[3].isdigit() else None) for r in rows)


def _ask() -> Inventory:
    rows, problem = _query("--query-gpu=index,uuid,name,driver_version,memory.total,memory.used")
    return Inventory(tuple(Gpu(int(r[0]), r[1], r[2], r[3], _mib(r[4]), _mib(r[5])) for r in rows), problem)


def _query(what: str) -> tuple[list[list[str]], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi is not installed"
    command = [program, what, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer in {_PATIENCE} s"
    if done.returncode:
        return [], f"nvidia-smi failed with code {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}"
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(done.stdout)) if row], ""


def _mib(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _read_simulated(path: Path) -> tuple[Gpu, ...]:
    """A JSON list of UUIDs."""
    uuids = json.loads(path.read_text())
    return tuple(Gpu(i, uuid, "simulated", "none", 0, 0, simulated=True) for i, uuid in enumerate(uuids))

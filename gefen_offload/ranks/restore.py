"""What every test finds the same in a pooled rank as in a new one, and what a test left behind."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from typing import Any

from gefen_offload.ranks.wire import Task

PARENTS_ALONE = ("CUDA_VISIBLE_DEVICES",)  # the rank has its lease's
KEPT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_FR_", "TORCH_NCCL_", "GEFEN_RANKS_")
IGNORED_FILES = ("/dev/", "anon_inode:", "/memfd:", "/proc/")
GPU_TOLERANCE = 32 << 20  # bytes: workspaces that libraries keep


class Surroundings:
    """Environment, seeds and settings around one task, and the differences that are leaks."""

    def __init__(self, backend: str | None, threads: int) -> None:
        self.backend, self.threads = backend, threads
        self._before: _Holdings | None = None

    def set(self, task: Task) -> None:
        """The parent's environment, path and directory; fixed seeds; torch's defaults."""
        _set_environment(task.environ)
        sys.path[:] = task.path
        os.chdir(task.cwd)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        if "torch" in sys.modules:
            _set_torch(self.backend, task, self.threads)

    def look(self) -> None:
        """Remember what the process holds before the body."""
        self._before = _Holdings.now()

    def leaks(self) -> list[str]:
        """What the process holds now and did not before the body; groups are destroyed here, the rest is only told."""
        if self._before is None:
            return []
        told = _destroy_groups() if self.backend is not None else []
        gc.collect()
        gc.freeze()  # what is left stays: the next collection need not walk it
        return told + self._before.compared_with(_Holdings.now(), self.backend)


class _Holdings:
    """Threads, children, open files and GPU bytes of this process."""

    def __init__(self, threads: set[threading.Thread], children: set[str], files: list[str], gpu: int) -> None:
        self.threads, self.children, self.files, self.gpu = threads, children, files, gpu

    @classmethod
    def now(cls) -> _Holdings:
        return cls(set(threading.enumerate()), _children(), _open_files(), _gpu_bytes())

    def compared_with(self, now: _Holdings, backend: str | None) -> list[str]:
        told = [f"thread {t.name!r}" for t in sorted(now.threads - self.threads, key=_name) if not _ends_soon(t)]
        told += [f"child process {pid}" for pid in sorted(now.children - self.children)]
        told += [f"open file {path}" for path in _added(self.files, now.files) if _counts(path, backend)]
        if now.gpu > self.gpu + GPU_TOLERANCE:
            told.append(f"{(now.gpu - self.gpu) >> 20} MiB of GPU memory")
        return told


def _name(thread: threading.Thread) -> str:
    return thread.name


def _ends_soon(thread: threading.Thread) -> bool:
    thread.join(0.2)
    return not thread.is_alive()


def _children() -> set[str]:
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found |= set(file.read().split())
        except OSError:
            continue
    return found


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return found


def _added(before: list[str], after: list[str]) -> list[str]:
    left = list(before)
    added = []
    for path in after:
        if path in left:
            left.remove(path)
        else:
            added.append(path)
    return sorted(added)


def _counts(path: str, backend: str | None) -> bool:
    """NCCL opens sockets and pipes when it first needs them; devices and kernel objects are libraries' own."""
    if path.startswith(("socket:", "pipe:")):
        return backend != "nccl"
    return not path.startswith(IGNORED_FILES) or path.startswith("/dev/shm/gefen")


def _gpu_bytes() -> int:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # tens of MiB a thread, which cuBLAS keeps and makes anew when it needs them
    return int(torch.cuda.memory_allocated())


def _destroy_groups() -> list[str]:
    """Groups beyond the default one; torch keeps them until told."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return []
    extra = [group for group in list(distributed_c10d._world.pg_map) if group is not dist.group.WORLD]
    for group in extra:
        dist.destroy_process_group(group)
    return [f"{len(extra)} process group(s), destroyed now"] if extra else []


def _set_environment(wanted: dict[str, str]) -> None:
    for name in list(os.environ):
        if name not in wanted and not name.startswith(KEPT):
            del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value and name not in PARENTS_ALONE:
            os.environ[name] = value


def _set_torch(backend: str | None, task: Task, threads: int) -> None:
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the setter imports half of torch
        torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(threads)
    if backend is not None:
        from gefen_offload.ranks import process_group

        process_group.set_timeout(max(1.0, 0.8 * task.timeout))

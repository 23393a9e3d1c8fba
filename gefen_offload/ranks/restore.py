"""What every test finds the same in a pooled rank as in a new one, and what a test left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

from gefen_offload.ranks.flight import ENTRIES, RECORDER
from gefen_offload.ranks.kill import TOKEN, state
from gefen_offload.ranks.wire import Join, Task

IGNORED_FILES = ("/dev/", "anon_inode:", "/memfd:", "/proc/")
GPU_TOLERANCE = 32 << 20  # bytes: workspaces that libraries keep


class Surroundings:
    """Environment, seeds and settings around one task, and the differences that are leaks."""

    def __init__(self, join: Join, own_process: bool) -> None:
        self.join, self.backend = join, join.backend
        self.own_process = own_process  # not pytest's, which a launcher started
        self._before: _Holdings | None = None

    def set(self, task: Task) -> None:
        """The parent's environment, path and directory; fixed seeds; torch's defaults."""
        _set_environment(task.environ, self.join)
        if self.own_process:
            _set_process()
        sys.path[:] = task.path
        os.chdir(task.cwd)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        if "torch" in sys.modules:
            _set_torch(self.join, task)

    def look(self) -> None:
        """Remember what the process holds before the body."""
        self._before = _Holdings.now()

    def leaks(self) -> list[str]:
        """What the process holds now and did not before the body.

        A group is told, and not destroyed: torch's caches of sharded operations may know it for good, and would give it
        to the next test.
        """
        if self._before is None:
            return []
        gc.collect()
        gc.freeze()  # what is left stays: the next collection need not walk it
        return self._before.compared_with(_Holdings.now(), sockets=self.backend != "nccl")


@dataclass(frozen=True)
class _Holdings:
    """The default process group, how many others, threads, children, open files and GPU bytes of this process."""

    default: Any  # the group that the pool was made with
    groups: int
    threads: set[threading.Thread]
    children: set[str]
    files: list[str]
    gpu: int

    @classmethod
    def now(cls) -> _Holdings:
        return cls(*_groups(), set(threading.enumerate()), _children(), _open_files(), _gpu_bytes())

    def compared_with(self, now: _Holdings, sockets: bool) -> list[str]:
        """What is here now and was not before.

        Sockets and pipes count only where `sockets` says so and neither a new group nor CUDA, which a first backward
        may start on a CPU rank too, has brought its own.
        """
        added = _added(self.files, now.files)
        sockets = sockets and now.groups <= self.groups and not any(path.startswith("/dev/nvidia") for path in added)
        told = [] if now.default is self.default else ["another default process group, or none, than the harness made"]
        told += [f"{now.groups - self.groups} process group(s)"] if now.groups > self.groups else []
        told += [f"thread {t.name!r}" for t in sorted(now.threads - self.threads, key=_name) if not _ends_soon(t)]
        told += [f"child process {pid}" for pid in sorted(now.children - self.children) if not _dies_soon(pid)]
        told += [f"open file {path}" for path in added if _counts(path, sockets)]
        if now.gpu > self.gpu + GPU_TOLERANCE:
            told.append(f"{(now.gpu - self.gpu) >> 20} MiB of GPU memory")
        return told


def _name(thread: threading.Thread) -> str:
    return thread.name


def _ends_soon(thread: threading.Thread) -> bool:
    thread.join(0.2)
    return not thread.is_alive()


def _dies_soon(pid: str) -> bool:
    """A child that the body forked, and that returned from it too, hands over its outcome first: it must be seen."""
    limit = time.monotonic() + 1
    while _lives(pid) and time.monotonic() < limit:
        time.sleep(0.01)
    return not _lives(pid)


def _lives(pid: str) -> bool:
    return state(int(pid)) not in ("zombie", "gone")


def _children() -> set[str]:
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found |= set(filter(_lives, file.read().split()))
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


def _counts(path: str, sockets: bool) -> bool:
    """NCCL opens sockets and pipes when it first needs them; devices and kernel objects are libraries' own."""
    if path.startswith(("socket:", "pipe:")):
        return sockets
    return not path.startswith(IGNORED_FILES) or path.startswith("/dev/shm/gefen")


def _gpu_bytes() -> int:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # tens of MiB a thread, which cuBLAS keeps and makes anew when it needs them
    return int(torch.cuda.memory_allocated())


def _groups() -> tuple[Any, int]:
    """The default group, None if there is none, and how many others there are; torch keeps them until told."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None, 0
    return distributed.group.WORLD, len(distributed.distributed_c10d._world.pg_map) - 1


def _set_environment(parents: dict[str, str], join: Join) -> None:
    """The parent's variables, and what the harness sets: where the parent has none, or, of a lease, in any case."""
    wanted = {"OMP_NUM_THREADS": str(join.threads), **dict.fromkeys(RECORDER, str(ENTRIES)), **parents}
    wanted |= {TOKEN: os.environ[TOKEN]} if TOKEN in os.environ else {}
    if join.devices:
        wanted["CUDA_VISIBLE_DEVICES"] = ",".join(join.devices)
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    time.tzset()


def _set_process() -> None:
    """Umask, signal mask and handlers, and the standard streams, as they were before the first test."""
    if not _first:
        umask = os.umask(0o077)
        _first["umask"] = umask
        _first["temporary folder"] = tempfile.tempdir
        for number in signal.valid_signals():
            _first[number] = signal.getsignal(number)
    os.umask(_first["umask"])
    tempfile.tempdir = _first["temporary folder"]
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals():
        if _first[number] is not None and signal.getsignal(number) is not _first[number]:
            signal.signal(number, _first[number])
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, f"__{name}__")
        if stream is None or stream.closed:
            stream = open(fd, "w", buffering=1, closefd=False)  # noqa: SIM115 (open as long as the process)
            setattr(sys, f"__{name}__", stream)
        setattr(sys, name, stream)


_first: dict[Any, Any] = {}  # umask, temporary folder, and the handler of each signal


def _set_torch(join: Join, task: Task) -> None:
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
    torch.backends.cudnn.allow_tf32 = True
    torch.set_flush_denormal(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
    for attention in ("flash", "mem_efficient", "math", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{attention}_sdp")(True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.set_num_threads(join.threads)
    if join.backend == "nccl":
        torch.cuda.set_device(join.gpu)
        torch.cuda.reset_peak_memory_stats()
    if join.backend is not None:
        from gefen_offload.ranks import process_group

        process_group.set_timeout(max(1.0, 0.8 * task.timeout))

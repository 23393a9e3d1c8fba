"""How parent and rank talk: framed messages on a socket pair, values packed without sharing memory or devices.

Messages are small dataclasses of this package. What a user made (arguments, return values) travels inside them as a
`Payload`, opaque bytes that are opened only where a failure to open them can be reported; beyond a few kilobytes the
bytes are a file in the run's folder, so a message never fills the socket, whatever the state of the reader.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import struct
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INLINE = 16 * 1024
LARGEST = 1 << 40  # bytes; a message that claims more is none
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Module:
    """A module that packed values refer to by name: where its source is, and whether pytest rewrote its asserts."""

    name: str
    file: str
    rewritten: bool


@dataclass(frozen=True)
class Payload:
    """Packed values: inline or in a file, and the modules that must be importable before they are opened."""

    inline: bytes | None
    file: str | None
    size: int
    modules: tuple[Module, ...] = ()

    def read(self) -> bytes:
        """The packed bytes; a file is read once and removed."""
        if self.file is None:
            return self.inline or b""
        data = Path(self.file).read_bytes()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.file)
        return data


@dataclass(frozen=True)
class Join:
    """Parent to rank: your place, your group."""

    rank: int
    world: int
    backend: str | None
    devices: tuple[str, ...]
    simulated: bool
    store: tuple[str, int] | None
    prefix: str
    timeout: float
    threads: int = 1
    gpu: int = 0
    faults: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Task:
    """Parent to rank: run this worker."""

    id: int
    test: str
    payload: Payload
    folder: str
    environ: dict[str, str]
    path: list[str]
    cwd: str
    timeout: float
    prefix: str | None = None  # make a fresh default group under this prefix first
    faults: tuple[Any, ...] = ()
    verbosity: int = 0


@dataclass(frozen=True)
class Leave:
    """Parent to rank: end, politely."""


@dataclass(frozen=True)
class Handover:
    """Rank to parent: the outcome of a task (-1: of joining the group)."""

    task: int
    outcome: Any
    pid: int = field(default_factory=os.getpid)


def pack(value: Any, folder: Path) -> Payload:
    """Packed `value`; tensors become copies on the CPU, detached."""
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    packer.dump(value)
    data = buffer.getvalue()
    modules = tuple(packer.modules.values())
    if len(data) <= INLINE:
        return Payload(data, None, len(data), modules)
    path = folder / f"payload-{uuid.uuid4().hex}"
    path.write_bytes(data)
    return Payload(None, str(path), len(data), modules)


def unpack(payload: Payload) -> Any:
    """The value again; the payload's file, if any, is used up."""
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])  # what a rank calls the main module of a program
    return pickle.loads(payload.read())


class _Packer(pickle.Pickler):
    """Notes the modules that the value needs, and writes plain tensors as raw bytes."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self.modules: dict[str, Module] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            self._note(obj.__module__)
            return NotImplemented
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and _is_plain(obj):
            return _restore_tensor, (_raw(obj), str(obj.dtype), tuple(obj.shape))
        return NotImplemented

    def _note(self, name: str) -> None:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file and name not in self.modules and name.partition(".")[0] not in _STANDARD:
            loader = type(getattr(module, "__loader__", None)).__name__
            self.modules[name] = Module(name, os.path.abspath(file), loader == "AssertionRewritingHook")


_STANDARD = frozenset({*sys.stdlib_module_names, "torch", "numpy", "gefen_offload"}) - {"__main__"}


def _is_plain(tensor: torch.Tensor) -> bool:
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and (not tensor.is_quantized and tensor.device.type != "meta")
    )


def _raw(tensor: torch.Tensor) -> bytearray:
    import torch

    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return bytearray(flat.numpy().tobytes())


def _restore_tensor(raw: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."))
    if not raw:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)


class GarbledError(Exception):
    """What came through the pipe is no message: something else wrote into it."""


class Channel:
    """One end of a socket pair: whole messages out, and in whatever pieces they come."""

    def __init__(self, fd: int, blocking: bool) -> None:
        self.fd = fd
        self._buffer = bytearray()
        self.ended = False
        os.set_blocking(fd, blocking)

    def send(self, message: Any, patience: float = 5.0) -> None:
        """Write a message; OSError when the other end is gone or took nothing for `patience` seconds."""
        data = pickle.dumps(message, protocol=5)
        view = memoryview(_LENGTH.pack(len(data)) + data)
        limit = time.monotonic() + patience
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise TimeoutError(f"the other end took no message for {patience} s") from None
                time.sleep(0.001)

    def receive(self) -> Any | None:
        """Blocking end: the next message; None at the end of the stream."""
        while True:
            for message in self._whole():
                return message
            if not self._fill():
                return None

    def silent(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        return not self._buffer and not select.select([self.fd], [], [], seconds)[0]

    def drain(self) -> list[Any]:
        """Non-blocking end: every whole message that has arrived; sets `ended` at the end of the stream.

        Raises GarbledError when something else than messages came.
        """
        messages = []
        with contextlib.suppress(BlockingIOError):
            while self._fill():
                messages += self._whole(all_of_them=True)
        return messages + self._whole(all_of_them=True)

    def _fill(self) -> bool:
        try:
            chunk = os.read(self.fd, 1 << 16)
        except ConnectionResetError:
            chunk = b""
        self.ended = self.ended or not chunk
        self._buffer += chunk
        return bool(chunk)

    def _whole(self, all_of_them: bool = False) -> list[Any]:
        messages: list[Any] = []
        while len(self._buffer) >= _LENGTH.size and (all_of_them or not messages):
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if end > LARGEST:
                raise GarbledError(f"a message of {end} bytes")
            if len(self._buffer) < end:
                break
            messages.append(_opened(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


def _opened(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise GarbledError(f"{type(error).__name__}: {error}") from error


def worker_problem(worker: Callable[..., Any]) -> str | None:
    """Why this callable cannot be found again in another process; None if it can."""
    name = getattr(worker, "__qualname__", None)
    module: ModuleType | None = sys.modules.get(getattr(worker, "__module__", "") or "")
    if not isinstance(worker, FunctionType) or name is None:
        return f"{worker!r} is not a function"
    if "<locals>" in name or "<lambda>" in name:
        return f"{name} is defined inside another function; move it to the top of its file"
    if module is None:
        return f"the module {worker.__module__!r} of {name} is not loaded"
    if module.__name__ == "__main__" and not os.path.isfile(getattr(module, "__file__", None) or ""):
        return f"{name} stands in {worker.__code__.co_filename}, which is no file; ranks read it from one"
    return None

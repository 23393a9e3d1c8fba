"""Starts the judged pytest session: ``python launch.py PIPE RECORD NONCE PACKAGE -- pytest arguments``.

Run as a file, not as a module: nothing of the gate's package is imported, and this file's folder is taken off the path
first, so the session sees only what its own environment gives it and never the checkout by accident.

There are two processes. One runs pytest, as the leader of a session of its own. Its parent tells its id on the file
descriptor PIPE, and in the end its exit code. Whatever loses its own parent below becomes a child of that parent, so
nothing leaves by detaching itself; the parent ends when no child is left. When the gate is gone, killed perhaps, the
parent kills all that is below.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

NAME = "_gefen_offload_gate_recorder"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def recorder_module() -> ModuleType:
    """The recorder beside this file, under its own name."""
    path = Path(__file__).with_name("recorder.py")
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the recorder is missing beside the launcher: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def judged(record: str, nonce: str, package: str, *arguments: str) -> int:
    """Run pytest with the recorder; SIGUSR1 prints every thread's stack to the session's log."""
    import pytest

    module = recorder_module()
    module.explain_on_signal()
    recorder = module.Recorder(Path(record), nonce, package or None)
    # -p is for the workers of pytest-xdist, which get these arguments too: here the module does nothing.
    return int(pytest.main(["-p", NAME, *arguments], plugins=[recorder]))


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}): what a session leaves could not be found")


def end(*_: object) -> NoReturn:
    """Kill every child, and what thereby becomes one, until there is none; and go."""
    while True:
        for child in filter(is_child, os.listdir("/proc")):
            os.kill(int(child), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            os._exit(1)


def is_child(name: str) -> bool:
    """Whether an entry of /proc is a child of this process, which stays one until it is waited for."""
    try:
        stat = Path("/proc", name, "stat").read_bytes()
    except OSError:
        return False
    return name.isdigit() and int(stat.rpartition(b")")[2].split()[1]) == os.getpid()


def main() -> int:
    """Run the session, and wait for all that is below."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # else it is not there, and another folder would go
        del sys.path[0]
    told, record, nonce, package, _, *arguments = sys.argv[1:]
    pipe = int(told)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.close(pipe)
        os.setsid()
        return judged(record, nonce, package, *arguments)
    signal.signal(signal.SIGTERM, end)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # at the end of the gate's thread that started this, which waits for it
    try:
        os.write(pipe, f"{child}\n".encode())
        while True:
            ended, status = os.wait()
            if ended == child:
                os.write(pipe, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    except ChildProcessError:
        return 0
    except BrokenPipeError:  # the gate was gone before it could be heard of
        end()


if __name__ == "__main__":
    sys.exit(main())

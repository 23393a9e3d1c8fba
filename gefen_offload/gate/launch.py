"""Starts the judged pytest session: ``python launch.py RECORD NONCE PACKAGE -- pytest arguments``.

Run as a file, not as a module: nothing of the gate's package is imported, and this file's folder is taken off the path
first, so the session sees only what its own environment gives it and never the checkout by accident.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType


def recorder_module() -> ModuleType:
    """The recorder beside this file, under a name that no suite imports."""
    path = Path(__file__).with_name("recorder.py")
    spec = importlib.util.spec_from_file_location("_gefen_offload_gate_recorder", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the recorder is missing beside the launcher: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Run pytest with the recorder; SIGUSR1 prints every thread's stack to the session's log."""
    del sys.path[0]
    record, nonce, package, _, *arguments = sys.argv[1:]
    # pytest redirects standard error while a test runs; the stacks go to the log that was there before.
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True, chain=False)
    import pytest

    recorder = recorder_module().Recorder(Path(record), nonce, package or None)
    return int(pytest.main(arguments, plugins=[recorder]))


if __name__ == "__main__":
    sys.exit(main())

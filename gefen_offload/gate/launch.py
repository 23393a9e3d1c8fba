"""Starts the judged pytest session: ``python launch.py RECORD NONCE PACKAGE -- pytest arguments``.

Run as a file, not as a module: nothing of the gate's package is imported, and this file's folder is taken off the path
first, so the session sees only what its own environment gives it and never the checkout by accident.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NAME = "_gefen_offload_gate_recorder"


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


def main() -> int:
    """Run pytest with the recorder; SIGUSR1 prints every thread's stack to the session's log."""
    del sys.path[0]
    record, nonce, package, _, *arguments = sys.argv[1:]
    import pytest

    module = recorder_module()
    module.explain_on_signal()
    recorder = module.Recorder(Path(record), nonce, package or None)
    # -p is for the workers of pytest-xdist, which get these arguments too: here the module does nothing.
    return int(pytest.main(["-p", NAME, *arguments], plugins=[recorder]))


if __name__ == "__main__":
    sys.exit(main())

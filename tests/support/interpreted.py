"""Triton's interpreter, in a process of its own: whether kernels are interpreted is decided when they are defined.

`python -m support.interpreted MODULE` runs a module in the interpreter; its `__main__` prints one JSON object a line.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

PATIENCE = 600


def records(module: str) -> list[dict[str, Any]]:
    """What `module` prints when it is run in the interpreter."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-m", "support.interpreted", module]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr[-3000:]
    return list(map(json.loads, run.stdout.splitlines()))


def repair() -> None:
    """Triton 3.6 and older make an int of an array of one element, which NumPy 2.4 no longer does."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    repair()
    runpy.run_module(sys.argv[1], run_name="__main__")

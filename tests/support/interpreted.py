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

import numpy as np

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
    """What Triton 3.6 and older do otherwise: an int from an array of one element, and an fma that rounds once."""
    from triton.runtime import interpreter

    builder_type, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    patch, fma = interpreter._patch_lang_tensor, builder_type.create_fma

    def patched(tensor: Any, *scope: Any) -> None:  # Triton 3.5 has no scope
        patch(tensor, *scope)
        set_attribute = scope[0].set_attr if scope else setattr
        set_attribute(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return fma(builder, x, y, z)
        return handle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    interpreter._patch_lang_tensor = patched
    builder_type.create_fma = create_fma


def fused_multiply_add(x: Any, y: Any, z: Any) -> Any:
    """x y + z in float32, rounded once.

    The product is exact in float64. The sum is rounded there to odd: what it lost then decides a later tie.
    """
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = np.asarray(product + addend)
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
    return (
        np.where(inexact, bits + np.where((lost > 0) == (total > 0), 1, -1), bits).view(np.float64).astype(np.float32)
    )


if __name__ == "__main__":
    repair()
    runpy.run_module(sys.argv[1], run_name="__main__")

"""The README's Python, as a reader would run it: all of it, from top to bottom, in one session."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[2] / "README.md"


def blocks() -> list[str]:
    """The README's Python blocks in order."""
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def run_blocks(folder: str, device: str) -> dict[str, Any]:
    """The names that the blocks leave behind, run in `folder` with the README's device replaced by `device`."""
    names: dict[str, Any] = {}
    home = os.getcwd()
    os.chdir(folder)
    try:
        for number, block in enumerate(blocks()):
            code = block.replace('device = "cuda"', f"device = {device!r}")
            exec(compile(code, f"README block {number}", "exec"), names)
    finally:
        os.chdir(home)
    return names


def run_on_gpu(context: Any, folder: str) -> tuple[int, bool]:
    """Worker: the README on this rank's GPU; steps taken and whether offload is on at its end."""
    optimizer = run_blocks(folder, str(context.device))["optimizer"]
    return optimizer.state_dict()["gefen_global_step"], optimizer.state_offload_active

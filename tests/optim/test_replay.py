"""Steps taken again: the bits of steps prepared anew, and prepared anew whenever something has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import replayed

SCENARIOS = {scenario.id: scenario for scenario in replayed.SCENARIOS}


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, Any]]:
    """What `python -m support.replayed` found for every scenario."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(replayed.__file__).parents[1]), *filter(None, sys.path)]),
    }
    run = subprocess.run(
        [sys.executable, "-m", "support.replayed"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {record["id"]: record for record in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_bits_are_those_of_steps_prepared_anew(compared: dict[str, dict[str, Any]], name: str) -> None:
    """Parameters after each step and the state at the end, resident and streamed."""
    assert compared[name]["resident"]["difference"] == ""
    assert SCENARIOS[name].resident_only or compared[name]["offloaded"]["difference"] == ""


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_many_steps_as_can_be_are_taken_again(compared: dict[str, dict[str, Any]], name: str) -> None:
    """After a change that kernels were not prepared for, one step is prepared anew, and the next are taken again."""
    scenario, found = SCENARIOS[name], compared[name]
    assert found["anew"] == 0
    assert found["resident"]["again"] == scenario.resident
    if not scenario.resident_only:
        assert found["offloaded"]["again"] == (scenario.offloaded or scenario.resident)

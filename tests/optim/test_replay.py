"""Steps taken again: the bits of steps prepared anew, and prepared anew whenever something has changed."""

from __future__ import annotations

from typing import Any

import pytest

from support import replayed
from support.interpreted import records

SCENARIOS = {scenario.id: scenario for scenario in replayed.SCENARIOS}


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, Any]]:
    """What was found for every scenario."""
    return {record["id"]: record for record in records("support.replayed")}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_bits_are_those_of_steps_prepared_anew(compared: dict[str, dict[str, Any]], name: str) -> None:
    """Parameters after each step and the state at the end, resident and streamed."""
    assert compared[name]["resident"]["difference"] == ""
    assert SCENARIOS[name].resident_only or compared[name]["offloaded"]["difference"] == ""


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_replaced_is_freed(compared: dict[str, dict[str, Any]], name: str) -> None:
    """State at once, parameters and scratch with the next step."""
    assert compared[name]["resident"]["kept"] == 0
    assert SCENARIOS[name].resident_only or compared[name]["offloaded"]["kept"] == 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_many_steps_as_can_be_are_taken_again(compared: dict[str, dict[str, Any]], name: str) -> None:
    """After a change that kernels were not prepared for, one step is prepared anew, and the next are taken again."""
    scenario, found = SCENARIOS[name], compared[name]
    assert found["anew"] == 0
    assert found["resident"]["again"] == scenario.resident
    if not scenario.resident_only:
        assert found["offloaded"]["again"] == (scenario.offloaded or scenario.resident)

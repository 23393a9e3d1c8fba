"""The fused kernels, run by Triton's interpreter in a process of its own, against the plain path."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import first_kernels as first_cases
from support import fused as support_cases
from support import momenta
from support.interpreted import fused_multiply_add, records

FIRST_NAMES = [first_cases.case_name(*case, dtype) for case in first_cases.LITTLE for dtype in first_cases.DTYPES]
NAMES = [f"{str(dtype)[6:]}-{case.name}" for case in support_cases.SMALL for dtype in support_cases.DTYPES]
MOMENTUM_NAMES = [f"{str(dtype)[6:]}-{case.name}" for case in momenta.SMALL for dtype in momenta.DTYPES]


def interpreted(module: str) -> dict[str, dict[str, Any]]:
    """What a module found for every case."""
    return {record["name"]: record for record in records(module)}


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, Any]]:
    """The update's kernels."""
    return interpreted("support.fused")


@pytest.fixture(scope="module")
def read() -> dict[str, dict[str, Any]]:
    """The kernels of a first step."""
    return interpreted("support.first_kernels")


@pytest.fixture(scope="module")
def moved() -> dict[str, dict[str, Any]]:
    """The kernels of GefenMuon's momentum."""
    return interpreted("support.momenta")


@pytest.mark.parametrize("name", NAMES)
def test_indices_equal(compared: dict[str, dict[str, Any]], name: str) -> None:
    """Every index and magnitude is the plain path's."""
    assert (compared[name]["indices"], compared[name]["magnitudes"]) == (0, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_update_close(compared: dict[str, dict[str, Any]], name: str) -> None:
    """The second moments and the parameters differ by last bits at most."""
    assert compared[name]["moments"] < 5e-7
    assert compared[name]["update"] <= 2


@pytest.mark.parametrize("name", NAMES)
def test_cut_changes_nothing(compared: dict[str, dict[str, Any]], name: str) -> None:
    """A parameter stepped in pieces, one call each, has the bits of one stepped whole."""
    assert compared[name]["same_when_cut"]


@pytest.mark.parametrize("name", FIRST_NAMES)
def test_first_step(read: dict[str, dict[str, Any]], name: str) -> None:
    """The histogram is the plain one; the errors that a period is chosen by differ by rounding, the same every time."""
    assert read[name]["same_counts"]
    assert read[name]["apart"] < 1e-12
    assert read[name]["same_again"]


@pytest.mark.parametrize("name", MOMENTUM_NAMES)
def test_momentum(moved: dict[str, dict[str, Any]], name: str) -> None:
    """Indices, magnitudes and what is orthogonalised are the plain path's, to the bit, also in a second step."""
    assert moved[name] == {"name": name, "indices": 0, "magnitudes": True, "updates": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_muon_trains_as_without_kernels(moved: dict[str, dict[str, Any]], dtype: str) -> None:
    """Parameters and state after three steps have the same bits."""
    assert moved[f"{dtype}-training"]["same"]


@given(st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 3))
def test_the_interpreter_rounds_an_fma_once(numbers: tuple[float, float, float]) -> None:
    """Ours in place of older Triton's is the nearest float32 to the exact result, ties to even."""
    x, y, z = (np.array([number], np.float32) for number in numbers)
    exact = Fraction(*numbers[0].as_integer_ratio()) * Fraction(*numbers[1].as_integer_ratio())
    exact += Fraction(*numbers[2].as_integer_ratio())
    with np.errstate(all="ignore"):
        found = fused_multiply_add(x, y, z)[0]
    if not np.isfinite(found):
        assert abs(exact) >= Fraction(float(np.finfo(np.float32).max))
        return
    below, above = np.nextafter(found, np.float32(-np.inf)), np.nextafter(found, np.float32(np.inf))
    apart = abs(exact - Fraction(float(found)))
    for other in (below, above):
        if np.isfinite(other):
            theirs = abs(exact - Fraction(float(other)))
            assert apart < theirs or (apart == theirs and found.view(np.int32) % 2 == 0)

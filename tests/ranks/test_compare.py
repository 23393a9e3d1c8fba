"""Comparison to the bit: what counts as different, and what is told about it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct

import numpy
import pytest
import torch

from gefen_offload.ranks import identical
from gefen_offload.ranks.compare import feed
from gefen_offload.ranks.result import all_identical

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_equal_nests():
    """Nested values with the same bits are identical, whatever the order of keys and the layout in memory."""
    left = {"a": [torch.arange(6.0).view(2, 3).t(), 1, "x"], "b": (None, 2.5)}
    right = {"b": (None, 2.5), "a": [torch.arange(6.0).view(2, 3).t().contiguous(), 1, "x"]}
    assert identical(left, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0])
def test_one_ulp(dtype, start):
    """One element one unit in the last place away is found, with path, index, both values and the distance."""
    left = torch.full((2, 3), start, dtype=dtype)
    right = left.clone()
    right[1, 2] = torch.nextafter(right[1, 2].float(), torch.tensor(9.0)) if dtype is torch.float32 else right[1, 2]
    if dtype is not torch.float32:
        kind = torch.int64 if dtype is torch.float64 else torch.int16
        right.view(kind)[1, 2] += 1
    first = identical({"w": left}, {"w": right}).first
    assert first.path == "value['w']"
    assert first.element == (1, 2)
    assert first.ulps == 1
    assert first.count == 1


def test_ulps_across_zero():
    """The distance from the smallest negative to the smallest positive number is two; from -0.0 to 0.0 it is none."""
    tiny = torch.tensor(5e-324, dtype=torch.float64)
    assert identical(-tiny, tiny).first.ulps == 2
    zeros = identical(torch.tensor([0.0]), torch.tensor([-0.0])).first
    assert zeros.ulps == 0
    assert "0x80000000" in zeros.right


def test_nan_payloads():
    """A NaN equals itself and not a NaN with another payload."""
    one = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert identical(one, one.clone())
    assert not identical(one[:1], one[1:])
    other = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    assert identical(math.nan, math.nan)
    assert not identical(math.nan, other)


@pytest.mark.parametrize(
    ("left", "right", "what"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype"),
        (torch.zeros(2), torch.zeros(1, 2), "shape"),
        ([1], (1,), "type"),
        (1, 1.0, "type"),
        (True, 1, "type"),
        ([1, 2], [1], "length"),
        ({"a": 1}, {"b": 1}, "keys"),
        ("a", "b", "value"),
        (torch.zeros(1), 0.0, "type"),
        (0.0, -0.0, "bits"),
        (1j, 1j + 1e-300, "bits"),
        (torch.tensor(1j), torch.tensor(2j), "bits"),
        (torch.tensor([True]), torch.tensor([False]), "bits"),
        (numpy.zeros(2), numpy.ones(2), "bits"),
    ],
    ids=str,
)
def test_kinds_of_difference(left, right, what):
    """Dtype, shape, type, length, keys, value and bits are each a difference of their own kind."""
    assert identical(left, left)
    assert identical(left, right).first.what == what


def test_step_of_a_trace():
    """In a list of steps the difference names the step."""
    trace = [{"loss": torch.tensor(float(i))} for i in range(5)]
    other = [{"loss": torch.tensor(float(i) + (i >= 3))} for i in range(5)]
    comparison = identical(trace, other)
    assert comparison.first.step == 3
    assert str(comparison).splitlines()[1].strip().startswith("step 3: value[3]['loss']")
    assert len(comparison.differences) == 2


def test_dataclasses_and_empty_tensors():
    """Dataclasses are compared by field; empty tensors by shape."""

    @dataclasses.dataclass
    class Shot:
        weight: torch.Tensor

    assert identical(Shot(torch.zeros(0, 3)), Shot(torch.zeros(0, 3)))
    assert identical(Shot(torch.zeros(1)), Shot(torch.ones(1))).first.path == "value.weight"


def test_check_raises_the_report():
    """`check` raises with the report, and the comparison itself is its own message in an assert."""
    comparison = identical([1, 2], [1, 3])
    with pytest.raises(AssertionError, match=r"step 1: value\[1\]: value differ: int 2 and int 3"):
        comparison.check()
    assert repr(comparison) == str(comparison)


def test_ranks_against_rank_zero():
    """The comparison over ranks names the rank that differs."""
    assert all_identical([1, 1, 1])
    assert "rank 0 and rank 2" in str(all_identical([1, 1, 2]))


def digest(value) -> str:
    hasher = hashlib.sha256()
    feed(hasher, value)
    return hasher.hexdigest()


@dataclasses.dataclass
class Shot:
    weight: torch.Tensor


def test_digests_of_what_prints_alike():
    """Values whose text leaves bits out have digests by their bits; sets by their members, whatever their order."""
    left, right = torch.zeros(5000), torch.zeros(5000)
    right[2500] = 1
    assert repr(Shot(left)) == repr(Shot(right))
    assert digest(Shot(left)) != digest(Shot(right))
    assert digest(complex(0.0, -0.0)) != digest(complex(0.0, 0.0))
    assert digest({"a", "b", "c"}) == digest({"c", "b", "a"})
    assert digest({1.0}) != digest({2.0})


def test_digests():
    """Digests agree exactly where comparison does: bits, dtype, shape and structure, not order of keys."""
    base = {"a": torch.zeros(2), "b": [1, 2.0]}
    assert digest(base) == digest({"b": [1, 2.0], "a": torch.zeros(2)})
    for other in (
        {"a": torch.tensor([0.0, -0.0]), "b": [1, 2.0]},
        {"a": torch.zeros(2, dtype=torch.int32), "b": [1, 2.0]},
        {"a": torch.zeros(1, 2), "b": [1, 2.0]},
        {"a": torch.zeros(2), "b": (1, 2.0)},
        {"a": torch.zeros(2), "b": [1, -2.0]},
    ):
        assert digest(base) != digest(other)

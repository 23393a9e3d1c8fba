"""The period is what its definition says, on inputs chosen to break a faster way of finding it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gefen_offload.optim import period as module
from gefen_offload.optim.period import choose_period, divisor_errors, divisors_of
from support.reference import period_by_definition, period_errors


def _noise(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def _period(gradient: torch.Tensor, shape: torch.Size) -> int:
    return choose_period(divisor_errors(gradient), shape)


def _spikes(n: int) -> torch.Tensor:
    gradient = torch.zeros(n)
    gradient[:: max(1, n // 7)] = 1e3
    return gradient


def _nearly_flat(n: int) -> torch.Tensor:
    return 1 + torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n)) * 2.0**-22


def _steps(n: int) -> torch.Tensor:
    return (torch.arange(n) * 12 // n + 1).float() * (1 + 0.01 * _noise(n))


GRADIENTS = {"noise": _noise, "spikes": _spikes, "nearly-flat": _nearly_flat, "steps": _steps}
SIZES = [8, 9, 12, 97, 101 * 2, 128, 243, 360, 1001, 1024, 1155, 2048, 4096, 5040, 7919 * 2, 30030]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_errors_follow_the_definition(kind: str, n: int) -> None:
    """The error of every divisor equals the directly computed one, up to the rounding of means in float64."""
    gradient = GRADIENTS[kind](n)
    errors, expected = np.array(divisor_errors(gradient)), np.array(period_errors(gradient))
    rounding = 1e-15 * float(gradient.square().mean())
    assert np.abs(errors - expected).max() <= 1e-12 * expected.max() + rounding


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_period_follows_the_definition(kind: str, n: int) -> None:
    """The period equals the one found by trying every divisor."""
    gradient = GRADIENTS[kind](n)
    assert _period(gradient, gradient.shape) == period_by_definition(gradient, gradient.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_float_type_is_squared_in_float32(dtype: torch.dtype) -> None:
    """A gradient of any float type gives the errors of its float32 cast, bit for bit."""
    gradient = _noise(5040).to(dtype)
    assert divisor_errors(gradient) == divisor_errors(gradient.float())


def test_a_flat_gradient_has_no_error() -> None:
    """A constant gradient has error 0 for every divisor, so that its ties go to the smallest divisor."""
    gradient = torch.full((4096,), 0.3)
    assert set(divisor_errors(gradient)) == {0.0}
    assert _period(gradient, torch.Size([4, 1024])) == 2048


def test_runs_of_equal_values_are_found() -> None:
    """Runs of sixteen equal values are found: the period is their length, however rounding falls."""
    scales = torch.rand(36, generator=torch.Generator().manual_seed(1)) + 0.5
    gradient = scales.repeat_interleave(16)
    assert _period(gradient, gradient.shape) == 16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_overflows_takes_its_period_from_the_shape(value: float) -> None:
    """Where errors are not finite the last dimension decides, and nothing raises."""
    gradient = _noise(96)
    gradient[5] = value
    assert _period(gradient, torch.Size([2, 48])) == 96
    assert _period(gradient, torch.Size([96])) == 96


def test_errors_that_are_not_all_finite_decide_nothing() -> None:
    """One error that is not a number sets the others aside, even where they have a clear winner."""
    assert choose_period([0.0, 3.0, 3.0, 1.0, 1.0, 1.0], torch.Size([64])) == 8
    assert choose_period([0.0, 3.0, 3.0, 1.0, 1.0, float("nan")], torch.Size([64])) == 64


@pytest.mark.parametrize(
    ("shape", "period"),
    [
        ((), 1),
        ((1,), 1),
        ((7,), 1),
        ((0,), 1),
        ((8,), 8),
        ((97,), 97),
        ((2053,), 1),
        ((2, 2053), 2053),
        ((3, 7), 21),
        ((4096, 2), 2048),
        ((2, 4096), 4096),
        ((2, 2, 9), 36),
        ((5, 419, 1), 2095 // 5),
    ],
)
def test_the_period_of_a_shape_whose_errors_decide_nothing(shape: tuple[int, ...], period: int) -> None:
    """When the first divisor wins: the larger of the last dimension and the largest divisor up to 2048, from 8 on."""
    size = torch.Size(shape)
    errors = [0.0] * len(divisors_of(max(1, size.numel())))
    assert choose_period(errors, size) == period


def test_ties_go_to_the_smallest_divisor() -> None:
    """Scores within 1e-9 of the largest error are ties; one further away is a winner."""
    shape = torch.Size([64])
    assert divisors_of(64) == (1, 2, 4, 8, 16, 32)
    assert choose_period([0.0, 3.0, 3.0, 2.0, 1.0 - 2e-9, 1.0], shape) == 8
    assert choose_period([0.0, 3.0, 3.0, 2.0, 1.0 - 4e-9, 1.0], shape) == 16


def test_errors_of_another_size_are_refused() -> None:
    """Errors of the wrong count are refused with both counts."""
    with pytest.raises(ValueError, match=r"64 elements have 6 divisors below 64, but 2 errors"):
        choose_period([0.0, 1.0], torch.Size([64]))


@pytest.mark.parametrize("n", [5040, 30030, 2 * 7919, 3 * 4099, 97 * 89, 2**13, 10007])
@pytest.mark.parametrize(("chunk", "stored"), [(64, 16), (512, 32), (1024, 512)])
def test_a_long_gradient_is_streamed_to_the_same_errors(
    n: int, chunk: int, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, passes, stored means and blocks longer than a chunk change no error by more than 1e-12."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(module, "STORED", stored)
    gradient = _noise(n)
    errors, expected = np.array(divisor_errors(gradient)), np.array(period_errors(gradient))
    assert np.abs(errors - expected).max() <= 1e-12 * expected.max()


def test_the_period_is_the_same_every_time() -> None:
    """Two calls on the same gradient return the same bits."""
    gradient = _noise(2**21 + 2**19)
    assert divisor_errors(gradient) == divisor_errors(gradient.clone())

"""The period is the published optimizer's."""

from __future__ import annotations

import pytest
import torch

from gefen_offload.optim.learning import Learning, Newcomer
from support.first_step import FLOAT_TYPES, drawn_gradient, published_first_step

SHAPES = [(1,), (7,), (8,), (97,), (1024,), (360,), (32, 32), (64, 33), (3, 5, 7), (2, 101), (17, 16), (2, 2, 9, 5)]


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_periods_are_the_published_ones(dtype: torch.dtype) -> None:
    """Sixty gradients of five characters and twelve shapes get the periods that the published optimizer gives them."""
    gradients = [drawn_gradient(shape, dtype, seed) for seed, shape in enumerate(SHAPES * 5)]
    periods = [published_first_step([gradient])[0][0] for gradient in gradients]
    newcomers = [Newcomer(gradient.flatten(), gradient.shape, force_one=False) for gradient in gradients]
    assert Learning().periods(newcomers) == periods

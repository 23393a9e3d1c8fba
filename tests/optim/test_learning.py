"""Periods and codebooks are learnt from many gradients together, the small ones on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gefen_offload.optim import learning, small_gradients
from gefen_offload.optim.codebook import block_histogram, solve_codebook
from gefen_offload.optim.learning import Learning, Newcomer
from gefen_offload.optim.period import choose_period, divisor_errors
from gefen_offload.optim.small_gradients import SMALL, SmallGradients, bring
from support.first_step import drawn_gradient

SIZES = (1, 7, 360, 2048, 2048, 6144, 2048, SMALL, SMALL + 8, SMALL, 3 * SMALL)
DTYPES = (torch.float32, torch.bfloat16)


def drawn() -> list[Tensor]:
    """Flat gradients of all sizes, two dtypes in turn."""
    return [drawn_gradient((n,), DTYPES[i % 2], i) for i, n in enumerate(SIZES)]


def newcomers(gradients: Sequence[Tensor]) -> list[Newcomer]:
    """Parameters of one dimension, of which the fifth has blocks of one element."""
    return [Newcomer(gradient, gradient.shape, force_one=i == 4) for i, gradient in enumerate(gradients)]


def test_together_as_one_by_one() -> None:
    """The periods and the codebook of many parameters are those of each one's own errors and counts, summed."""
    gradients, learnt = drawn(), Learning()
    periods = learnt.periods(newcomers(gradients))
    alone = [choose_period(divisor_errors(gradient), gradient.shape) for gradient in gradients]
    assert periods == [*alone[:4], 1, *alone[5:]]
    counts = sum(block_histogram(gradient, period) for gradient, period in zip(gradients, periods, strict=True))
    assert torch.equal(learnt.codebook(list(zip(gradients, periods, strict=True))), solve_codebook(counts))


def test_small_errors_are_the_bits_of_each_alone() -> None:
    """Gradients of one size are read as rows of one matrix, and each gets the bits it has alone."""
    gradients = [gradient for gradient in drawn() if gradient.numel() <= SMALL]
    assert SmallGradients().queue_errors(gradients)() == [divisor_errors(gradient) for gradient in gradients]


@pytest.mark.parametrize("n", [30030, SMALL - 8, SMALL])
def test_threads_do_not_matter_to_small_gradients(n: int) -> None:
    """With one, two and four threads the errors of a small gradient are the same bits."""
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(SmallGradients().queue_errors([drawn_gradient((n,), torch.float32, n)])())
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


class _Kernels:
    """In place of a GPU's kernels: notes what it is given, and when."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.sizes = log, set[int]()

    def queue_errors(self, gradients: Sequence[Tensor]) -> Callable[[], list[list[float]]]:
        self.log.append("queued")
        self.sizes |= {gradient.numel() for gradient in gradients}
        return lambda: self.log.append("read") or [divisor_errors(gradient) for gradient in gradients]

    def queue_counts(self, gradients: Sequence[tuple[Tensor, int]]) -> Callable[[], Tensor]:
        self.log.append("queued")
        self.sizes |= {gradient.numel() for gradient, _ in gradients}
        return lambda: self.log.append("read") or sum(block_histogram(*item) for item in gradients)


def test_the_size_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of more than 2**15 elements go to the kernels, others never; the kernels run while the host reads."""
    log: list[str] = []
    kernels = _Kernels(log)
    monkeypatch.setattr(Learning, "_reader_of", lambda self, gradient: kernels)
    for name in ("_errors", "_counts"):
        real = getattr(small_gradients, name)
        monkeypatch.setattr(small_gradients, name, lambda *a, real=real: log.append("host") or real(*a))
    real = bring
    monkeypatch.setattr(small_gradients, "bring", lambda gradients: log.append("brought") or real(gradients))
    gradients = drawn()
    periods = Learning().periods(newcomers(gradients))
    codebook = Learning().codebook(list(zip(gradients, periods, strict=True)))
    assert kernels.sizes == {SMALL + 8, 3 * SMALL}
    assert log == ["brought", "queued", "host", "read"] * 2
    monkeypatch.undo()
    assert periods == Learning().periods(newcomers(gradients))
    assert torch.equal(codebook, Learning().codebook(list(zip(gradients, periods, strict=True))))


def test_the_kernels_are_not_asked_for_small_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every gradient is small nobody asks whether there are kernels, so that none is loaded or compiled."""
    monkeypatch.setattr(learning.fused, "available", lambda *_: pytest.fail("asked"))
    gradients = [gradient for gradient in drawn() if gradient.numel() <= SMALL]
    assert len(Learning().periods(newcomers(gradients))) == len(gradients)


def small_gradients_of_a_gpu(context) -> dict[str, object]:
    """Whether gradients come to the host in order, in how many copies, and in how much memory of the device."""
    gradients = [gradient.to(context.device) for gradient in drawn() * 40 if gradient.numel() <= SMALL]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    here = bring(gradients)
    return {
        "equal": all(torch.equal(a, b.cpu()) and not a.is_cuda for a, b in zip(here, gradients, strict=True)),
        "copies": len({tensor.untyped_storage().data_ptr() for tensor in here}),
        "peak": torch.cuda.max_memory_allocated() - held,
    }


@pytest.mark.gpu1
def test_small_gradients_come_in_few_copies(ranks) -> None:
    """360 gradients of two dtypes come in four copies, with less memory of the device than all of one dtype take."""
    found = ranks.run(small_gradients_of_a_gpu).values[0]
    assert found["equal"]
    assert found["copies"] == 4
    assert found["peak"] <= 4.5 * 2**20

"""The fused kernels on a GPU: the plain path's indices, steady memory, and few launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def compare_all(context: Any) -> list[dict[str, Any]]:
    """Every case, small and large, in three dtypes."""
    from gefen_offload.optim.fused.update import FusedUpdate
    from support.fused import DTYPES, LARGE, SMALL, compare

    fused = FusedUpdate(context.device)
    return [compare(case, dtype, context.device, fused) for case in (*SMALL, *LARGE) for dtype in DTYPES]


@pytest.mark.gpu1
def test_same_as_plain(ranks: Any) -> None:
    """Indices and magnitudes are the plain path's, the update is within last bits, and cutting changes nothing."""
    for record in ranks.options(timeout=280).run(compare_all).values[0]:
        assert (record["indices"], record["magnitudes"]) == (0, 0.0), record
        assert record["moments"] < 2e-2 if "bfloat16" in record["name"] else record["moments"] < 1e-6, record
        assert record["update"] <= 4, record  # second moments are sums in another order
        assert record["same_when_cut"], record


def step_twice(context: Any) -> dict[str, int]:
    """Launches and CUDA allocations of a step after the first, over 60 parameters of three kinds."""
    from gefen_offload.optim.fused.launch import Kernel
    from gefen_offload.optim.fused.update import FusedUpdate
    from support.fused import Case, levels_on, pieces_of

    cases = (Case((512, 2048), 2048, factored=True), Case((2048,), 2048), Case((96, 2048), 3 * 2**14, factored=True))
    pieces = [piece for case in cases for _ in range(20) for piece in pieces_of(case, torch.bfloat16, context.device)]
    program = FusedUpdate(context.device).program([pieces], levels_on(context.device))
    assert program is not None
    works = {id(piece.piece.work): piece.piece.work for piece in pieces}.values()
    addresses = [work.gradient.data_ptr() for work in works]
    scalars = list({id(work.scalars): work.scalars for work in works}.values())
    for _ in range(5):
        assert program.renew(addresses, scalars)
        program.launch(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, launches = torch.cuda.memory_allocated(), Kernel.launches
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    program.renew(addresses, scalars)
    program.launch(0)
    torch.cuda.synchronize()
    return {
        "allocations": torch.cuda.memory_stats()["allocation.all.allocated"] - before,
        "launches": Kernel.launches - launches,
        "peak": torch.cuda.max_memory_allocated() - held,
    }


@pytest.mark.gpu1
def test_steady_step_allocates_nothing(ranks: Any) -> None:
    """After warm-up a step takes no memory from the CUDA allocator; its launches do not grow with the parameters."""
    found = ranks.run(step_twice).values[0]
    assert (found["allocations"], found["peak"]) == (0, 0)
    assert found["launches"] <= 10


def first_steps(context: Any) -> list[tuple[bool, float]]:
    """For several gradients: whether the histogram is the plain one, and how far apart the periods' errors are."""
    from gefen_offload.optim.codebook import block_histogram
    from gefen_offload.optim.fused.first_step import FirstStep
    from gefen_offload.optim.period import divisor_errors

    first, found = FirstStep(context.device), []
    draw = torch.Generator(context.device).manual_seed(3)
    for n, period in ((2**18, 8), (96 * 4000, 40), (3 * 9001, 9001), (131 * 2**10, 131 * 2**7), (2 * 8209, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            gradient = (torch.randn(n, generator=draw, device=context.device) ** 3).to(dtype)
            same = torch.equal(first.histogram([(gradient, period)]), block_histogram(gradient, period))
            ours, theirs = first.divisor_errors(gradient), divisor_errors(gradient)
            found.append((same, max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(theirs)))
    return found


@pytest.mark.gpu1
def test_first_step(ranks: Any) -> None:
    """The fused histogram is the plain one, and the errors that a period is chosen by differ by rounding."""
    for same, apart in ranks.options(timeout=280).run(first_steps).values[0]:
        assert same
        assert apart < 1e-12

"""The fused kernels on a GPU: the plain path's indices, steady memory, and few launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def compare_all(context: Any, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Every case, small and large."""
    from gefen_offload.optim.fused.update import FusedUpdate
    from support.fused import LARGE, SMALL, compare

    fused = FusedUpdate(context.device)
    found = []
    for case in (*SMALL, *LARGE):
        context.mark(case.name)
        found.append(compare(case, dtype, context.device, fused))
    return found


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_as_plain(ranks: Any, dtype: torch.dtype) -> None:
    """Indices and magnitudes are the plain path's, the update is within last bits, and cutting changes nothing."""
    for record in ranks.options(timeout=280).run(compare_all, dtype).values[0]:
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


def first_steps(context: Any) -> list[dict[str, Any]]:
    """Every case of a first step's kernels, in three dtypes."""
    from support.first_kernels import DTYPES, LARGE, LITTLE, compare

    return [compare(*case, dtype, context.device) for case in (*LITTLE, *LARGE) for dtype in DTYPES]


@pytest.mark.gpu1
def test_first_step(ranks: Any) -> None:
    """The kernels' histogram is the plain one, and the errors that a period is chosen by differ by rounding."""
    for record in ranks.options(timeout=280).run(first_steps).values[0]:
        assert record["same_counts"], record
        assert record["same_again"], record
        assert record["apart"] < 1e-12, record


def learnt_on(context: Any) -> dict[str, Any]:
    """Periods and codebook of small and large gradients on the device, by the kernels and without them."""
    from gefen_offload.optim.learning import Learning, Newcomer
    from gefen_offload.optim.small_gradients import SMALL

    draw = torch.Generator(context.device).manual_seed(5)
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float64):
        sizes = (7, 2048, SMALL, SMALL + 8, 3 * 2**17)
        gradients = [torch.randn(n, generator=draw, device=context.device).pow(3).to(dtype) for n in sizes]
        for device in (context.device, "cpu"):
            here, learning = [gradient.to(device) for gradient in gradients], Learning()
            periods = learning.periods([Newcomer(gradient, gradient.shape, False) for gradient in here])
            codebook = learning.codebook(list(zip(here, periods, strict=True)))
            found.setdefault(str(dtype), []).append((periods, codebook.tolist()))
    return found


@pytest.mark.gpu1
def test_learnt_as_on_the_cpu(ranks: Any) -> None:
    """Small and large gradients, with kernels (bfloat16) and without (float64), give the CPU's periods and codebook."""
    for device, cpu in ranks.options(timeout=280).run(learnt_on).values[0].values():
        assert device == cpu


def move_momenta(context: Any) -> list[dict[str, Any]]:
    """Every case of GefenMuon's momentum, and three steps of training, in three dtypes."""
    from support.momenta import DTYPES, LARGE, SMALL, compare, train

    trained = [train(dtype, context.device) for dtype in DTYPES]
    return trained + [compare(case, dtype, context.device) for case in (*SMALL, *LARGE) for dtype in DTYPES]


@pytest.mark.gpu1
def test_momentum(ranks: Any) -> None:
    """GefenMuon's kernels give the plain path's bits on the GPU."""
    for record in ranks.options(timeout=280).run(move_momenta).values[0]:
        assert record.get("same", True), record
        assert record.get("indices", 0) == 0, record
        assert record.get("magnitudes", True), record
        assert record.get("updates", True), record

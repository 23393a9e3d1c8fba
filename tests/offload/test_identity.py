"""An offloaded run is the resident run, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gefen_offload.ranks import identical
from support.simulated import Schedule, SimulatedAccelerator, simulated
from support.streamed import Row, both, rows, run

CPU = torch.device("cpu")
ROWS = list(rows())
SCHEDULES = list(Schedule)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_offloaded_repeats_resident(row):
    """Losses, parameters, state, codebook and counters are equal after every step, whenever the copies happen."""
    schedule = SCHEDULES[ROWS.index(row) % len(SCHEDULES)]
    with simulated(SimulatedAccelerator(schedule, seed=ROWS.index(row))):
        offloaded = run(row, CPU, offload=True)
    identical(run(row, CPU, offload=False), offloaded).check()


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_offloaded_repeats_resident_on_a_gpu(ranks, row, fused):
    """The same on CUDA, with the plain path and with the fused kernels."""
    row = replace(row, optimizer={**row.optimizer, "fused": fused})
    for resident, offloaded in ranks.run(both, row).values:
        identical(resident, offloaded).check()


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_default_windows_on_a_gpu(ranks, fused):
    """With the default policy, pieces of the usual size and parameters of megabytes, the bits are equal as well."""
    row = Row("large", torch.bfloat16, {"fused": fused}, small_pieces=False, steps=6)
    for resident, offloaded in ranks.run(large, row).values:
        identical(resident, offloaded).check()


def large(context, row):
    """Worker: `both` with parameters that span several windows."""
    from gefen_offload import OffloadPolicy
    from support import streamed

    shapes = {"embedding": (6000, 1024), "up": (4096, 1024), "bias": (4096,), "down": (1024, 4096), "norm": (1024,)}
    streamed.SHAPES.clear()
    streamed.SHAPES.update(shapes)
    return both(context, replace(row, policy=OffloadPolicy(staging_bytes=3 * 2**20)))

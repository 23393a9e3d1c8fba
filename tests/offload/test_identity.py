"""An offloaded run is the resident run, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gefen_offload import OffloadPolicy
from gefen_offload.ranks import identical
from support.simulated import Schedule, SimulatedAccelerator, simulated
from support.streamed import Row, both, rows, run

CPU = torch.device("cpu")
ROWS = list(rows())
SCHEDULES = list(Schedule)
ON_GPU = 14  # steps: everything that a row does has happened by the thirteenth


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
    dtype = torch.float32 if fused and row.dtype is torch.float64 else row.dtype  # the kernels do not have float64
    row = replace(row, dtype=dtype, optimizer={**row.optimizer, "fused": fused}, steps=ON_GPU)
    for resident, offloaded in ranks.run(both, row).values:
        identical(resident, offloaded).check()


@pytest.mark.gpu1
@pytest.mark.parametrize("deferred", [False, True], ids=["waiting", "deferred"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_parameters_of_megabytes_on_a_gpu(ranks, fused, deferred):
    """With pieces of the usual size and parameters that span several windows of megabytes, the bits are equal too."""
    policy = OffloadPolicy(staging_bytes=3 * 2**20, deferred=deferred)
    row = Row("large", torch.bfloat16, {"fused": fused}, policy, small_pieces=False, large=True, steps=6)
    for resident, offloaded in ranks.run(both, row).values:
        identical(resident, offloaded).check()

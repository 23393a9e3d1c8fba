"""What the README shows is what a reader gets."""

from __future__ import annotations

import pytest

from support.readme import blocks, run_blocks, run_on_gpu
from support.simulated import SimulatedAccelerator, simulated


def test_the_readme_runs(tmp_path):
    """Every Python block of the README runs in order, here with the accelerator simulated on the CPU."""
    assert len(blocks()) >= 5
    with simulated(SimulatedAccelerator()):
        names = run_blocks(str(tmp_path), "cpu")
    assert names["optimizer"].state_offload_active
    assert names["optimizer"].state_dict()["gefen_global_step"] == 11
    assert (tmp_path / "optimizer.pt").exists()


@pytest.mark.gpu1
def test_the_readme_runs_on_a_gpu(ranks, tmp_path):
    """The same blocks, unchanged, on a GPU."""
    assert ranks.run(run_on_gpu, str(tmp_path)).values == [(11, True)]

"""A steady step allocates nothing, copies little more than the state, and nothing where there is nothing to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from gefen_offload import Gefen, OffloadPolicy
from gefen_offload.offload.turns import ABREAST
from gefen_offload.optim.work import Piece, cut
from gefen_offload.ranks import identical
from support.simulated import SimulatedAccelerator, simulated
from support.streamed import Row, SmallPieces, Training, run
from support.witness import bits

CPU = torch.device("cpu")
ROW = Row("steady", policy=OffloadPolicy(staging_bytes=700))


@pytest.fixture
def accelerator():
    """The simulated accelerator, in place for the whole test."""
    with simulated(SimulatedAccelerator()) as accelerator:
        yield accelerator


@pytest.mark.parametrize("deferred", [False, True], ids=["waiting", "deferred"])
def test_nothing_is_allocated(accelerator, deferred):
    """After the first step no stream, event, device or host memory is asked for through the seam."""
    training = Training(replace(ROW, policy=replace(ROW.policy, deferred=deferred)), CPU)
    training.step(0, True)
    accelerator.frozen = True
    for step in range(1, 6):
        training.step(step, True)


def test_a_plan_is_made_once(accelerator, monkeypatch):
    """Steps over the same parameters share one plan; alternating sets of parameters keep theirs."""
    from gefen_offload.offload import engine

    made, plan = [], engine.plan
    monkeypatch.setattr(engine, "plan", lambda *args: made.append(1) or plan(*args))
    training = Training(replace(ROW, sparse_use=True), CPU)
    for step in range(15):
        training.step(step, True)
    assert len(made) <= 3 + 3  # three sets of parameters; until all have been seen, new state starts plans afresh


def test_a_step_without_gradients_moves_nothing(accelerator):
    """It is counted, and no byte is copied."""
    training = Training(ROW, CPU)
    training.step(0, True)
    copies = accelerator.copies
    training.optimizer.zero_grad()
    training.optimizer.step()
    report = training.optimizer.state_offload_report()
    assert accelerator.copies == copies
    assert (report.steps, report.steps_skipped) == (1, 1)


def test_the_first_windows_travel_while_the_step_is_prepared(accelerator, monkeypatch):
    """A step over the same parameters as the last has its first windows on their way before it collects gradients."""
    training = Training(ROW, CPU)
    training.step(0, True)
    collect, seen = training.optimizer._collect, []
    monkeypatch.setattr(training.optimizer, "_collect", lambda: seen.append(accelerator.copies) or collect())
    before = accelerator.copies
    training.step(1, True)
    assert seen[0] > before
    after = accelerator.copies
    training.named["wide"].requires_grad_(False)
    training.step(2, True)
    assert seen[1] == after


def test_a_prefetch_is_cancelled_without_writing_back(accelerator):
    """Where a step does not come to its update, the host state is untouched, and the run goes on as if resident."""
    training = Training(ROW, CPU)
    training.step(0, True)
    before = bits(training.optimizer)["state"]
    gradient, training.named["wide"].grad = training.named["wide"].grad, torch.zeros(12, 40).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        training.optimizer.step()
    training.named["wide"].grad = gradient
    identical(before, bits(training.optimizer)["state"]).check()
    assert training.optimizer._offload.engine._prefetched is not None
    training.optimizer.state_dict()
    assert training.optimizer._offload.engine._prefetched is None
    seen = [training.step(step, True) for step in range(1, 4)]
    identical(run(ROW, CPU, offload=False)[1:4], seen).check()


def test_a_skipped_scaler_step_moves_nothing(accelerator):
    """GradScaler does not call step() on overflow: nothing is copied, nothing counted."""
    training = Training(replace(ROW, overflow=(1,)), CPU)
    training.step(0, True)
    copies = accelerator.copies
    training.step(1, True)
    assert accelerator.copies == copies
    assert training.optimizer.state_offload_report().steps == 1


def test_the_link_carries_the_state_once_each_way(accelerator):
    """Bytes in and bytes out equal the state's, but for less than 16 bytes of padding a tensor."""
    training = Training(replace(ROW, policy=OffloadPolicy(staging_bytes=2**20)), CPU)
    training.step(0, True)
    tensors = [t for s in training.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    exact = sum(t.numel() * t.element_size() for t in tensors)
    report = training.optimizer.state_offload_report()
    assert report.to_device.nbytes == report.to_host.nbytes
    assert exact <= report.to_device.nbytes < exact + 16 * len(tensors)


def test_small_parameters_move_together(accelerator):
    """Hundreds of small parameters are a handful of copies."""
    named = [(f"p{i}", nn.Parameter(torch.randn(24))) for i in range(300)]
    optimizer = Gefen(named)
    optimizer.offload_state_()
    for _, parameter in named:
        parameter.grad = torch.randn(24)
    optimizer.step()
    copies = accelerator.copies
    optimizer.step()
    assert accelerator.copies - copies == 2


def test_staging_is_three_windows(accelerator):
    """Device memory is room for three windows and a small side area, however large the state."""
    named = [(f"p{i}", nn.Parameter(torch.randn(64, 32))) for i in range(20)]
    optimizer = SmallPieces(named, period_one_substrings=("p",))
    optimizer.offload_state_(policy=OffloadPolicy(staging_bytes=1024))
    for _, parameter in named:
        parameter.grad = torch.randn(64, 32)
    optimizer.step()
    side = 5 * (64 + 32) * 4
    assert ABREAST * 1024 <= optimizer.state_offload_report().staging_bytes <= ABREAST * 1024 + side
    assert accelerator.held[0] == optimizer.state_offload_report().staging_bytes


def test_staging_that_grew_is_given_back(accelerator):
    """Where another set of parameters needs a larger ring, the smaller one is gone, with the plans made on it."""
    small, large = nn.Parameter(torch.randn(40)), nn.Parameter(torch.randn(4096))
    optimizer = Gefen([("small", small), ("large", large)])
    small.grad, large.grad = torch.randn(40), torch.randn(4096)
    optimizer.step()
    optimizer.offload_state_(policy=OffloadPolicy(staging_bytes=128))
    for graded in ([small], [small, large], [small]):
        optimizer.zero_grad()
        for parameter in graded:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert accelerator.held[0] == optimizer.state_offload_report().staging_bytes > 4096


def test_a_block_larger_than_a_window_takes_the_room_of_several(accelerator):
    """Device memory does not grow with a block that the ring can hold, and the bits do not change."""
    ended = []
    for offload in (False, True):
        generator = torch.Generator().manual_seed(0)
        named = [(f"p{i}", nn.Parameter(torch.randn(rows, 2048, generator=generator))) for i, rows in enumerate((3, 1))]
        optimizer = SmallPieces([*named, ("small", nn.Parameter(torch.ones(64)))], factored_v_2d=False)
        if offload:
            optimizer.offload_state_(policy=OffloadPolicy(staging_bytes=1024))
        for _ in range(3):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        ended.append([named, optimizer.state_dict()])
    assert max(state["automatic_period"] for state in optimizer.state.values()) >= 2048
    assert optimizer.state_offload_report().staging_bytes <= ABREAST * 1024 + 64
    identical(*ended).check()


def test_a_small_state_takes_a_small_ring(accelerator):
    """Where all of the state fits a fraction of a window, the ring is no larger than it."""
    optimizer = Gefen([("weight", nn.Parameter(torch.randn(8, 8)))])
    optimizer.offload_state_()
    assert optimizer.state_offload_report().staging_bytes < 8192


def test_off_means_off(accelerator):
    """With offload off a step touches the seam not at all."""
    training = Training(ROW, CPU)
    training.step(0, False)
    accelerator.frozen = True
    training.step(1, False)
    training.optimizer.state_dict()
    assert (accelerator.copies, accelerator.allocations) == (0, 0)
    assert training.optimizer._offload is None


class Divisible(Gefen):
    """Gefen whose update says that it may be cut anywhere, and checks the pieces that it gets."""

    STATE_SCHEMA = Gefen.STATE_SCHEMA

    def _cut(self, works):
        return cut(works, None)

    def _divisible(self, works):
        return True

    def _update(self, staged):
        for item in staged:
            assert isinstance(item.piece, Piece)
            for name, tensor in item.tensors.items():
                rows = item.piece.last - item.piece.first
                assert name.startswith("v_") or tensor.shape[0] == rows
        super()._update(staged)


@pytest.mark.parametrize("staging", [200, 1000, 2**20])
def test_a_divisible_update_is_cut_to_fit(accelerator, monkeypatch, staging):
    """Whole parameters are cut into windows of the staging size; without reductions across a cut, the bits are equal.

    The plain path's block means are independent of the cut on the CPU, which is what fused kernels promise everywhere.
    """
    from support import streamed

    monkeypatch.setattr(streamed, "SmallPieces", Divisible)
    row = Row(
        "divisible", optimizer={"force_1d_period_one": True}, policy=OffloadPolicy(staging_bytes=staging), steps=6
    )
    offloaded = run(row, CPU, offload=True)
    identical(run(row, CPU, offload=False), offloaded).check()

"""What only a GPU can show: pinned memory, streams, the allocator, graphs, and the failures of the real runtime."""

from __future__ import annotations

import contextlib
import gc
import warnings

import pytest
import torch
from torch import nn

from gefen_offload import Gefen, OffloadPolicy, OffloadUnsupportedError
from gefen_offload.offload import cuda
from gefen_offload.ranks import identical
from support.streamed import Row, Training, on_cpu
from support.witness import Witness

pytestmark = pytest.mark.gpu1
MIB = 2**20
SHAPES = {"embedding": (20000, 1024), "up": (4096, 1024), "up.bias": (4096,), "down": (1024, 4096), "norm": (1024,)}


def model(device, dtype=torch.bfloat16):
    """Named parameters of about 29 million elements, with gradients."""
    generator = torch.Generator(device).manual_seed(0)
    named = []
    for name, shape in SHAPES.items():
        parameter = nn.Parameter(torch.randn(shape, device=device, generator=generator).to(dtype))
        parameter.grad = torch.randn(shape, device=device, generator=generator).to(dtype) * 1e-3
        named.append((name, parameter))
    return named


def state_tensors(optimizer):
    """Every per-parameter tensor."""
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]


def test_state_lives_in_pinned_host_memory(ranks):
    """Activation frees the state's memory, pins at most 1.05 times its bytes, and leaves the codebook on the GPU."""
    ranks.run(residency)


def residency(context):
    """Worker."""
    optimizer = Gefen(model(context.device))
    optimizer.step()
    exact = sum(t.numel() * t.element_size() for t in state_tensors(optimizer))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.offload_state_(policy=OffloadPolicy(staging_bytes=2 * MIB))
    report = optimizer.state_offload_report()
    assert before - torch.cuda.memory_allocated() >= exact - 3 * 2 * MIB - MIB
    assert all(t.device.type == "cpu" and t.is_pinned() for t in state_tensors(optimizer))
    assert report.pinned_asked == exact
    assert exact <= report.pinned_reserved <= 1.05 * exact
    assert all(t.is_cuda for t in optimizer._shared_tensors().values())
    optimizer.restore_state_()
    assert all(t.is_cuda for t in state_tensors(optimizer))


@pytest.mark.parametrize("deferred", [False, True], ids=["waiting", "deferred"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_steady_step_allocates_nothing_that_stays(ranks, fused, deferred):
    """Memory on the GPU during and after steps is the staging; the fused step takes nothing from the allocator."""
    ranks.run(steady, fused, deferred)


def steady(context, fused, deferred):
    """Worker."""
    named = model(context.device)
    optimizer = Gefen(named, fused=fused)
    optimizer.offload_state_(policy=OffloadPolicy(deferred=deferred))
    base = sum(2 * p.numel() * p.element_size() for _, p in named)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    gc.collect()
    allocated, count = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.max_memory_allocated() - base <= 96 * MIB
    if fused:
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == count


def test_what_a_step_costs(ranks):
    """Offloaded, each byte of the state crosses once each way, in few launches a window; resident, in few in all."""
    cost = ranks.run(costs).values[0]
    assert cost["state"] <= cost["in"] == cost["out"] <= cost["state"] + 16 * 4 * len(SHAPES)  # with padding
    assert cost["windows"] >= 4
    assert cost["offloaded launches"] <= 8 * cost["windows"]
    assert cost["resident launches"] <= 16
    assert cost["resident peak"] <= 64 * MIB


def costs(context):
    """Worker: bytes, windows and launches of a steady step, and what a resident one takes of the GPU's memory."""
    from gefen_offload.optim.fused.launch import Kernel

    optimizer = Gefen(model(context.device))
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, launches = torch.cuda.memory_allocated(), Kernel.launches
    optimizer.step()
    torch.cuda.synchronize()
    cost = {"resident launches": Kernel.launches - launches, "resident peak": torch.cuda.max_memory_allocated() - held}
    optimizer.offload_state_(policy=OffloadPolicy(staging_bytes=4 * MIB))
    optimizer.step()
    before, launches = optimizer.state_offload_report(), Kernel.launches
    optimizer.step()
    after = optimizer.state_offload_report()
    return cost | {
        "state": sum(t.numel() * t.element_size() for t in state_tensors(optimizer)),
        "in": after.to_device.nbytes - before.to_device.nbytes,
        "out": after.to_host.nbytes - before.to_host.nbytes,
        "windows": after.windows - before.windows,
        "offloaded launches": Kernel.launches - launches,
    }


def test_steps_follow_the_callers_stream(ranks):
    """Stepping on a side stream, gradients made there just before, gives the bits of the default stream."""
    ranks.run(side_stream)


def side_stream(context):
    """Worker: the same steps on the default stream and on one of the caller's, with work queued before and after."""
    results = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        named = model(context.device)
        optimizer = Gefen(named)
        optimizer.offload_state_(policy=OffloadPolicy(staging_bytes=4 * MIB, deferred=True))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for step in range(4):
                for _, parameter in named:
                    busy = torch.randn(2048, 2048, device=context.device)
                    for _ in range(3):
                        busy = (busy @ busy).tanh()
                    parameter.grad.mul_(1 + step / 8).add_(busy.sum() * 0)
                optimizer.step()
                for _, parameter in named:
                    parameter.data.mul_(0.999)
            optimizer.state_dict()
        torch.cuda.synchronize()
        results.append({name: parameter.detach().cpu() for name, parameter in named})
    assert all(torch.isfinite(value).all() for value in results[0].values())
    identical(*results).check()


def test_memory_is_given_back(ranks):
    """After restoration and deletion nothing stays on the GPU, and the host memory can be registered again."""
    ranks.run(round_trips)


def round_trips(context):
    """Worker."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer = Gefen(model(context.device), fused=False)
        optimizer.offload_state_(policy=OffloadPolicy(deferred=True))
        optimizer.step()
        optimizer.step()
        del optimizer
        gc.collect()
    assert torch.cuda.memory_allocated() - before < MIB


def test_where_pinning_is_refused_offload_goes_on(ranks):
    """One warning, pageable memory, the report says so, the bits are the same, and later launches see no old error."""
    ranks.run(unpinned)


def unpinned(context):
    """Worker: CUDA is asked to register memory that it must refuse."""

    class Refusing(cuda.CudaAccelerator):
        def _register(self, memory):
            memory.address, address = 1, memory.address
            try:
                super()._register(memory)
            finally:
                memory.address = address

    original, cuda.CudaAccelerator = cuda.CudaAccelerator, Refusing
    try:
        named = model(context.device)
        optimizer = Gefen(named)
        optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.offload_state_()
        assert sum("pageable" in str(w.message) for w in caught) == 1
        optimizer.step()
        report = optimizer.state_offload_report()
        assert report.pinned_reserved == 0
        assert report.pageable > 0
    finally:
        cuda.CudaAccelerator = original
    other = model(context.device)
    resident = Gefen(other)
    resident.step()
    resident.step()
    identical([p.detach().cpu() for _, p in named], [p.detach().cpu() for _, p in other]).check()


def test_a_capture_is_refused(ranks):
    """While the current stream captures a graph, neither activation nor an offloaded step runs; both do afterwards."""
    ranks.run(captured)


def captured(context):
    """Worker."""
    optimizer = Gefen(model(context.device))
    optimizer.step()
    codes = []
    for _ in range(2):
        operation = optimizer.step if optimizer.state_offload_active else optimizer.offload_state_
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            try:
                operation()
            except OffloadUnsupportedError as error:
                codes.append(error.reason.value)
            torch.zeros(1, device=context.device)
        if not optimizer.state_offload_active:
            optimizer.offload_state_()
    assert codes == ["capturable", "capturable"]
    optimizer.step()


def test_a_checkpoint_crosses_over(ranks, tmp_path):
    """Saved offloaded, loaded CPU-mapped from a mapped file with offload on: no GPU memory beyond the window."""
    ranks.run(crossing, str(tmp_path / "checkpoint.pt"))


def crossing(context, path):
    """Worker."""
    optimizer = Gefen(model(context.device))
    optimizer.offload_state_(policy=OffloadPolicy(staging_bytes=2 * MIB))
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.load_state_dict(torch.load(path, mmap=True, map_location="cpu", weights_only=True))
    assert torch.cuda.max_memory_allocated() - before <= MIB
    assert all(t.is_cuda for t in optimizer._shared_tensors().values())
    saved = torch.load(path, weights_only=True)
    identical(on_cpu(saved), on_cpu(optimizer.state_dict())).check()
    optimizer.step()


def test_the_plan_measures_the_link(ranks):
    """A pinned link of several GB/s each way, and a cost per step from it."""
    to_device, to_host, seconds = ranks.run(planned).values[0]
    assert to_device > 1e9
    assert to_host > 1e9
    assert 0 < seconds < 1


def planned(context):
    """Worker."""
    plan = Gefen(model(context.device)).state_offload_plan()
    return plan.link.to_device, plan.link.to_host, plan.seconds_per_step


def test_a_real_copy_failure_poisons(ranks):
    """Host memory that is taken away under the engine: the step raises, and the optimizer knows that it is poisoned."""
    assert ranks.run(taken_away).values[0] == (True, "poisoned")


def taken_away(context):
    """Worker: the first copy back goes to a tensor of the wrong size, which is refused, after the first window."""
    training = Training(Row("taken", policy=OffloadPolicy(staging_bytes=700)), context.device)
    training.step(0, True)
    engine = training.optimizer._offload.engine
    copy = engine.accelerator.copy

    def shortened(pairs, stream):
        back = any(not destination.is_cuda for destination, _ in pairs)
        copy([(destination[:-1], source) for destination, source in pairs] if back else pairs, stream)

    engine.accelerator.copy = shortened
    try:
        training.step(1, True)
    except OffloadUnsupportedError as error:
        return training.optimizer.state_offload_poisoned, error.reason.value
    return False, ""


@pytest.mark.parametrize("operation", ["activation", "restoration", "load"])
def test_when_the_gpu_is_full(ranks, operation):
    """The allocator's own error, nothing changed, nothing kept; with memory again the operation succeeds."""
    ranks.run(full, operation)


def full(context, operation):
    """Worker: the process may take no more memory than it has, in the middle of a run."""
    optimizer = Gefen(model(context.device))
    optimizer.step()
    saved = on_cpu(optimizer.state_dict())
    if operation == "restoration":
        optimizer.offload_state_()
    take = {
        "activation": lambda: optimizer.offload_state_(policy=OffloadPolicy(staging_bytes=16 * MIB)),
        "restoration": optimizer.restore_state_,
        "load": lambda: optimizer.load_state_dict(saved),
    }[operation]
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(context.device).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        filler = fill(context.device)
        witness = Witness(optimizer, Allocator())
        with pytest.raises(torch.OutOfMemoryError):
            take()
        witness.check()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del filler
    take()
    optimizer.step()


def fill(device):
    """Take what is left of the memory that the allocator has, in ever smaller pieces."""
    filler = []
    for size in (16 * MIB, 4 * MIB, MIB):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                filler.append(torch.empty(size, dtype=torch.uint8, device=device))
    return filler


class Allocator:
    """What a witness asks of an accelerator: the GPU memory in use."""

    @property
    def held(self):
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

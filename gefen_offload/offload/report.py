"""What offload would cost here, and what it has cost: two frozen values that print on one screen."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from gefen_offload.offload.accelerator import Accelerator
from gefen_offload.offload.policy import MIB, OffloadPolicy
from gefen_offload.offload.refusals import Subject
from gefen_offload.offload.session import Poison, Session
from gefen_offload.offload.staging import tensors_of
from gefen_offload.offload.turns import ABREAST

PROBE_BYTES = 32 * MIB
PROBE_ROUNDS = 4
GUESSED_BYTES = 1.004  # of state for one element before the first step: an index, and a little for each block

# --- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """Measured bytes a second to the device and back, each alone; None where it was not measured."""

    to_device: float | None
    to_host: float | None


@dataclass(frozen=True)
class OffloadPlan:
    """What activation would do. Bytes, seconds and bytes a second; `estimated` before the first step."""

    parameters: int
    elements: int
    state_bytes: int
    estimated: bool
    freed_bytes: int
    staging_bytes: int
    pinned_bytes: int
    ranks_on_node: int
    node_host_bytes: int
    link: Link
    seconds_per_step: float | None

    def __str__(self) -> str:
        step = "not measured" if self.seconds_per_step is None else f"{self.seconds_per_step * 1e3:.1f} ms"
        return "\n".join(
            [
                f"offload plan: {self.elements:,} elements in {self.parameters} parameters",
                _line("state", f"{_size(self.state_bytes)}{' (estimated: no step yet)' if self.estimated else ''}"),
                _line("freed on the GPU", f"{_size(self.freed_bytes)}, after {_size(self.staging_bytes)} of staging"),
                _line("pinned on the host", _size(self.pinned_bytes)),
                _line("host, this node", f"{_size(self.node_host_bytes)} for {self.ranks_on_node} rank(s)"),
                _line("link", f"{_rate(self.link.to_device)} to the GPU, {_rate(self.link.to_host)} back"),
                _line("added to a step", f"{step} at most, where copies overlap both ways"),
            ]
        )


@dataclass(frozen=True)
class Direction:
    """One direction since activation: bytes, and seconds from the first copy of each step to its last."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float | None:
        """Bytes a second; None before the first measured step."""
        return self.nbytes / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True)
class OffloadReport:
    """What offload has done since activation. Bytes; `poisoned` says why, or is None."""

    active: bool
    policy: OffloadPolicy | None
    steps: int
    steps_skipped: int
    windows: int
    to_device: Direction
    to_host: Direction
    staging_bytes: int
    pinned_asked: int
    pinned_reserved: int
    pageable: int
    poisoned: str | None

    def __str__(self) -> str:
        if not self.active:
            return f"offload is off{f'; poisoned: {self.poisoned}' if self.poisoned else ''}"
        lines = [
            f"offload is on: {self.steps} steps in {self.windows} windows, {self.steps_skipped} without a gradient",
            _line("to the GPU", _direction(self.to_device)),
            _line("back", _direction(self.to_host)),
            _line("staging on the GPU", f"{_size(self.staging_bytes)}, for {ABREAST} windows"),
            _line("pinned on the host", f"{_size(self.pinned_reserved)} for {_size(self.pinned_asked)} of state"),
        ]
        if self.pageable:
            lines.append(_line("pageable", f"{_size(self.pageable)}: copies are slow"))
        if self.poisoned:
            lines.append(_line("poisoned", self.poisoned))
        return "\n".join(lines)


# --- making them ----------------------------------------------------------------------------------------------------


def make_plan(subject: Subject, accelerator: Accelerator, policy: OffloadPolicy) -> OffloadPlan:
    """The plan for this optimizer on this device."""
    named = list(subject.named())
    state, estimated = _state_bytes(subject)
    staging = min(ABREAST * policy.staging_bytes, state)
    link = measure_link(accelerator, pinned=policy.pinned)
    seconds = None
    if link.to_device and link.to_host:
        seconds = max(state / link.to_device, state / link.to_host)
    ranks = _ranks_on_node()
    return OffloadPlan(
        parameters=len(named),
        elements=sum(parameter.numel() for _, parameter in named),
        state_bytes=state,
        estimated=estimated,
        freed_bytes=max(0, state - staging),
        staging_bytes=staging,
        pinned_bytes=state if policy.pinned else 0,
        ranks_on_node=ranks,
        node_host_bytes=state * ranks,
        link=link,
        seconds_per_step=seconds,
    )


def _state_bytes(subject: Subject) -> tuple[int, bool]:
    """The bytes of state, guessed for parameters that have none yet."""
    total, estimated = 0, False
    for _, parameter in subject.named():
        tensors = tensors_of(subject.state.get(parameter))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if not tensors and parameter.requires_grad:
            total += int(parameter.numel() * GUESSED_BYTES)
            estimated = True
    return total, estimated


def measure_link(accelerator: Accelerator, *, pinned: bool) -> Link:
    """Time a few copies each way; nothing is measured where the device has no link."""
    if accelerator.device.type != "cuda":
        return Link(None, None)
    host = torch.from_numpy(accelerator.host(PROBE_BYTES, pinned=pinned).root)
    with accelerator.scope():
        device = accelerator.empty((host.numel(),), torch.uint8)
        stream = accelerator.new_stream()
        stream.wait_event(accelerator.current_stream().record_event(accelerator.new_event()))
        seconds = []
        for pair in ((device, host), (host, device)):
            accelerator.copy([pair], stream)
            stream.synchronize()
            begun = time.perf_counter()
            accelerator.copy([pair] * PROBE_ROUNDS, stream)
            stream.synchronize()
            seconds.append(time.perf_counter() - begun)
    return Link(*(PROBE_ROUNDS * host.numel() / second for second in seconds))


def _ranks_on_node() -> int:
    """How many ranks share this host's memory, as far as the launcher says."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) > 0:
        return int(local)
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if initialized else 1


def make_report(held: Session | Poison | None) -> OffloadReport:
    """What this session has done; nothing where there is none."""
    if not isinstance(held, Session):
        nothing = Direction(0, 0.0)
        return OffloadReport(False, None, 0, 0, 0, nothing, nothing, 0, 0, 0, 0, held.why if held is not None else None)
    traffic, slabs = held.engine.traffic, held.store.slabs
    pinned = [slab for slab in slabs if slab.pinned]
    return OffloadReport(
        active=True,
        policy=held.policy,
        steps=traffic.steps,
        steps_skipped=held.steps_begun - traffic.steps - held.steps_failed,
        windows=traffic.windows,
        to_device=Direction(traffic.bytes_in, traffic.seconds_in),
        to_host=Direction(traffic.bytes_out, traffic.seconds_out),
        staging_bytes=held.engine.staging.nbytes,
        pinned_asked=sum(slab.asked for slab in pinned),
        pinned_reserved=sum(slab.nbytes for slab in pinned),
        pageable=sum(slab.nbytes for slab in slabs if not slab.pinned),
        poisoned=held.poison.why,
    )


# --- printing -------------------------------------------------------------------------------------------------------


def _line(label: str, text: str) -> str:
    return f"  {label:<20}{text}"


def _size(nbytes: int) -> str:
    return f"{nbytes / MIB:,.1f} MiB" if nbytes >= MIB else f"{nbytes / 2**10:,.1f} KiB"


def _rate(rate: float | None) -> str:
    return "not measured" if rate is None else f"{rate / 1e9:.1f} GB/s"


def _direction(direction: Direction) -> str:
    return f"{_size(direction.nbytes)} in {direction.seconds:.3f} s, {_rate(direction.rate)}"

"""The optimizers that are compared: ours in four ways, and others where they are installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import gefen_offload
from gefen_offload.offload.policy import OffloadPolicy
from gefen_offload.optim.gefen import Gefen

Parameters = Sequence[nn.Parameter]


@dataclass(frozen=True)
class Contestant:
    """An optimizer to measure: `build` makes one, `package` must be installed.

    `hooks`: it works from gradients as backward makes them, so it can only be measured in training. `cuda`: it needs a
    GPU. `offloaded`: its state is streamed, and its step is compared with the link's floor.
    """

    name: str
    build: Callable[[Parameters], Any]
    package: str | None = None
    hooks: bool = False
    cuda: bool = True
    offloaded: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot be measured here, or None."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return "not installed"
        return "needs a GPU" if self.cuda and device.type != "cuda" else None

    def version(self) -> str:
        """The version of what is measured: of its package, or else of the library that it comes from."""
        if self.package is not None:
            return importlib.metadata.version(_DISTRIBUTIONS.get(self.package, self.package))
        return str(torch.__version__ if self.name.startswith("torch") else gefen_offload.__version__)


_DISTRIBUTIONS = {"gefen": "gefen-x"}


def ours(*, factored: bool = True, staging: int | None = None, deferred: bool = False) -> Callable[[Parameters], Gefen]:
    """A builder of our Gefen: resident, or offloaded through windows of `staging` bytes."""

    def build(parameters: Parameters) -> Gefen:
        optimizer = Gefen(list(parameters), lr=1e-3, factored_v_2d=factored)
        if staging is not None:
            optimizer.offload_state_(policy=OffloadPolicy(staging_bytes=staging, deferred=deferred))
        return optimizer

    return build


def contestants(staging: int) -> list[Contestant]:
    """All of them, ours first."""
    return [
        Contestant("gefen_offload, resident", ours(), cuda=False),
        Contestant("gefen_offload, resident, block", ours(factored=False), cuda=False),
        Contestant("gefen_offload, offloaded", ours(staging=staging), offloaded=True),
        Contestant("gefen_offload, deferred", ours(staging=staging, deferred=True), offloaded=True),
        Contestant("torch AdamW fused", lambda p: torch.optim.AdamW(list(p), lr=1e-3, fused=True), cuda=False),
        Contestant("gefen-x, resident", _gefen_x, package="gefen"),
        Contestant("bitsandbytes PagedAdamW8bit", _bitsandbytes, package="bitsandbytes"),
        Contestant("torchao CPUOffloadOptimizer", _torchao, package="torchao", hooks=True),
        Contestant("DeepSpeed CPU Adam", _DeepSpeedAdam, package="deepspeed"),
    ]


def _gefen_x(parameters: Parameters) -> Any:
    import gefen  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return gefen.Gefen(list(parameters), lr=1e-3)


def _bitsandbytes(parameters: Parameters) -> Any:
    import bitsandbytes  # type: ignore[import-not-found, unused-ignore]

    return bitsandbytes.optim.PagedAdamW8bit(list(parameters), lr=1e-3)


def _torchao(parameters: Parameters) -> Any:
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return CPUOffloadOptimizer(list(parameters), torch.optim.AdamW, lr=1e-3, fused=True)


class _DeepSpeedAdam:
    """DeepSpeed's CPU Adam as ZeRO's offload uses it: gradients down, float32 masters stepped, parameters up."""

    def __init__(self, parameters: Parameters) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self._parameters = list(parameters)
        self._masters = [nn.Parameter(p.detach().float().cpu().pin_memory()) for p in self._parameters]
        self._gradients = [torch.empty_like(master, pin_memory=True) for master in self._masters]
        self._optimizer = DeepSpeedCPUAdam(self._masters, lr=1e-3)

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        for parameter, master, gradient in zip(self._parameters, self._masters, self._gradients, strict=True):
            if parameter.grad is not None:
                gradient.copy_(parameter.grad, non_blocking=True)
                master.grad = gradient
        torch.cuda.synchronize()
        self._optimizer.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master, non_blocking=True)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

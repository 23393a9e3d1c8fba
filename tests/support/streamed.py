"""Training runs that an offloaded optimizer must repeat to the bit: rows of a matrix, on any device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gefen_offload import Gefen, OffloadPolicy
from gefen_offload.offload.schema import StateSchema
from gefen_offload.optim.work import Piece, Work, cut
from support.solved import solving_once

STEPS = 20
SMALL_PIECE = 64  # elements: makes a parameter of this test span pieces as one of gigabytes does


class SmallPieces(Gefen):
    """Gefen whose plain path cuts parameters into small pieces."""

    STATE_SCHEMA: ClassVar[StateSchema] = Gefen.STATE_SCHEMA

    def _cut(self, works: Sequence[Work]) -> list[Piece]:
        return cut(works, SMALL_PIECE) if not self._divisible(works) else super()._cut(works)


# --- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One training run. Steps are counted from 0; a step in `no_gradient` has none at all."""

    id: str
    dtype: torch.dtype = torch.float32
    optimizer: dict[str, Any] = field(default_factory=dict)
    policy: OffloadPolicy = field(default_factory=lambda: OffloadPolicy(staging_bytes=700))
    activate: tuple[int, ...] = (0,)  # offload_state_() before these steps
    restore: tuple[int, ...] = ()  # restore_state_() before these
    accumulate: int = 1
    clip: float | None = None
    overflow: tuple[int, ...] = ()  # steps whose loss is infinite, under a GradScaler
    schedule: bool = False
    tensor_lr: bool = False
    groups: bool = False
    add_group: int | None = None
    freeze: tuple[int, ...] = ()  # some parameters are frozen before the first of these and thawed before the second
    sparse_use: bool = False  # each step uses some of the parameters only
    no_gradient: tuple[int, ...] = ()
    closure: bool = False
    tied: bool = False
    transposed: bool = False
    alike: bool = False
    small_pieces: bool = True
    large: bool = False
    steps: int = STEPS

    def __str__(self) -> str:
        return self.id


WHEN = {
    "before": {"activate": (0,)},
    "middle": {"activate": (7,)},
    "again": {"activate": (0, 11), "restore": (6,)},
}
WAYS: dict[str, dict[str, Any]] = {
    "basic": {},
    "block": {"optimizer": {"factored_v_2d": False}},
    "refresh": {"optimizer": {"codebook_refresh_every": 4}},
    "period-one": {"optimizer": {"force_1d_period_one": True}},
    "accumulation": {"accumulate": 3},
    "clipping": {"clip": 0.5},
    "scaler": {"overflow": (0, 3, 4, 12)},
    "schedule": {"schedule": True},
    "tensor-lr": {"tensor_lr": True, "schedule": True},
    "groups": {"groups": True},
    "late-group": {"add_group": 9},
    "frozen": {"freeze": (4, 9)},
    "sparse-use": {"sparse_use": True, "no_gradient": (0, 5, 6)},
    "closure": {"closure": True},
    "tied": {"tied": True},
    "transposed": {"transposed": True},
    "alike": {"alike": True},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
POLICIES = (
    OffloadPolicy(staging_bytes=700),
    OffloadPolicy(staging_bytes=1, deferred=True),
    OffloadPolicy(staging_bytes=4000, pinned=False),
    OffloadPolicy(staging_bytes=2**20, deferred=True),
)


def rows() -> Iterator[Row]:
    """Every way of training at every moment of activation; dtypes and policies take turns."""
    for turn, ((way, options), (when, moments)) in enumerate(itertools.product(WAYS.items(), WHEN.items())):
        dtype = DTYPES[(turn + turn // 4) % 4]
        if way == "scaler" and dtype.itemsize == 2:  # torch does not unscale such gradients everywhere
            dtype = torch.float32
        yield Row(f"{way}-{when}", dtype, policy=POLICIES[turn % len(POLICIES)], **options, **moments)
    for dtype, moment in itertools.product(DTYPES, ("factored", "block")):
        name = f"{str(dtype).removeprefix('torch.')}-{moment}"
        options = {"factored_v_2d": moment == "factored", "weight_decay": 0.1}
        yield Row(name, dtype, options, OffloadPolicy(staging_bytes=300, deferred=moment == "block"))
    yield Row("whole-parameters", small_pieces=False, policy=OffloadPolicy(staging_bytes=2000))


# --- one run --------------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (12, 40),
    "wide.bias": (40,),
    "tall": (48, 10),
    "norm": (48,),
    "conv": (4, 3, 3, 3),
    "scalar": (),
    "one": (1,),
    "prime": (97,),
    "empty": (0, 3),
    "square": (16, 16),
    "head": (24, 12),
    "head.bias": (24,),
}
LARGE = {"embedding": (6000, 1024), "up": (4096, 1024), "bias": (4096,), "down": (1024, 4096), "norm": (1024,)}
ALIKE = {f"layer{index}": (16, 8) for index in range(8)} | {"odd": (33,)}


class Training:
    """A row on one device: the parameters, the optimizer, and what each step does."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self.row, self.device = row, device
        self.named = self._parameters(LARGE if row.large else ALIKE if row.alike else SHAPES)
        self.late = self._parameters({"late": (20, 6), "late.bias": (20,)}) if row.add_group is not None else {}
        self.optimizer = self._optimizer()
        self.scaler = torch.amp.GradScaler(device.type, init_scale=8.0, enabled=bool(row.overflow))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7) if row.schedule else None

    def _parameters(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, nn.Parameter]:
        named = {}
        for name, shape in shapes.items():
            value = self._random(f"value of {name}", shape)
            if self.row.transposed and len(shape) == 2:
                value = value.t().contiguous().t()
            named[name] = nn.Parameter(value)
        return named

    def _random(self, what: str, shape: Sequence[int]) -> Tensor:
        seed = int.from_bytes(what.encode(), "little") % 2**31
        values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
        return values.to(self.row.dtype).to(self.device)

    def _optimizer(self) -> Gefen:
        kind = SmallPieces if self.row.small_pieces else Gefen
        lr: float | Tensor = torch.tensor(0.02) if self.row.tensor_lr else 0.02
        items = list(self.named.items())
        params: list[Any] = items
        if self.row.groups:
            params = [
                {"params": items[:3]},
                {"params": items[3:7], "lr": 0.05, "weight_decay": 0.1},
                {"params": items[7:], "beta1": 0.8, "beta2": 0.95, "eps": 1e-6},
            ]
        return kind(params, lr, **self.row.optimizer)

    def loss(self, step: int, micro: int) -> Tensor:
        """A loss whose gradient depends on the parameters, so that one wrong bit spreads."""
        total = torch.zeros((), device=self.device, dtype=self.row.dtype)
        for index, (name, parameter) in enumerate({**self.named, **self.late}.items()):
            if self.row.sparse_use and (index + step) % 3 == 0:
                continue
            target = self._random(f"{name} {step} {micro}", parameter.shape)
            total = total + ((parameter - target) ** 2).sum() * 0.1
        if self.row.tied:
            total = total + (self.named["wide"].sum(0) * self.named["wide.bias"]).sum() * 0.01
            total = total + (self.named["wide"] ** 2).sum() * 0.05
        return total * float("inf") if step in self.row.overflow else total

    def step(self, step: int, offload: bool) -> dict[str, Any]:
        """One training step; what an onlooker sees after it."""
        self._before(step, offload)
        self.optimizer.zero_grad()
        losses = self._closed(step) if self.row.closure else self._plain(step)
        if self.scheduler is not None:
            self.scheduler.step()
        return {"losses": losses, "parameters": {n: p.detach().cpu().clone() for n, p in self._all().items()}}

    def _plain(self, step: int) -> list[Tensor]:
        losses = []
        for micro in range(self.row.accumulate):
            loss = self.loss(step, micro)
            if step not in self.row.no_gradient:
                self.scaler.scale(loss).backward()
            losses.append(loss.detach().cpu())
        if self.row.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._all().values(), self.row.clip)
        self.scaler.step(self.optimizer) if self.row.overflow else self.optimizer.step()
        self.scaler.update()
        return losses

    def _closed(self, step: int) -> list[Tensor]:
        def closure() -> Tensor:
            loss = self.loss(step, 0)
            loss.backward()
            return loss.detach()

        return [self.optimizer.step(closure).cpu()]

    def _before(self, step: int, offload: bool) -> None:
        if offload and step in self.row.restore:
            self.optimizer.restore_state_()
        if offload and step in self.row.activate:
            self.optimizer.offload_state_(policy=self.row.policy)
        if step == self.row.add_group:
            self.optimizer.add_param_group({"params": list(self.late.items()), "lr": 0.01})
        if step in self.row.freeze:
            for name in ("wide", "norm", "scalar"):
                self.named[name].requires_grad_(step == self.row.freeze[1])

    def _all(self) -> dict[str, nn.Parameter]:
        return {**self.named, **self.late}


def run(row: Row, device: torch.device, *, offload: bool) -> list[dict[str, Any]]:
    """What an onlooker sees after each step, and the state at the end."""
    training = Training(row, device)
    seen = [training.step(step, offload) for step in range(row.steps)]
    if offload:
        assert training.optimizer.state_offload_active
    return [*seen, {"state": on_cpu(training.optimizer.state_dict())}]


def on_cpu(value: Any) -> Any:
    """The same containers with their tensors copied to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return [on_cpu(item) for item in value] if isinstance(value, (list, tuple)) else value


def both(context: Any, row: Row) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Worker: the resident and the offloaded run of a row, on the rank's own device."""
    with solving_once():
        return run(row, context.device, offload=False), run(row, context.device, offload=True)

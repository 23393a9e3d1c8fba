"""Gefen: AdamW's update with about one byte of state per parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gefen_offload.offload.anchors import same
from gefen_offload.offload.pieces import Launch
from gefen_offload.offload.schema import Cut, StateSchema, TensorEntry
from gefen_offload.optim import checkpoint
from gefen_offload.optim import fused as kernels
from gefen_offload.optim.checkpointed import Checkpointed
from gefen_offload.optim.codebook import requantise_map
from gefen_offload.optim.groups import (
    NAME_PREFIX,
    as_groups,
    check_distinct,
    check_number,
    check_options,
    fragments,
    named,
    pair,
    require_kernels,
    split_betas,
)
from gefen_offload.optim.learning import Learning, Newcomer, PeriodRule, refuse_orphans
from gefen_offload.optim.levels import Levels, Remap
from gefen_offload.optim.replay import KEPT, Replay, stepped_keys, with_gradients
from gefen_offload.optim.shard import is_sharded, local_of
from gefen_offload.optim.update import plain_update
from gefen_offload.optim.work import PIECE_ELEMENTS, Piece, Scalars, StagedPiece, Work, cut

if TYPE_CHECKING:
    from gefen_offload.optim.fused.program import Program

__all__ = ["Gefen", "Graded", "as_groups"]

Updater = Callable[[Sequence[StagedPiece], Tensor], None]


class Graded(NamedTuple):
    """A parameter that has a gradient now: its key in `state`, and what this rank holds of it and of the gradient."""

    key: Tensor
    parameter: Tensor
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    name: str
    factored: bool


class Gefen(Checkpointed):
    """AdamW with 8-bit momentum in a learnt codebook and a second moment shared by blocks, or by rows and columns.

    `params` are tensors, (name, tensor) pairs, or group dicts, of float16, bfloat16, float32 or float64, in any shape.
    `lr` may be a 1-element tensor. `fused=None` takes the fused kernels where they can run, else the plain path; True
    where they cannot run is an error. `factored_v_2d=False` gives matrices the block second moment as well.
    `codebook_refresh_every=N` learns the codebook anew every N steps. `capturable=True` keeps the counters on the
    device, so that a step can be captured in a CUDA graph after one eager step. `force_1d_period_one` and
    `period_one_substrings` (found in a name, in any case) give those parameters blocks of one element. `verbose` prints
    each period found.

    On the first step with a gradient each parameter gets its period, and all share the codebook learnt then; a first
    step of zeros, as some wrappers take, leaves the codebook to the next. Sharded parameters (FSDP2) are stepped shard
    by shard with the block second moment, and `state_dict()` is then of this rank and loads on the same topology only.

    The constructor raises a ValueError or TypeError naming the option or the parameter that is wrong.
    """

    STATE_SCHEMA: ClassVar[StateSchema] = StateSchema(
        tensors=(
            TensorEntry("m_codebook", torch.uint8, Cut.BLOCKS),
            TensorEntry("m_magnitude", torch.float32, Cut.BLOCKS),
            TensorEntry("vmean", torch.float32, Cut.BLOCKS),
            TensorEntry("v_row", torch.float32, Cut.WHOLE),
            TensorEntry("v_col", torch.float32, Cut.WHOLE),
        ),
        plain={"name": str, "automatic_period": int, "step": int, "vmean_step": int, "factored_step": int},
    )

    _eager: ClassVar[Callable[..., Any]]  # `_step`, closed to torch.compile
    OWN = (
        "_fused",
        "_factored_v_2d",
        "_refresh_every",
        "_capturable",
        "_period_rule",
        "_verbose",
        "_levels",
        "_global_step",
    )
    _moments: ClassVar[tuple[checkpoint.Moment, ...]] = (
        checkpoint.Moment("vmean_step", checkpoint.block_shapes),
        checkpoint.Moment("factored_step", checkpoint.factor_shapes, matrices_only=True),
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        fused: bool | None = None,
        factored_v_2d: bool = True,
        codebook_refresh_every: int = 0,
        capturable: bool = False,
        force_1d_period_one: bool = False,
        period_one_substrings: Iterable[str] = (),
        verbose: bool = False,
    ) -> None:
        beta1, beta2 = pair(betas)
        defaults = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        self._set_up(
            fused=fused,
            factored_v_2d=factored_v_2d,
            codebook_refresh_every=codebook_refresh_every,
            capturable=capturable,
            force_1d_period_one=force_1d_period_one,
            period_one_substrings=period_one_substrings,
            verbose=verbose,
        )
        self._check_group(defaults)
        super().__init__(as_groups(params), defaults)

    def _set_up(
        self,
        *,
        fused: bool | None,
        factored_v_2d: bool,
        codebook_refresh_every: int,
        capturable: bool,
        force_1d_period_one: bool,
        period_one_substrings: Iterable[str],
        verbose: bool,
    ) -> None:
        check_number("codebook_refresh_every", codebook_refresh_every, least=0)
        if codebook_refresh_every != int(codebook_refresh_every):
            raise ValueError(f"codebook_refresh_every must be a whole number of steps, not {codebook_refresh_every!r}")
        if capturable and codebook_refresh_every:
            raise ValueError(
                f"capturable=True and codebook_refresh_every={codebook_refresh_every} exclude each other: the codebook "
                "is learnt on the host, which a replayed CUDA graph never returns to"
            )
        if fused and capturable:
            raise ValueError(
                "fused=True and capturable=True exclude each other: the fused kernels take their hyper-parameters from "
                "the host; leave fused at None"
            )
        self._fused = fused
        self._factored_v_2d = factored_v_2d
        self._refresh_every = codebook_refresh_every
        self._capturable = capturable
        self._period_rule = PeriodRule(force_1d_period_one, fragments(period_one_substrings))
        self._verbose = verbose
        self._levels = Levels()
        self._global_step = 0
        self._set_up_kernels()

    def _set_up_kernels(self) -> None:
        if not hasattr(Gefen, "_eager"):  # not on import: it loads all of dynamo, as torch's Optimizer does later too
            Gefen._eager = torch.compiler.disable(_step, reason=_EAGER)  # type: ignore[no-untyped-call]
        self._updaters: dict[torch.device, Updater] = {}
        self._replays: list[Replay] = []
        self._learning = Learning()

    # --- groups ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: `params` as in the constructor, and its own options (`betas`, or `beta1` and `beta2`).

        While the state is offloaded this is a collective call: what one rank refuses, all refuse.
        """
        with self._together("add_param_group()") as pact:
            self._append_group(param_group)
            self._note_group_added(self.param_groups[-1], pact)

    def _append_group(self, param_group: dict[str, Any]) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group is a dict, not a {type(param_group).__name__}")
        if "params" not in param_group:
            raise ValueError(f"the parameter group has no 'params', only {sorted(map(str, param_group))}")
        group = split_betas(param_group)
        prefix = group.pop(NAME_PREFIX, f"group_{len(self.param_groups)}_")
        tensors, names, made_up = named(group["params"], prefix)
        check_distinct(list(zip(names, tensors, strict=True)), (p for g in self.param_groups for p in g["params"]))
        self._check_group({**self.defaults, **group})
        if self._fused:
            require_kernels(zip(names, tensors, strict=True))
        super().add_param_group({**group, "params": tensors, "param_names": names, "param_names_synthesized": made_up})

    def _check_group(self, options: dict[str, Any]) -> None:
        check_options(options)

    # --- the step ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure` returns, if there is one.

        Inside torch.compile it runs as it is, after a graph break; with `fullgraph=True` torch refuses it, and while
        the state is offloaded it refuses with the reason `compiling`.
        """
        self._refuse_tracing()
        return Gefen._eager(self, closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        keys, gradients = with_gradients(self.param_groups)
        if not self._replay(keys, gradients):
            self._take_step(keys)
        self._global_step += 1
        self._step_counted()
        return loss

    def _replay(self, keys: Sequence[object], gradients: Sequence[Tensor]) -> bool:
        """Take the step as an earlier one over the same parameters, if there is one and it can be."""
        if self._refresh_due():
            return False
        for index, replay in enumerate(self._replays):
            if replay.matches(keys):
                if index:
                    self._replays.insert(0, self._replays.pop(index))
                return replay.take(self, gradients)
        return False

    def _take_step(self, keys: Sequence[object]) -> None:
        graded = self._collect()
        if not graded:
            return
        self._prepare(graded)
        works = self._works(graded)
        programs: list[Program] = []

        def prepare(windows: Sequence[Sequence[StagedPiece]]) -> Launch:
            program = self._program(windows)
            if program is None:
                return lambda index: self._update(windows[index])
            programs.append(program)
            return program.launch

        again = self._run_update(self._cut(works), prepare, divisible=self._divisible(works))
        self._replays = [replay for replay in self._replays if replay.stands(self) and not replay.matches(keys)]
        if programs and self._levels.learnt and same(stepped_keys(works), keys):
            self._replays = [Replay(self, works, programs[0], again), *self._replays[: KEPT - 1]]
        self._count(works)

    def _program(self, windows: Sequence[Sequence[StagedPiece]]) -> Program | None:
        """The launches of all windows together, where one device's kernels can step every piece in place."""
        devices = {staged.piece.work.parameter.device for window in windows for staged in window}
        device = next(iter(devices))
        program = getattr(self._updater_for(device), "program", None) if len(devices) == 1 else None
        return program(windows, self._levels.on(device)) if program is not None else None

    def _collect(self) -> list[Graded]:
        """Every parameter with a gradient and an element, in the groups' order; changes nothing."""
        graded = []
        for group in self.param_groups:
            for key in group["params"]:
                if key.grad is not None and key.numel():
                    graded.append(self._graded(key, group, self.state.get(key, {})))
        return [item for item in graded if item.gradient.numel()]

    def _graded(self, key: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Graded:
        gradient = key.grad
        name = state["name"] if "name" in state else self._name_of(key, group)
        if gradient is None or gradient.layout is not torch.strided or gradient.is_complex():
            raise RuntimeError(f"{name} has a sparse or complex gradient; Gefen takes dense real ones")
        sharded = is_sharded(key)
        parameter = key
        if sharded:
            parameter, gradient = local_of(key), local_of(gradient)
            if parameter.shape != gradient.shape:
                shapes = f"{tuple(gradient.shape)}, the parameter's of {tuple(parameter.shape)}"
                raise RuntimeError(
                    f"this rank's shard of the gradient of {name} is of shape {shapes}: place them alike"
                )
        factored = self._factored_v_2d and not sharded and key.dim() == 2
        return Graded(key, parameter, gradient.reshape(-1).resolve_neg(), group, state, name, factored)

    def _works(self, graded: Sequence[Graded]) -> list[Work]:
        """What the update works on; parameters of one group and one age share their scalars."""
        works = []
        offloaded = self.state_offload_active
        shared: dict[tuple[int, int, int], Scalars] = {}
        for item in graded:
            period = item.state["automatic_period"]
            if not offloaded and item.state["m_codebook"].device != item.parameter.device:
                raise RuntimeError(
                    f"the state of {item.name} is on {item.state['m_codebook'].device} and the parameter on "
                    f"{item.parameter.device}: after moving a model call move_state_()"
                )
            if not item.gradient.numel() == item.parameter.numel() == item.state["m_codebook"].numel():
                raise RuntimeError(
                    f"{item.name} has {item.parameter.numel()} elements now, its gradient {item.gradient.numel()} and "
                    f"its state {item.state['m_codebook'].numel()}: it was resized while the optimizer held it; make a "
                    "new optimizer, or drop its state (`del optimizer.state[p]`) and its gradient"
                )
            blocks = item.gradient.numel() // period
            scalars = self._scalars(item, shared)
            works.append(
                Work(
                    item.parameter,
                    item.gradient,
                    item.group,
                    item.state,
                    item.name,
                    period,
                    blocks,
                    item.factored,
                    scalars,
                )
            )
        return works

    def _scalars(self, item: Graded, shared: dict[tuple[int, int, int], Scalars]) -> Scalars:
        counters = [item.state[name] for name in self._counters(item.factored)]
        step, age = counters[0], counters[-1]
        if isinstance(step, Tensor):  # capturable: nothing on the host says which counters are equal
            return self._read_scalars(item.group, step + 1, age + 1)
        key = (id(item.group), step, age)
        if key not in shared:
            shared[key] = self._read_scalars(item.group, step + 1, age + 1)
        return shared[key]

    def _read_scalars(self, group: dict[str, Any], step: int | Tensor, age: int | Tensor) -> Scalars:
        """A group's hyper-parameters for parameters at their `step`-th step whose second moment is at its `age`-th."""
        lr = group["lr"]
        if isinstance(lr, Tensor):
            on_device = isinstance(step, Tensor) and lr.device == step.device
            lr = lr.reshape(()).double() if on_device else float(lr)
        return Scalars(
            lr=lr,
            beta1=group["beta1"],
            beta2=group["beta2"],
            eps=group["eps"],
            decay=1 - lr * group["weight_decay"],
            bias1=1 - group["beta1"] ** _precise(step),
            bias2=1 - group["beta2"] ** _precise(age),
        )

    def _counters(self, factored: bool) -> tuple[str, ...]:
        """The counters of `state[p]` that this step advances: its steps first, the age of its second moment last."""
        return ("step", "factored_step" if factored else "vmean_step")

    def _cut(self, works: Sequence[Work]) -> list[Piece]:
        """The pieces of a step; the same whether the state is resident or offloaded."""
        return cut(works, None if self._divisible(works) else PIECE_ELEMENTS)

    def _divisible(self, works: Sequence[Work]) -> bool:
        """Whether every work is stepped by the fused kernels, whose results do not depend on how it is cut."""
        dtypes = kernels.DTYPES
        return all(
            self._updater_for(work.parameter.device) is not plain_update
            and work.parameter.dtype in dtypes
            and work.gradient.dtype in dtypes
            for work in works
        )

    def _updater_for(self, device: torch.device) -> Updater:
        """What steps staged pieces on `device`, given the codebook there: the fused kernels, or the plain path."""
        if device not in self._updaters:
            self._updaters[device] = kernels.fused_update(device) if self._takes_kernels(device) else plain_update
        return self._updaters[device]

    def _takes_kernels(self, device: torch.device) -> bool:
        """Whether steps on `device` are those of the fused kernels."""
        wanted = device.type == "cuda" if self._fused is None else self._fused  # True on the CPU: interpreted
        return wanted and not self._capturable and kernels.available(device, torch.float32)

    def _update(self, staged: Sequence[StagedPiece]) -> None:
        """Step the staged pieces on the current stream."""
        for device, pieces in _by_device(staged).items():
            self._updater_for(device)(pieces, self._levels.on(device))

    def _count(self, works: Sequence[Work]) -> None:
        """One step more for every parameter that stepped."""
        for work in works:
            for counter in self._counters(work.factored):
                work.state[counter] += 1

    # --- a parameter's first step, and the codebook ---

    def _prepare(self, graded: Sequence[Graded]) -> None:
        """Find what this step needs first: periods, codebook, state. All of it is computed before any is committed."""
        unready = [item for item in graded if self._counters(item.factored)[-1] not in item.state]
        if not unready and self._levels.learnt and not self._refresh_due():
            return
        _refuse_capture(unready or graded)
        periods = self._periods_of([item for item in unready if "automatic_period" not in item.state])
        levels = self._next_levels(graded, periods)
        remap = self._remap_to(levels) if levels is not None else None
        requests = [(item.key, self._missing(item, periods)) for item in unready]
        allocated = self._allocate_state(requests) if requests else []
        if remap is not None:
            remap()
        if levels is not None:
            self._levels = levels
        for item, tensors in zip(unready, allocated, strict=True):
            self._commit_first(item, periods.get(item.key), tensors)

    def _commit_first(self, item: Graded, period: int | None, tensors: dict[str, Tensor]) -> None:
        if period is not None:
            item.state["automatic_period"] = period
            self._say(f"{item.name}: period {period} of {item.gradient.numel()} elements")
        item.state["name"] = item.name
        item.state.update(tensors)
        for counter in self._counters(item.factored):
            item.state.setdefault(counter, self._zero(item.parameter.device))
        self.state[item.key] = item.state
        if self._capturable and not isinstance(self._global_step, Tensor):
            self._global_step = torch.tensor(self._global_step, device=item.parameter.device)

    def _zero(self, device: torch.device) -> int | Tensor:
        return torch.zeros((), dtype=torch.float32, device=device) if self._capturable else 0

    def _periods_of(self, items: Sequence[Graded]) -> dict[Tensor, int]:
        newcomers = []
        for item in items:
            shape = item.parameter.shape
            newcomers.append(Newcomer(item.gradient, shape, self._period_rule.forces_one(item.name, len(shape))))
        return dict(zip((item.key for item in items), self._learning.periods(newcomers), strict=True))

    def _missing(self, item: Graded, periods: dict[Tensor, int]) -> checkpoint.Shapes:
        """The state tensors, shapes and dtypes, that this parameter steps with and does not have."""
        period = periods.get(item.key) or item.state["automatic_period"]
        shapes = self._state_shapes(item.parameter.shape, period, item.factored)
        return {name: shape for name, shape in shapes.items() if name not in item.state}

    def _state_shapes(self, shape: torch.Size, period: int, factored: bool) -> checkpoint.Shapes:
        """The shapes and dtypes of the state tensors of a parameter of this shape and period."""
        second = (checkpoint.factor_shapes if factored else checkpoint.block_shapes)(shape, period)
        return checkpoint.momentum_shapes(shape, period) | second

    def _refresh_due(self) -> bool:
        return bool(self._refresh_every and self._global_step and self._global_step % self._refresh_every == 0)

    def _next_levels(self, graded: Sequence[Graded], periods: dict[Tensor, int]) -> Levels | None:
        """The codebook learnt from the current gradients, if this step learns one; none is replaced by a blank one."""
        if self._levels.learnt and not self._refresh_due():
            return None
        if self._levels.tensor is None:
            refuse_orphans(self.state.values())
        tensor = self._learning.codebook(
            [(item.gradient, periods.get(item.key) or item.state["automatic_period"]) for item in graded]
        )
        levels = Levels(tensor.to(graded[0].parameter.device))
        if levels.blank and self._levels.tensor is not None:
            return None
        self._say(f"codebook learnt from {sum(item.gradient.numel() for item in graded)} elements")
        return levels

    def _remap_to(self, levels: Levels) -> Callable[[], None] | None:
        """What re-quantises every stored index from the present codebook to `levels`, with nothing left to allocate."""
        if self._levels.tensor is None or levels.tensor is None:
            return None
        self._guard_read()
        table = requantise_map(self._levels.tensor, levels.tensor)
        return Remap(table, [state["m_codebook"] for state in self.state.values() if "m_codebook" in state])

    def _state_replaced(self) -> None:
        self._replays.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_up_kernels()

    def _say(self, sentence: str) -> None:
        if self._verbose:
            print(f"{type(self).__name__}: {sentence}")


def _step(optimizer: Gefen, closure: Callable[[], Any] | None) -> Any:
    return optimizer._step(closure)


_EAGER = "Gefen decides on the host what a step is made of; compile the model and the loss, and let step() run outside"


def _precise(count: int | Tensor) -> int | Tensor:
    return count.double() if isinstance(count, Tensor) else count


def _by_device(staged: Sequence[StagedPiece]) -> dict[torch.device, Sequence[StagedPiece]]:
    first = staged[0].piece.work.parameter.device
    if all(item.piece.work.parameter.device == first for item in staged):
        return {first: staged}
    split: dict[torch.device, list[StagedPiece]] = {}
    for item in staged:
        split.setdefault(item.piece.work.parameter.device, []).append(item)
    return dict(split)


def _refuse_capture(graded: Sequence[Graded]) -> None:
    if any(item.parameter.is_cuda for item in graded) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{graded[0].name} steps for the first time during a CUDA graph capture: periods and codebook are found on "
            "the host; take one eager step with every gradient before capturing"
        )

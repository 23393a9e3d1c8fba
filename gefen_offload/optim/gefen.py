"""Gefen: AdamW's update with about one byte of state per parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gefen_offload.offload.mixin import StateOffloadMixin
from gefen_offload.offload.schema import Cut, StateSchema, TensorEntry
from gefen_offload.optim import checkpoint
from gefen_offload.optim import fused as kernels
from gefen_offload.optim.codebook import BINS, block_histogram, requantise_map, solve_codebook
from gefen_offload.optim.groups import check_distinct, check_number, check_options, named, split_betas
from gefen_offload.optim.levels import Levels, Remap
from gefen_offload.optim.period import find_period
from gefen_offload.optim.shard import is_sharded, local_of, shard_tag
from gefen_offload.optim.update import plain_update
from gefen_offload.optim.work import PIECE_ELEMENTS, Piece, Scalars, StagedPiece, Work, cut

Updater = Callable[[Sequence[StagedPiece], Tensor], None]

MOMENTS = (
    checkpoint.Moment("vmean_step", checkpoint.block_shapes),
    checkpoint.Moment(
        "factored_step", lambda shape, period: checkpoint.factor_shapes(shape) if len(shape) == 2 else None
    ),
)


class Graded(NamedTuple):
    """A parameter that has a gradient now: its key in `state`, and what this rank holds of it and of the gradient."""

    key: Tensor
    parameter: Tensor
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    name: str
    factored: bool


class Gefen(StateOffloadMixin, Optimizer):
    """AdamW with 8-bit momentum in a learnt codebook and a second moment shared by blocks, or by rows and columns.

    `params` are tensors, (name, tensor) pairs, or group dicts, of float16, bfloat16, float32 or float64, in any shape.
    `lr` may be a 1-element tensor. `fused=None` takes the fused kernels where they can run, else the plain path; True
    where they cannot run is an error. `factored_v_2d=False` gives matrices the block second moment as well.
    `codebook_refresh_every=N` learns the codebook anew every N steps. `capturable=True` keeps the counters on the
    device, so that a step can be captured in a CUDA graph after one eager step. `force_1d_period_one` and
    `period_one_substrings` (found in a name, in any case) give those parameters blocks of one element. `verbose` prints
    each period found.

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
    _moments: ClassVar[tuple[checkpoint.Moment, ...]] = MOMENTS

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
        defaults = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
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
        self._force_1d_period_one = force_1d_period_one
        one = (period_one_substrings,) if isinstance(period_one_substrings, str) else period_one_substrings
        self._period_one_substrings = tuple(fragment.lower() for fragment in one)
        self._verbose = verbose
        if not hasattr(Gefen, "_eager"):  # not on import: it loads all of dynamo, as torch's Optimizer does here too
            Gefen._eager = torch.compiler.disable(Gefen._step, reason=_EAGER)
        self._updaters: dict[torch.device, Updater] = {}
        self._levels = Levels()
        self._global_step: int | Tensor = 0

    # --- groups ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: `params` as in the constructor, and its own options (`betas`, or `beta1` and `beta2`)."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group is a dict, not a {type(param_group).__name__}")
        group = split_betas(param_group)
        prefix = group.pop(_PREFIX, f"group_{len(self.param_groups)}_")
        tensors, names, made_up = named(group["params"], prefix)
        check_distinct(list(zip(names, tensors, strict=True)), (p for g in self.param_groups for p in g["params"]))
        self._check_group({**self.defaults, **group})
        if self._fused:
            _require_kernels(zip(names, tensors, strict=True))
        super().add_param_group({**group, "params": tensors, "param_names": names, "param_names_synthesized": made_up})
        self._note_group_added(self.param_groups[-1])

    def _check_group(self, options: dict[str, Any]) -> None:
        """Raise where a group's options, defaults filled in, are missing or out of range."""
        check_options(options)

    # --- the step ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure` returns, if there is one.

        Inside torch.compile it runs as it is, after a graph break; with `fullgraph=True` torch refuses it.
        """
        return Gefen._eager(self, closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        graded = self._collect()
        if graded:
            self._prepare(graded)
            works = self._works(graded)
            self._run_update(self._cut(works), self._update, divisible=self._divisible(works))
            self._count(works)
        self._global_step += 1
        return loss

    def _collect(self) -> list[Graded]:
        """Every parameter with a gradient and an element, in the groups' order; changes nothing."""
        graded = []
        for group in self.param_groups:
            for key in group["params"]:
                if key.grad is not None and key.numel():
                    graded.append(self._graded(key, group, self.state.get(key, {})))
        return [item for item in graded if item.gradient.numel()]

    def _names_of(self, group: dict[str, Any]) -> list[str]:
        """The names of a group's parameters; made up where a wrapper has replaced the parameters."""
        names: list[str] = group.get("param_names", [])
        if len(names) == len(group["params"]):
            return names
        index = next(i for i, other in enumerate(self.param_groups) if other is group)
        return [f"group_{index}_param_{position}" for position in range(len(group["params"]))]

    def _name_of(self, key: Tensor, group: dict[str, Any]) -> str:
        return next(name for name, p in zip(self._names_of(group), group["params"], strict=True) if p is key)

    def _graded(self, key: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Graded:
        gradient = key.grad
        name = state["name"] if "name" in state else self._name_of(key, group)
        if gradient is None or gradient.layout is not torch.strided or gradient.is_complex():
            raise RuntimeError(f"{name} has a sparse or complex gradient; Gefen takes dense real ones")
        sharded = is_sharded(key)
        if sharded:
            key_local, gradient = local_of(key), local_of(gradient)
        else:
            key_local = key
        factored = self._factored_v_2d and not sharded and key.dim() == 2
        return Graded(key, key_local, gradient.reshape(-1), group, state, name, factored)

    def _works(self, graded: Sequence[Graded]) -> list[Work]:
        """What the update works on; parameters of one group and one age share their scalars."""
        works = []
        shared: dict[tuple[int, int, int], Scalars] = {}
        for item in graded:
            period = item.state["automatic_period"]
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
            can = self._fused is not False and not self._capturable and kernels.available(device, torch.float32)
            self._updaters[device] = kernels.fused_update(device) if can else plain_update
        return self._updaters[device]

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
        periods = {item.key: self._period_of(item) for item in unready if "automatic_period" not in item.state}
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

    def _period_of(self, item: Graded) -> int:
        name = item.name.lower()
        one = self._force_1d_period_one and item.parameter.dim() == 1
        one = one or any(fragment in name for fragment in self._period_one_substrings)
        return find_period(item.gradient, item.parameter.shape, force_one=one)

    def _missing(self, item: Graded, periods: dict[Tensor, int]) -> checkpoint.Shapes:
        """The state tensors, shapes and dtypes, that this parameter steps with and does not have."""
        period = periods.get(item.key) or item.state["automatic_period"]
        shapes = self._state_shapes(item.parameter.shape, period, item.factored)
        return {name: shape for name, shape in shapes.items() if name not in item.state}

    def _state_shapes(self, shape: torch.Size, period: int, factored: bool) -> checkpoint.Shapes:
        """The shapes and dtypes of the state tensors of a parameter of this shape and period."""
        momentum = checkpoint.momentum_shapes(shape, period)
        return momentum | (checkpoint.factor_shapes(shape) if factored else checkpoint.block_shapes(shape, period))

    def _refresh_due(self) -> bool:
        return bool(self._refresh_every and self._global_step and self._global_step % self._refresh_every == 0)

    def _next_levels(self, graded: Sequence[Graded], periods: dict[Tensor, int]) -> Levels | None:
        """The codebook learnt from the current gradients, if this step learns one."""
        if self._levels.learnt and not self._refresh_due():
            return None
        if self._levels.tensor is None:
            _refuse_orphans(self.state.values())
        counts = torch.zeros(BINS, dtype=torch.int64)
        for item in graded:
            counts += self._histogram(item, periods.get(item.key) or item.state["automatic_period"]).cpu()
        tensor = solve_codebook(counts)
        self._say(f"codebook learnt from {int(counts.sum())} elements")
        return Levels(tensor.to(self.param_groups[0]["params"][0].device))

    def _histogram(self, item: Graded, period: int) -> Tensor:
        return block_histogram(item.gradient, period)

    def _remap_to(self, levels: Levels) -> Callable[[], None] | None:
        """What re-quantises every stored index from the present codebook to `levels`, with nothing left to allocate."""
        if not self._levels.learnt or self._levels.tensor is None or levels.tensor is None:
            return None
        self._guard_read()
        table = requantise_map(self._levels.tensor, levels.tensor)
        return Remap(table, [state["m_codebook"] for state in self.state.values() if "m_codebook" in state])

    def _say(self, sentence: str) -> None:
        if self._verbose:
            print(f"{type(self).__name__}: {sentence}")

    # --- checkpoints and copies ---

    def state_dict(self) -> dict[str, Any]:
        """The state, packed as torch packs it: positions for parameters, tensors and plain values only.

        Resident, its tensors are the live ones; offloaded, copies. Warns where a parameter's state is not finite.
        """
        self._guard_read()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = checkpoint.pack(self.param_groups, self._packed_states(), self._header())
        if self.state_offload_active:
            packed = checkpoint.cloned(packed)
        checkpoint.warn_if_not_finite(packed["state"].values())
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    def _packed_states(self) -> dict[int, dict[str, Any]]:
        """Each parameter's state by its position; one that has not stepped has its name."""
        owned = [
            (p, name)
            for group in self.param_groups
            for p, name in zip(group["params"], self._names_of(group), strict=True)
        ]
        return {position: dict(self.state.get(p) or {"name": name}) for position, (p, name) in enumerate(owned)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of gefen-x 0.5.0.

        Everything is checked and copied before the live state is replaced, in one go: an entry that is missing,
        unknown, or of the wrong type, dtype, shape or range raises a ValueError that names it and changes nothing.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        loaded = checkpoint.read(state_dict, self._expected())
        parameters = [p for group in self.param_groups for p in group["params"]]
        placed = self._place_state(
            [(p, entries.tensors) for p, entries in zip(parameters, loaded.entries, strict=True)]
        )
        states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for p, entries, tensors in zip(parameters, loaded.entries, placed, strict=True):
            if entries.tensors:
                states[p] = {**entries.plain, **self._counters_on(p.device, entries.counters), **tensors}
        groups = [
            {**saved, "params": group["params"]} for saved, group in zip(loaded.groups, self.param_groups, strict=True)
        ]
        codebook = loaded.header.codebook
        levels = Levels(None if codebook is None else codebook.to(parameters[0].device, copy=True))
        global_step = self._counters_on(parameters[0].device, {"step": loaded.header.global_step})["step"]
        self.__dict__.update(state=states, param_groups=groups, _levels=levels, _global_step=global_step)
        self._committed_load()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _header(self) -> checkpoint.Header:
        return checkpoint.Header(self._levels.tensor, int(self._global_step))

    def _expected(self) -> checkpoint.Expected:
        """What a checkpoint must hold to be loaded here."""
        return checkpoint.Expected(
            optimizer=type(self).__name__,
            groups=[self._targets(group) for group in self.param_groups],
            names=[_own_names(group) for group in self.param_groups],
            moments=self._moments,
            check_group=self._check_group,
        )

    def _targets(self, group: dict[str, Any]) -> list[checkpoint.Target]:
        return [
            checkpoint.Target(name, local_of(p).shape, p.requires_grad, shard_tag(p) if is_sharded(p) else None)
            for p, name in zip(group["params"], self._names_of(group), strict=True)
        ]

    def _counters_on(self, device: torch.device, counters: dict[str, int]) -> dict[str, int | Tensor]:
        """The counters as this optimizer holds them: ints, or 0-d tensors under `capturable`."""
        if not self._capturable:
            return dict(counters)
        return {name: torch.tensor(float(count), device=device) for name, count in counters.items()}

    def _shared_tensors(self) -> dict[str, Tensor]:
        return {} if self._levels.tensor is None else {"codebook": self._levels.tensor}

    def _set_shared_tensors(self, tensors: dict[str, Tensor]) -> None:
        self._levels = Levels(tensors.get("codebook"))

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and `pickle` carry; torch's own would forget everything but state and groups."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._updaters = {}


_EAGER = "Gefen decides on the host what a step is made of; compile the model and the loss, and let step() run outside"
_PREFIX = "_gefen_name_prefix"  # how the constructor tells add_param_group that the caller gave no groups
_OWN = (
    "_fused",
    "_factored_v_2d",
    "_refresh_every",
    "_capturable",
    "_force_1d_period_one",
    "_period_one_substrings",
    "_verbose",
    "_levels",
    "_global_step",
)


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """The groups that the constructor was given; a plain list of parameters is one group without a number."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of tensors, (name, tensor) pairs or dicts, not a single tensor")
    items = params if isinstance(params, (set, frozenset)) else list(params)
    if len(items) == 0:
        raise ValueError("the optimizer got an empty parameter list")
    if isinstance(items, list) and isinstance(items[0], dict):
        return items
    return [{"params": items, _PREFIX: ""}]


def _own_names(group: dict[str, Any]) -> list[str | None]:
    """The names that the caller gave; None for made-up ones, and throughout where a wrapper replaced the parameters."""
    names, made_up = group["param_names"], group["param_names_synthesized"]
    if len(names) != len(group["params"]):
        return [None] * len(group["params"])
    return [None if synthetic else name for name, synthetic in zip(names, made_up, strict=True)]


def _require_kernels(parameters: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in parameters:
        reason = kernels.why_not(tensor.device, tensor.dtype)
        if reason is not None:
            raise ValueError(f"fused=True, but the fused kernels cannot step {name}: {reason}; leave fused at None")


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


def _refuse_orphans(states: Iterable[dict[str, Any]]) -> None:
    for state in states:
        if "m_codebook" in state:
            raise RuntimeError(
                f"{state.get('name')} has indices but the optimizer has no codebook: its state was set without "
                "load_state_dict(). Under ZeroRedundancyOptimizer save and load each rank's own optimizer: "
                "`zero.optim.state_dict()` and `zero.optim.load_state_dict()`"
            )

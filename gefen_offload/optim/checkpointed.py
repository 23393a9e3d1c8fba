"""An optimizer's state as its class holds it, packed for a checkpoint, loaded from one, copied and pickled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gefen_offload.offload.mixin import StateOffloadMixin
from gefen_offload.optim import checkpoint
from gefen_offload.optim.groups import own_names
from gefen_offload.optim.levels import Levels
from gefen_offload.optim.shard import is_sharded, local_of, shard_tag


class Checkpointed(StateOffloadMixin, Optimizer):
    """What `Gefen` and `GefenMuon` save and how they load it; the checks are in `checkpoint.py`."""

    OWN: ClassVar[tuple[str, ...]] = ()  # attributes besides groups and state that copies and pickles carry

    _moments: ClassVar[tuple[checkpoint.Moment, ...]] = ()
    _levels: Levels
    _global_step: int | Tensor
    _capturable: bool

    def _check_group(self, options: dict[str, Any]) -> None:
        """Raise where a group's options, defaults filled in, are missing or out of range."""
        raise NotImplementedError

    def _names_of(self, group: dict[str, Any]) -> list[str]:
        """The names of a group's parameters; made up where a wrapper has replaced the parameters."""
        names: list[str] = group.get("param_names", [])
        if len(names) == len(group["params"]):
            return names
        index = next(i for i, other in enumerate(self.param_groups) if other is group)
        return [f"group_{index}_param_{position}" for position in range(len(group["params"]))]

    def _name_of(self, key: Tensor, group: dict[str, Any]) -> str:
        return next(name for name, p in zip(self._names_of(group), group["params"], strict=True) if p is key)

    def state_dict(self) -> dict[str, Any]:
        """The state, packed as torch packs it: positions for parameters, tensors and plain values only.

        Resident, its tensors are the live ones; offloaded, copies. Warns where a parameter's state is not finite.
        """
        self._guard_read()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        groups = [{**group, **self._names_to_pack(group)} for group in self.param_groups]
        packed = checkpoint.pack(groups, self._packed_states(), self._header())
        if self.state_offload_active:
            packed = checkpoint.cloned(packed)
        checkpoint.warn_if_not_finite(packed["state"].values())
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    def _names_to_pack(self, group: dict[str, Any]) -> dict[str, Any]:
        names = self._names_of(group)
        return {"param_names": names, "param_names_synthesized": [own is None for own in own_names(group)]}

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
        While the state is offloaded this is a collective call: what one rank refuses, all refuse.
        """
        with self._together("load_state_dict()") as pact:
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before(self, state_dict) or state_dict
            commit = self._stage_load(state_dict)
            self._confirm(pact, list(self._subject().named()))
        commit()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _stage_load(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Check a checkpoint and copy what it holds; calling what this returns commits it, and cannot fail."""
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
        codebook, device = loaded.header.codebook, parameters[0].device if parameters else torch.device("cpu")
        levels = Levels(None if codebook is None else codebook.to(device, copy=True))
        global_step = self._counters_on(device, {"step": loaded.header.global_step})["step"]

        def commit() -> None:
            self.__dict__.update(state=states, param_groups=groups, _levels=levels, _global_step=global_step)
            self._committed_load()

        return commit

    def _header(self) -> checkpoint.Header:
        return checkpoint.Header(self._levels.tensor, int(self._global_step))

    def _expected(self) -> checkpoint.Expected:
        """What a checkpoint must hold to be loaded here."""
        return checkpoint.Expected(
            optimizer=type(self).__name__,
            groups=[self._targets(group) for group in self.param_groups],
            names=[own_names(group) for group in self.param_groups],
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
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.OWN}}

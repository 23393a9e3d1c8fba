"""`StateOffloadMixin`: where an optimizer's state lives, and its way there and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from gefen_offload.offload import resident
from gefen_offload.offload.pieces import Piece, Shapes, Update
from gefen_offload.offload.schema import StateSchema


class StateOffloadMixin:
    """A base class of an optimizer, before `torch.optim.Optimizer`.

    The host class declares `STATE_SCHEMA` and gives `_shared_tensors` and `_set_shared_tensors`: the tensors that all
    parameters share, which stay on the parameters' device.
    """

    STATE_SCHEMA: ClassVar[StateSchema | None] = None
    _offload: Any = None

    state: Any
    param_groups: list[dict[str, Any]]

    def _shared_tensors(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _set_shared_tensors(self, tensors: dict[str, Tensor]) -> None:
        raise NotImplementedError

    # --- what the host class calls ---

    def _before_step(self) -> None:
        """Before `step()` looks at gradients: refuse what offload does not support; changes nothing."""

    def _run_update(self, pieces: Sequence[Piece], update: Update, *, divisible: bool = False) -> None:
        """Hand `update` every piece with its state tensors beside the parameter; they are written back afterwards.

        `divisible` says that the update's result does not depend on how a parameter is cut, as with fused kernels: then
        pieces may cover whole parameters, and are cut to fit the windows.
        """
        resident.run(pieces, update, self._schema())

    def _allocate_state(self, requests: Sequence[tuple[Tensor, Shapes]]) -> list[dict[str, Tensor]]:
        """Zero-filled state tensors for each (parameter, shapes and dtypes by name), where the authority lives."""
        return resident.allocate(requests)

    def _place_state(self, staged: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> list[dict[str, Tensor]]:
        """Copies of a checkpoint's tensors for each parameter, in their own dtype, where the authority lives."""
        return resident.place(staged)

    def _committed_load(self) -> None:
        """After a load has replaced state, groups and shared tensors: the live state is known to be good again."""

    def _guard_read(self) -> None:
        """Before state is read: raise if it is poisoned, wait for what is still being written back."""

    def _note_group_added(self, group: dict[str, Any]) -> None:
        """After a group was appended: refuse it, taken back, where offload does not support it."""

    @property
    def state_offload_active(self) -> bool:
        """Whether the CPU copy of the state is the authority."""
        return self._offload is not None

    def _schema(self) -> StateSchema:
        if self.STATE_SCHEMA is None:
            raise TypeError(f"{type(self).__name__} declares no STATE_SCHEMA: name every entry of its state there")
        return self.STATE_SCHEMA

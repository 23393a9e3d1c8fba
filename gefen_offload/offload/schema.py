"""What per-parameter state an optimizer declares, so that it can be moved, cut into windows and checked."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch


class Cut(enum.Enum):
    """How a state tensor may be split for streaming."""

    BLOCKS = "blocks"  # the first dimension counts the parameter's blocks: any block range can move alone
    WHOLE = "whole"  # moves in one piece


@dataclass(frozen=True)
class TensorEntry:
    """One tensor that a parameter's state may hold."""

    name: str
    dtype: torch.dtype
    cut: Cut


@dataclass(frozen=True)
class StateSchema:
    """Every entry that `state[p]` may hold: tensors that move, and plain values that stay."""

    tensors: tuple[TensorEntry, ...]
    plain: dict[str, type | tuple[type, ...]] = field(default_factory=dict)

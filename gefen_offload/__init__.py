"""The Gefen optimizer with its state in CPU memory, and the harness and gate that prove nothing changed.

Importing this package imports neither torch nor pytest: each public name is loaded on first use, so that the pytest
plugin in :mod:`gefen_offload.ranks` costs nothing in a run that uses no rank.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gefen_offload.offload.errors import OffloadReason, OffloadUnsupportedError
    from gefen_offload.offload.mixin import StateOffloadMixin
    from gefen_offload.offload.policy import OffloadPolicy
    from gefen_offload.optim.gefen import Gefen
    from gefen_offload.optim.hybrid import GefenMuonHybrid
    from gefen_offload.optim.muon import GefenMuon
    from gefen_offload.optim.split import split_params_for_muon

__version__ = "0.1.0"

_HOMES = {
    "Gefen": "gefen_offload.optim.gefen",
    "GefenMuon": "gefen_offload.optim.muon",
    "GefenMuonHybrid": "gefen_offload.optim.hybrid",
    "split_params_for_muon": "gefen_offload.optim.split",
    "StateOffloadMixin": "gefen_offload.offload.mixin",
    "OffloadPolicy": "gefen_offload.offload.policy",
    "OffloadReason": "gefen_offload.offload.errors",
    "OffloadUnsupportedError": "gefen_offload.offload.errors",
}

__all__ = [
    "Gefen",
    "GefenMuon",
    "GefenMuonHybrid",
    "OffloadPolicy",
    "OffloadReason",
    "OffloadUnsupportedError",
    "StateOffloadMixin",
    "split_params_for_muon",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

"""Run a function on N ranks and trust the answer: a pytest plugin and a library.

Importing this package imports neither torch nor pytest; each public name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gefen_offload.ranks.compare import Comparison, Difference, identical
    from gefen_offload.ranks.context import RankContext
    from gefen_offload.ranks.expect import expect_failure
    from gefen_offload.ranks.group import RankGroup
    from gefen_offload.ranks.outcome import Kind, Outcome, RankFailure
    from gefen_offload.ranks.result import Result
    from gefen_offload.ranks.trajectory import LossTrajectory

_HOMES = {
    "Comparison": "gefen_offload.ranks.compare",
    "Difference": "gefen_offload.ranks.compare",
    "Kind": "gefen_offload.ranks.outcome",
    "Outcome": "gefen_offload.ranks.outcome",
    "RankContext": "gefen_offload.ranks.context",
    "RankFailure": "gefen_offload.ranks.outcome",
    "RankGroup": "gefen_offload.ranks.group",
    "Result": "gefen_offload.ranks.result",
    "LossTrajectory": "gefen_offload.ranks.trajectory",
    "expect_failure": "gefen_offload.ranks.expect",
    "identical": "gefen_offload.ranks.compare",
}

__all__ = [
    "Comparison",
    "Difference",
    "Kind",
    "LossTrajectory",
    "Outcome",
    "RankContext",
    "RankFailure",
    "RankGroup",
    "Result",
    "expect_failure",
    "identical",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

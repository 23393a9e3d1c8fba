"""A loss trajectory: the numbers of a run, step by step, and where two runs part."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Parting:
    """The first step at which two trajectories differ by more than allowed."""

    step: int
    left: float | None
    right: float | None
    allowed: float

    def __str__(self) -> str:
        if self.left is None or self.right is None:
            return f"step {self.step}: only one of the two runs has it ({self.left} and {self.right})"
        band = "to the bit" if self.allowed == 0 else f"within {self.allowed:g}"
        return f"step {self.step}: {self.left!r} and {self.right!r} are not equal {band}"


@dataclass(frozen=True)
class LossTrajectory:
    """Losses of consecutive steps; `first` is the step of `losses[0]`."""

    losses: tuple[float, ...]
    first: int = 0
    name: str = ""

    @classmethod
    def of(cls, losses: Sequence[float], first: int = 0, name: str = "") -> LossTrajectory:
        """From any sequence of numbers."""
        return cls(tuple(float(loss) for loss in losses), first, name)

    def __len__(self) -> int:
        return len(self.losses)

    def __iter__(self) -> Iterator[float]:
        return iter(self.losses)

    def parts_from(self, other: LossTrajectory, *, absolute: float = 0.0, relative: float = 0.0) -> Parting | None:
        """The first step where the other differs; exact bits unless a band is given. None: they agree to the end.

        A step that only one of them has is a difference. NaN equals only the same NaN, and no band.
        """
        for step in range(min(self.first, other.first), max(self._end, other._end)):
            left, right = self.at(step), other.at(step)
            if left is None or right is None:
                return Parting(step, left, right, 0.0)
            allowed = absolute + relative * max(abs(left), abs(right))
            if _bits(left) != _bits(right) and not _within(left, right, allowed):
                return Parting(step, left, right, allowed)
        return None

    def check(self, other: LossTrajectory, *, absolute: float = 0.0, relative: float = 0.0) -> None:
        """Raise AssertionError with the first differing step."""
        __tracebackhide__ = True
        parting = self.parts_from(other, absolute=absolute, relative=relative)
        if parting is not None:
            raise AssertionError(f"{self.name or 'one'} and {other.name or 'the other'} part at {parting}")

    def at(self, step: int) -> float | None:
        """The loss of a step, if the trajectory has it."""
        return self.losses[step - self.first] if self.first <= step < self._end else None

    def joined(self, rest: LossTrajectory) -> LossTrajectory:
        """This run up to where `rest` begins, then `rest`: a run and its continuation from a checkpoint."""
        if not self.first <= rest.first <= self._end:
            raise ValueError(f"the rest begins at step {rest.first}, outside steps {self.first} to {self._end}")
        return LossTrajectory(self.losses[: rest.first - self.first] + rest.losses, self.first, self.name)

    def save(self, path: Path) -> None:
        """JSON, each loss also in hexadecimal so that no bit is lost."""
        losses = [{"loss": loss if math.isfinite(loss) else str(loss), "hex": loss.hex()} for loss in self.losses]
        path.write_text(json.dumps({"name": self.name, "first": self.first, "losses": losses}))

    @classmethod
    def load(cls, path: Path) -> LossTrajectory:
        """What `save` wrote."""
        data = json.loads(path.read_text())
        return cls(tuple(float.fromhex(entry["hex"]) for entry in data["losses"]), data["first"], data["name"])

    @property
    def _end(self) -> int:
        return self.first + len(self.losses)


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _within(left: float, right: float, allowed: float) -> bool:
    return allowed > 0 and math.isfinite(left) and math.isfinite(right) and abs(left - right) <= allowed

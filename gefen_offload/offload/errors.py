"""What offload raises: refusals with a stable code, and the errors of state that no longer matches its parameters."""

from __future__ import annotations

import enum


class OffloadReason(str, enum.Enum):
    """Why a situation is refused. The values are stable: tests, logs and other ranks compare them."""

    CPU_PARAMETER = "cpu-parameter"
    MIXED_DEVICES = "mixed-devices"
    DTENSOR = "dtensor"
    FLAT_PARAMETER = "flat-parameter"
    OWNERSHIP = "ownership"
    RANK_LOCAL = "rank-local"
    CAPTURABLE = "capturable"
    COMPILING = "compiling"
    CUSTOM_STATE = "custom-state"
    ALIASED = "aliased"
    SUBCLASS = "subclass"
    OPTIMIZER = "optimizer"
    POISONED = "poisoned"
    MOVED = "moved"

    def __str__(self) -> str:
        return self.value


class OffloadUnsupportedError(RuntimeError):
    """A situation that offload refuses before anything is touched; `reason` is its code."""

    def __init__(self, reason: OffloadReason, message: str) -> None:
        super().__init__(f"[{reason.value}] {message}")
        self.reason = reason
        self._message = message

    def __reduce__(self) -> tuple[type[OffloadUnsupportedError], tuple[OffloadReason, str]]:
        return type(self), (self.reason, self._message)


class OffloadPoisonedError(OffloadUnsupportedError):
    """A copyback failed after a parameter had changed: state and parameters no longer match; `reason` is `poisoned`."""

    def __init__(self, message: str) -> None:
        super().__init__(OffloadReason.POISONED, message)

    def __reduce__(self) -> tuple[type[OffloadPoisonedError], tuple[str]]:  # type: ignore[override]
        return type(self), (self._message,)


class OffloadCopyError(RuntimeError):
    """An optimizer that cannot be copied or pickled because its state is offloaded or poisoned."""

"""How state is offloaded: one frozen value, given to `offload_state_()`."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class OffloadPolicy:
    """`staging_bytes` is the size of one window; room for three lives on the GPU for as long as offload is on.

    A window holds at least one piece: a larger piece takes the room of several, and only one larger than all of it
    makes it grow. `pinned` registers the host memory, which lets copies overlap with work; without it
    they are slower and one after another. With `deferred` `step()` returns while the last windows are still being
    written back; whoever reads the state waits first, and an error found then poisons. `verify_replicas` compares the
    parameters of the ranks of the default process group (or of `process_group=`) at activation, load and
    add_param_group, and gives up after `verify_seconds`.

    Raises ValueError where a number is out of range or a switch is no bool.
    """

    staging_bytes: int = 24 * MIB
    pinned: bool = True
    deferred: bool = False
    verify_replicas: bool = True
    verify_seconds: float = 60.0

    def __post_init__(self) -> None:
        if type(self.staging_bytes) is not int or self.staging_bytes < 1:
            raise ValueError(f"staging_bytes is {self.staging_bytes!r}: give the bytes of one window, a positive int")
        for name in ("pinned", "deferred", "verify_replicas"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give True or False")
        if not isinstance(self.verify_seconds, (int, float)) or not self.verify_seconds > 0:
            raise ValueError(f"verify_seconds is {self.verify_seconds!r}: give a positive number of seconds")

"""Whether every rank holds the same parameters: told through the group's store, never by a collective.

Each rank writes one record, a fingerprint or a refusal, and waits for one key, `decided`. The last rank to write sets
it, and so does any rank that refuses or gives up, so that nobody waits for a rank that will not come. Keys carry a
generation: how often this rank has asked this group, counted in the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gefen_offload.offload.errors import OffloadReason, OffloadUnsupportedError

CHUNK = 2**22  # elements hashed at a time: 32 MiB of int64
PREFIX = "gefen_offload/replicas"

# --- fingerprints ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fingerprint:
    """Names, shapes and dtypes of the parameters, in order, and 64 bits for the bits of each."""

    parameters: tuple[str, ...]
    hashes: tuple[str, ...]

    def difference(self, other: Fingerprint) -> str | None:
        """What differs first; None if nothing does."""
        if len(self.parameters) != len(other.parameters):
            return f"it holds {len(other.parameters)} parameters instead of {len(self.parameters)}"
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if mine != theirs:
                return f"it holds {theirs} where this rank holds {mine}"
        for name, mine, theirs in zip(self.parameters, self.hashes, other.hashes, strict=True):
            if mine != theirs:
                return f"its values of {name} differ"
        return None


def fingerprint(named: Sequence[tuple[str, Tensor]]) -> Fingerprint:
    """The fingerprint of these parameters; equal bits give equal fingerprints on every rank."""
    hashes = [_hash(parameter.detach()) for _, parameter in named]
    values = torch.stack(hashes).tolist() if hashes else []
    labels = [f"{name} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}" for name, p in named]
    return Fingerprint(tuple(labels), tuple(f"{value & (2**64 - 1):016x}" for value in values))


def _hash(tensor: Tensor) -> Tensor:
    """A position-weighted sum of the tensor's words modulo 2**64, 0-d int64 on its device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.reshape(-1).view(words)
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), device=tensor.device)
        weights.mul_(-7046029254386353131).add_(1442695040888963407).bitwise_or_(1)
        total += chunk.add_(0x1234567).mul_(weights).sum()
    return total


# --- the agreement --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group, this one's place among them, and the store they share."""

    store: Any
    members: tuple[int, ...]
    rank: int

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in self.members if rank != self.rank]


def ranks_of(group: dist.ProcessGroup | None) -> Ranks | None:
    """The ranks of `group`, or of the default one; None where no other rank takes part."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the process_group that it was given: pass one of its own")
    members = tuple(dist.get_process_group_ranks(group) if group is not None else range(dist.get_world_size()))
    rank = dist.get_rank()
    if len(members) < 2 or rank not in members:
        return None
    return Ranks(dist.distributed_c10d._get_default_store(), members, rank)


@contextmanager
def agreement(ranks: Ranks | None, seconds: float, what: str) -> Iterator[Agreement]:
    """Every rank that enters leaves in the same way: what one raises inside, before `confirm`, its peers raise too."""
    pact = Agreement(ranks, seconds, what)
    try:
        yield pact
    except BaseException as error:
        pact.refuse(error)
        raise


class Agreement:
    """One rank's part in deciding whether `what` may happen."""

    def __init__(self, ranks: Ranks | None, seconds: float, what: str) -> None:
        self._ranks, self._seconds, self._what = ranks, seconds, what
        self._open = ranks is not None
        if ranks is not None:
            members = hashlib.sha256(repr(ranks.members).encode()).hexdigest()[:16]
            generation = ranks.store.add(f"{PREFIX}/{members}/generation/{ranks.rank}", 1)
            self._prefix = f"{PREFIX}/{members}/{generation}"

    @property
    def needed(self) -> bool:
        """Whether other ranks take part and nothing is decided yet."""
        return self._open

    def refuse(self, error: BaseException) -> None:
        """Tell the peers that this rank will not go on. Once decided, there is nothing left to tell."""
        if not self._open:
            return
        code = error.reason.value if isinstance(error, OffloadUnsupportedError) else type(error).__name__
        self._publish({"code": code, "message": str(error)})
        self._decide()

    def confirm(self, mine: Fingerprint) -> None:
        """Wait for the peers' fingerprints; raise OffloadUnsupportedError if one differs, refuses or does not come."""
        ranks = self._ranks
        if ranks is None or not self._open:
            return
        self._publish({"code": None, **asdict(mine)})
        if ranks.store.add(f"{self._prefix}/arrived", 1) == len(ranks.members):
            self._decide()
        try:
            ranks.store.wait([f"{self._prefix}/decided"], timedelta(seconds=self._seconds))
        except RuntimeError as error:
            missing = [rank for rank in ranks.peers if not ranks.store.check([self._key(rank)])]
            raise OffloadUnsupportedError(
                OffloadReason.RANK_LOCAL,
                f"ranks {missing} did not reach {self._what} within {self._seconds:g} s of rank {ranks.rank}. Call it "
                "on every rank of the group, pass process_group= to narrow it, raise OffloadPolicy.verify_seconds, or "
                "skip the comparison with OffloadPolicy(verify_replicas=False)",
            ) from error
        self._open = False
        self._compare(mine, ranks)

    def _compare(self, mine: Fingerprint, ranks: Ranks) -> None:
        records = {rank: self._read(rank) for rank in ranks.peers}
        for rank, record in records.items():
            code = None if record is None else record["code"]
            if record is not None and code is not None:
                raise OffloadUnsupportedError(
                    _reason(code),
                    f"rank {rank} of {list(ranks.members)} refused {self._what} ({code}): {record['message']}",
                )
        for rank, record in records.items():
            if record is None:
                continue
            difference = mine.difference(Fingerprint(tuple(record["parameters"]), tuple(record["hashes"])))
            if difference is not None:
                raise OffloadUnsupportedError(
                    OffloadReason.RANK_LOCAL,
                    f"rank {rank} does not hold the parameters that rank {ranks.rank} holds: {difference}. Offload "
                    "needs replicas. If the model is about to be wrapped in DistributedDataParallel, wrap it first: "
                    "that makes the ranks equal. Under ZeroRedundancyOptimizer leave offload off. For ranks meant to "
                    "differ pass process_group=, or OffloadPolicy(verify_replicas=False)",
                )

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/record/{rank}"

    def _publish(self, record: dict[str, Any]) -> None:
        if self._ranks is not None:
            self._ranks.store.set(self._key(self._ranks.rank), json.dumps(record))

    def _decide(self) -> None:
        self._open = False
        if self._ranks is not None:
            self._ranks.store.set(f"{self._prefix}/decided", "1")

    def _read(self, rank: int) -> dict[str, Any] | None:
        store = self._ranks.store if self._ranks is not None else None
        if store is None or not store.check([self._key(rank)]):
            return None
        record: dict[str, Any] = json.loads(store.get(self._key(rank)))
        return record


def _reason(code: str) -> OffloadReason:
    known = {reason.value: reason for reason in OffloadReason}
    return known.get(code, OffloadReason.RANK_LOCAL)

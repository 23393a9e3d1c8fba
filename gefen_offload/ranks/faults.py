"""Faults on purpose: end, stop, delay or corrupt one rank at a stage, a mark, a step or a collective."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from gefen_offload.ranks.outcome import Stage

if TYPE_CHECKING:
    from gefen_offload.ranks.page import StatusPage


class Action(Enum):
    """What a fault does to its rank."""

    KILL = "kill"
    STOP = "stop"
    DELAY = "delay"
    RAISE = "raise"
    EXIT = "exit"
    CORRUPT = "corrupt"


class Place(Enum):
    """What a fault waits for."""

    STAGE = "stage"
    MARK = "mark"
    COLLECTIVE = "collective"


@dataclass(frozen=True)
class At:
    """The moment: the `nth` time (from 1) that the rank comes to a place of this name; "" is any collective."""

    place: Place
    name: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.place.value} {self.name or '(any)'}" + (f" number {self.nth}" if self.nth > 1 else "")


@dataclass(frozen=True)
class Fault:
    """One fault; the functions below make it: `kill`, `stop`, `delay`, `throw`, `leave`, `corrupt`."""

    action: Action
    rank: int
    at: At
    signal: int = signal.SIGKILL
    seconds: float = 0.0
    message: str = ""
    code: int = 0
    element: int = 0

    def __str__(self) -> str:
        return f"{self.action.value} rank {self.rank} at {self.at}"

    @property
    def in_setup(self) -> bool:
        """Whether it fires before the pool is ready, so that only new ranks can have it."""
        return self.at.place is Place.STAGE and self.at.name in Stage.SETUP


class InjectedError(RuntimeError):
    """What :func:`throw` raises in the rank."""


Moment = At | str | int


def mark(name: str, nth: int = 1) -> At:
    """When the body calls `context.mark(name)`."""
    return At(Place.MARK, name, nth)


def step(number: int) -> At:
    """When the body calls `context.step(number)`, or `context.mark(f"step {number}")`."""
    return At(Place.MARK, f"step {number}")


def collective(name: str = "", nth: int = 1) -> At:
    """Just before the rank enters the nth `torch.distributed` collective of this name (any, if "").

    Collectives that C++ starts by itself, such as those of DDP's reducer, do not pass here; use a mark.
    """
    return At(Place.COLLECTIVE, name, nth)


def stage(name: str) -> At:
    """When the rank enters a stage of :class:`~gefen_offload.ranks.outcome.Stage`; setup stages make new ranks."""
    return At(Place.STAGE, name)


def kill(rank: int, at: Moment, signal: int = signal.SIGKILL) -> Fault:
    """The rank gets a signal, by default SIGKILL."""
    return Fault(Action.KILL, rank, _moment(at), signal=signal)


def stop(rank: int, at: Moment) -> Fault:
    """The rank is stopped (SIGSTOP) and stays so."""
    return Fault(Action.STOP, rank, _moment(at))


def delay(rank: int, at: Moment, seconds: float) -> Fault:
    """The rank sleeps, then goes on."""
    return Fault(Action.DELAY, rank, _moment(at), seconds=seconds)


def throw(rank: int, at: Moment, message: str = "injected") -> Fault:
    """The rank raises :class:`InjectedError`."""
    return Fault(Action.RAISE, rank, _moment(at), message=message)


def leave(rank: int, at: Moment, code: int = 0) -> Fault:
    """The rank's process exits at once (`os._exit`), without an outcome."""
    return Fault(Action.EXIT, rank, _moment(at), code=code)


def corrupt(rank: int, at: At, element: int = 0) -> Fault:
    """The lowest bit of one element of the collective's first tensor is flipped before the rank enters it."""
    if at.place is not Place.COLLECTIVE:
        raise ValueError(f"corrupt(at={at}): only a collective has a tensor to corrupt; use collective(name, nth)")
    return Fault(Action.CORRUPT, rank, at, element=element)


def _moment(at: Moment) -> At:
    if isinstance(at, At):
        return at
    return step(at) if isinstance(at, int) else mark(at)


@dataclass
class FaultPlan:
    """The faults of one task as one rank sees them."""

    faults: Sequence[Fault]
    rank: int = 0
    page: StatusPage | None = None
    _seen: dict[int, int] = field(default_factory=dict)

    def at_stage(self, name: str) -> None:
        self._come_to(Place.STAGE, name)

    def at_mark(self, name: str) -> None:
        self._come_to(Place.MARK, name)

    def at_collective(self, name: str, tensors: Sequence[Any]) -> None:
        self._come_to(Place.COLLECTIVE, name, tensors)

    @contextlib.contextmanager
    def armed(self, backend: str | None) -> Iterator[None]:
        """While the body runs, its collectives pass through this plan."""
        if backend is None:
            yield
            return
        from gefen_offload.ranks import process_group

        with process_group.observed_by(self):
            yield

    def _come_to(self, place: Place, name: str, tensors: Sequence[Any] = ()) -> None:
        for index, fault in enumerate(self.faults):
            at = fault.at
            if fault.rank != self.rank or at.place is not place or at.name not in ("", name):
                continue
            self._seen[index] = self._seen.get(index, 0) + 1
            if self._seen[index] == at.nth:
                if self.page is not None:
                    self.page.fire(index)
                _act(fault, tensors)


def _act(fault: Fault, tensors: Sequence[Any]) -> None:
    if fault.action is Action.KILL:
        os.kill(os.getpid(), fault.signal)
        time.sleep(0.05)  # a signal to the own process may be taken by another thread a moment later
    elif fault.action is Action.STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action is Action.DELAY:
        time.sleep(fault.seconds)
    elif fault.action is Action.RAISE:
        raise InjectedError(fault.message)
    elif fault.action is Action.EXIT:
        os._exit(fault.code)
    elif fault.action is Action.CORRUPT:
        _flip_lowest_bit(tensors, fault)


def _flip_lowest_bit(tensors: Sequence[Any], fault: Fault) -> None:
    import torch

    if not tensors:
        raise ValueError(f"{fault}: the collective has no tensor argument")
    flat = tensors[0].detach().view(-1)
    if not 0 <= fault.element < flat.numel():
        raise ValueError(f"{fault}: element {fault.element} of a tensor with {flat.numel()}")
    flat[fault.element : fault.element + 1].view(torch.uint8)[0] ^= 1

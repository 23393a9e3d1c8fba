"""Charts as plain SVG coordinates: loss curves, and a step's timeline. The template draws what these describe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, MARGIN = 640.0, 220.0, 44.0
LANES = ("copy-in", "update", "copy-out")
BAR = 26.0


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: str
    """SVG polyline points."""


@dataclass(frozen=True)
class Plot:
    """Loss over steps, for the runs that one test compared."""

    title: str
    curves: tuple[Curve, ...]
    low: float
    high: float
    steps: int
    verdict: str
    """Whether the curves are the same to the bit, and where they first differ."""


@dataclass(frozen=True)
class Bar:
    """One interval of a lane."""

    lane: str
    x: float
    y: float
    width: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """One step: what ran when, by lane."""

    title: str
    bars: tuple[Bar, ...]
    milliseconds: float


def plot(title: str, curves: Mapping[str, Sequence[float]]) -> Plot:
    """A chart of named curves on one scale."""
    values = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    steps = max((len(curve) for curve in curves.values()), default=0)
    drawn = tuple(Curve(name, points(curve, low, high, steps)) for name, curve in curves.items())
    return Plot(title, drawn, low, high, steps, sameness(list(curves.values())))


def points(curve: Sequence[float], low: float, high: float, steps: int) -> str:
    """SVG points of one curve; values that are no finite numbers are left out."""
    across = (WIDTH - 2 * MARGIN) / max(1, steps - 1)
    up = (HEIGHT - 2 * MARGIN) / ((high - low) or 1.0)
    return " ".join(
        f"{MARGIN + across * step:.1f},{HEIGHT - MARGIN - up * (value - low):.1f}"
        for step, value in enumerate(curve)
        if math.isfinite(value)
    )


def sameness(curves: Sequence[Sequence[float]]) -> str:
    """Whether all curves are equal, in words."""
    if len(curves) < 2:
        return "one curve"
    for step, values in enumerate(zip(*curves, strict=False)):
        if any(value != values[0] for value in values[1:]):
            return f"differ from step {step} on: {', '.join(f'{value:.9g}' for value in values)}"
    if len({len(curve) for curve in curves}) > 1:
        return f"differ in length: {', '.join(str(len(curve)) for curve in curves)}"
    return "equal at every step"


def timeline(title: str, intervals: Sequence[Mapping[str, Any]]) -> Timeline:
    """A step's intervals: each has ``lane``, ``start`` and ``end`` in milliseconds, and perhaps ``label``."""
    begin = min((float(i["start"]) for i in intervals), default=0.0)
    end = max((float(i["end"]) for i in intervals), default=1.0)
    scale = (WIDTH - 2 * MARGIN) / ((end - begin) or 1.0)
    bars = tuple(
        Bar(
            i["lane"],
            MARGIN + scale * (float(i["start"]) - begin),
            10 + (BAR + 8) * LANES.index(i["lane"]),
            max(0.5, scale * (float(i["end"]) - float(i["start"]))),
            str(i.get("label", "")),
        )
        for i in intervals
        if i["lane"] in LANES
    )
    return Timeline(title, bars, end - begin)

"""The results as a table, as JSON and as plots."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gefen_offload.bench import timeline
from gefen_offload.bench.results import Entry, Results

MIB = 2**20
COLUMNS = (
    "workload", "optimizer", "step ms", "spread", "first s", "GPU MiB", "peak MiB", "GB/s each way", "x floor",
    "pinned MiB",
)  # fmt: skip


def table(results: Results) -> str:
    """One line an entry; aligned text."""
    rows = [COLUMNS, *(_cells(entry) for entry in results.entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(_pad(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(line.rstrip() for line in lines)


def print_table(results: Results) -> None:
    """With rich where it is installed."""
    if importlib.util.find_spec("rich") is None:
        print(table(results))
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=_title(results))
    for index, column in enumerate(COLUMNS):
        shown.add_column(column, justify="left" if index < 2 else "right", no_wrap=column != "step ms")
    for entry in results.entries:
        shown.add_row(*_cells(entry))
    console = Console()
    Console(width=max(console.width, 160) if not console.is_terminal else None).print(shown)


def write_json(results: Results, folder: Path) -> Path:
    """Write `bench.json`."""
    path = folder / "bench.json"
    path.write_text(json.dumps(results.as_dict(), indent=1) + "\n")
    return path


def draw(results: Results, folder: Path) -> list[Path]:
    """Plots of the step against parameters, tensors and staging size, and a timeline; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    for name, label, key in _PLOTS:
        series = _series(results.entries, name, key)
        if series:
            drawn.append(_plot(series, label, folder / f"{name}.png"))
    timed = next((entry for entry in results.entries if entry.timeline), None)
    if timed is not None:
        drawn.append(timeline.draw(timed.timeline, folder / "timeline.png"))
    return drawn


_PLOTS = (
    ("parameters", "parameters", "elements"),
    ("tensors", "tensors of 134 M parameters in all", "tensors"),
    ("staging", "bytes of a window", "staging"),
)


def _series(entries: Sequence[Entry], name: str, key: str) -> dict[str, list[tuple[float, float]]]:
    """For each optimizer, points of (x, milliseconds), where there are two at least."""
    series: dict[str, dict[float, float]] = {}
    for entry in entries:
        if entry.step is None or _plot_of(entry, entries) != name:
            continue
        series.setdefault(entry.name, {})[getattr(entry, key)] = entry.step.median * 1e3
    return {label: sorted(points.items()) for label, points in series.items() if len(points) > 1}


def _plot_of(entry: Entry, entries: Sequence[Entry]) -> str:
    if entry.workload.endswith("tensors"):
        return "tensors"
    stagings = {e.staging for e in entries if e.workload == entry.workload and e.name == entry.name and e.step}
    if entry.staging and len(stagings) > 1:
        return "staging"
    return "parameters" if entry.workload not in ("B", "tiny") else "none"


def _plot(series: dict[str, list[tuple[float, float]]], label: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, points in series.items():
        axes.loglog(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("step, ms")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _cells(entry: Entry) -> tuple[str, ...]:
    if entry.step is None:
        return (entry.workload, entry.name, entry.absent or "", *[""] * (len(COLUMNS) - 3))
    memory = entry.memory
    return (
        entry.workload + (f" ({entry.staging // MIB} MiB)" if entry.staging else ""),
        entry.name,
        f"{entry.step.median * 1e3:.2f}",
        f"{entry.step.spread * 1e3:.2f}",
        "" if entry.first is None else f"{entry.first:.2f}",
        "" if memory is None else f"{memory.persistent / MIB:,.0f}",
        "" if memory is None or not memory.peak else f"{memory.peak / MIB:,.0f}",
        "" if entry.each_way is None else f"{entry.each_way / 1e9:.1f}",
        "" if entry.floor_fraction is None else f"{entry.floor_fraction:.2f}",
        f"{entry.pinned_reserved / MIB:,.0f} / {entry.pinned_asked / MIB:,.0f}" if entry.pinned_asked else "",
    )


def _pad(cell: str, width: int, index: int) -> str:
    return cell.ljust(width) if index < 2 else cell.rjust(width)


def _title(results: Results) -> str:
    machine: dict[str, Any] = results.machine
    return f"{machine.get('device')}, torch {machine.get('torch')}"

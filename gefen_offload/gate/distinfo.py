"""What a wheel holds beside the package: its names, entry points and requirements, against those of the checkout."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import gefen_offload
from gefen_offload.gate.checkout import PACKAGE

WHEEL = f"{PACKAGE}-{gefen_offload.__version__}-py3-none-any.whl"
"""The name of this checkout's wheel."""
FOLDER = f"{PACKAGE}-{gefen_offload.__version__}.dist-info"
FILES = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
FIELDS = ("Name", "Version", "Requires-Python", "Provides-Extra")
"""The fields of METADATA, beside the requirements, that decide what is installed, and with what."""


def differences(site: Path, names: Collection[str], root: Path) -> list[str]:
    """What the installed ``names`` have beside the package that building the checkout does not give, or the reverse."""
    wrong = {name for name in names if not name.startswith(f"{PACKAGE}/")} ^ {f"{FOLDER}/{name}" for name in FILES}
    try:
        lines = said(site) ^ expected(root, names)
    except (OSError, ValueError, TypeError) as error:  # no metadata that anybody could read
        lines = {str(error)}
    return sorted(wrong | {f"{FOLDER}/{line}" for line in lines})


def said(site: Path) -> set[str]:
    """What the wheel says of itself, a line for each thing."""
    found = Distribution.at(site / FOLDER)
    return {
        *(f"RECORD: {row[0]}" for row in csv.reader((found.read_text("RECORD") or "").splitlines()) if row),
        *(f"METADATA: {name}: {value}" for name in FIELDS for value in found.metadata.get_all(name) or ()),
        *(f"METADATA: Requires-Dist: {Requirement(line)}" for line in found.requires or ()),
        *(f"entry_points.txt: [{point.group}] {point.name} = {point.value}" for point in found.entry_points),
        *(f"top_level.txt: {line}" for line in (found.read_text("top_level.txt") or "").splitlines()),
        *(f"licenses/LICENSE: {line}" for line in (found.read_text("licenses/LICENSE") or "").splitlines()),
    }


def expected(root: Path, names: Collection[str]) -> set[str]:
    """What a wheel of the checkout says of itself, as its pyproject.toml asks."""
    project = settings(root)
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    extras = project.get("optional-dependencies", {})
    of_extras = [f'{line}; extra == "{extra}"' for extra, lines in extras.items() for line in lines]
    return {
        *(f"RECORD: {name}" for name in names),
        f"METADATA: Name: {project['name']}",
        f"METADATA: Version: {gefen_offload.__version__}",
        f"METADATA: Requires-Python: {project['requires-python']}",
        *(f"METADATA: Provides-Extra: {extra}" for extra in extras),
        *(f"METADATA: Requires-Dist: {Requirement(line)}" for line in [*project["dependencies"], *of_extras]),
        *(f"entry_points.txt: [{group}] {name} = {value}" for group in groups for name, value in groups[group].items()),
        f"top_level.txt: {PACKAGE}",
        *(f"licenses/LICENSE: {line}" for line in (root / "LICENSE").read_text(encoding="utf-8").splitlines()),
    }


def settings(root: Path) -> Mapping[str, Any]:
    """The table ``[project]`` of pyproject.toml; Python 3.10 reads it with the package that pytest brings there."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project: Mapping[str, Any] = toml.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project

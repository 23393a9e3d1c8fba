"""Every test belongs to one tier: those that ask for no rank are the `cpu` tier."""

from __future__ import annotations

import pytest

RANK_TIERS = {"gloo2", "gloo4", "gloo8", "gpu1", "gpu2", "gpu4", "gpu8"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(mark.name in RANK_TIERS for mark in item.iter_markers()):
            item.add_marker("cpu")

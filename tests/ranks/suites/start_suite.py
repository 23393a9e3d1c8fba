"""Ranks that fail or vanish before they have a place: see sitecustomize in test_start.py, which runs this."""

from __future__ import annotations

import pytest


def nothing(context):
    return context.rank


@pytest.mark.gloo2
@pytest.mark.parametrize("way", ["raise", "exit", "kill", "hang", "exit-at-start", "none"])
@pytest.mark.timeout(20)
def test_start(ranks, monkeypatch, way):
    monkeypatch.setenv("BROKEN_START", way)
    assert ranks.run(nothing).values == [0, 1]

"""Tests on simulated GPUs that note when they hold which. Run by test_lease.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest


def note(word, *values):
    line = " ".join([word, *map(str, values)]) + "\n"
    fd = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)


def hold(context, seconds):
    note("begin", context.device_uuid, time.monotonic())
    time.sleep(seconds)
    note("end", context.device_uuid, time.monotonic())
    return context.device_uuid, os.environ["CUDA_VISIBLE_DEVICES"].split(",")


def check(ranks, world):
    values = ranks.options(backend=None).run(hold, 0.3).values
    assert len({uuid for uuid, _ in values}) == world
    assert all(visible == [uuid for uuid, _ in values] for _, visible in values)


@pytest.mark.gpu2
@pytest.mark.parametrize("number", range(8))
def test_two(ranks, number):
    check(ranks, 2)


@pytest.mark.gpu1
@pytest.mark.parametrize("number", range(4))
def test_one(ranks, number):
    check(ranks, 1)


@pytest.mark.gpu4
def test_four(ranks):
    check(ranks, 4)


@pytest.mark.gpu2
def test_holds_for_long(ranks):
    ranks.options(backend=None).run(hold, 100)


@pytest.mark.gpu2
def test_idle_first(ranks):
    check(ranks, 2)


def test_idle_then():
    note("idle")
    release = Path(os.environ["NOTES"] + ".release")
    while not release.exists():
        time.sleep(0.02)


@pytest.mark.gpu2
def test_fresh_and_warm(ranks):
    check(ranks.options(fresh=True), 2)
    check(ranks, 2)
    check(ranks.options(fresh=True), 2)

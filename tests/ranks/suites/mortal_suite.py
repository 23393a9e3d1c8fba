"""Tests that run until their pytest is killed; their ranks have children of their own. Run by test_death.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

LONG = 120
SLEEP = [sys.executable, "-S", "-c", f"import time; time.sleep({LONG})"]


def note(*pids):
    with open(os.environ["PIDS"], "a") as file:
        file.write("".join(f"{pid}\n" for pid in pids))


def linger(context):
    """Worker: children in the same session and in another, shared memory, then sleep."""
    children = [subprocess.Popen(SLEEP, start_new_session=new) for new in (False, True)]
    shared = SharedMemory(create=True, size=1 << 16, name=f"mortal-{os.environ['MORTAL']}-{context.rank}")
    note(os.getpid(), *(child.pid for child in children))
    Path(os.environ["READY"]).with_suffix(f".{context.rank}").write_text(str(os.getpid()))
    time.sleep(LONG)
    shared.close()


def wait_until_told(context):
    """Worker: it passes when the file is there."""
    note(os.getpid())
    Path(os.environ["READY"]).with_suffix(f".{context.rank}").touch()
    while not Path(os.environ["READY"]).exists():
        time.sleep(0.02)


def chat(context, number):
    """Worker: something short."""
    note(os.getpid())
    return number


def reduce_for_ever(context):
    import torch
    import torch.distributed as dist

    note(os.getpid())
    while True:
        dist.all_reduce(torch.ones(1000))


def use_both_gpus(context):
    """Worker: a gibibyte, and kernels of NCCL that wait for the peer."""
    import torch
    import torch.distributed as dist

    note(os.getpid())
    value = torch.ones(1 << 28, device=context.device)
    dist.all_reduce(value)
    torch.cuda.synchronize()
    Path(os.environ["READY"]).with_suffix(f".{context.rank}").touch()
    while True:
        dist.all_reduce(value)


@pytest.fixture(autouse=True)
def the_parent():
    note(os.getpid())


@pytest.mark.gloo2
def test_lingers(ranks):
    ranks.options(backend=None, timeout=LONG).run(linger)


@pytest.mark.gloo2
def test_until_told(ranks):
    ranks.options(backend=None, timeout=LONG).run(wait_until_told)


@pytest.mark.gloo2
def test_ignores_interrupts(ranks):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks.options(backend=None, timeout=LONG).run(linger)


@pytest.mark.gloo2
@pytest.mark.timeout(4, method="signal")
def test_timeout_by_signal(ranks):
    ranks.options(backend=None, timeout=LONG).run(linger)


@pytest.mark.gloo2
@pytest.mark.timeout(4, method="thread")
def test_timeout_by_thread(ranks):
    ranks.options(backend=None, timeout=LONG).run(linger)


@pytest.mark.gloo2
@pytest.mark.parametrize("number", range(1000))
def test_chats(ranks, number):
    assert ranks.options(backend=None).run(chat, number).values == [number] * 2
    if number % 10 == 9:
        ranks.options(backend=None, fresh=True).run(chat, number)


@pytest.mark.gloo2
def test_reduces(ranks):
    ranks.options(timeout=LONG).run(reduce_for_ever)


@pytest.mark.gpu2
def test_uses_both_gpus(ranks):
    ranks.options(timeout=LONG).run(use_both_gpus)

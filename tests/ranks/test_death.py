"""However the parent dies, its ranks, their children and their files are gone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.child_pytest import wait_until
from support.mortal import carrying, is_running

pytestmark = pytest.mark.timeout(7200)  # each wait has a bound of its own; see GEFEN_RANKS_KILLS
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_signal_to_the_parent(start_mortal, tmp_path, number):
    """A signal to pytest alone, while its ranks are in their bodies, leaves nothing."""
    mortal = start_mortal(tmp_path, "-k", "lingers")
    mortal.wait_for_ranks()
    assert len(mortal.pids()) == 7
    os.kill(mortal.child.process.pid, number)
    mortal.check_gone()


def test_interrupt_of_the_whole_group(start_mortal, tmp_path):
    """Ctrl-C, which goes to the process group, ends pytest as an interrupt and leaves nothing."""
    mortal = start_mortal(tmp_path, "-k", "lingers")
    mortal.wait_for_ranks()
    os.killpg(mortal.child.process.pid, signal.SIGINT)
    mortal.check_gone()
    assert mortal.child.process.returncode == pytest.ExitCode.INTERRUPTED
    assert "interrupted by KeyboardInterrupt" in mortal.child.output
    assert "in linger" in mortal.child.output  # where the ranks were


def test_death_of_the_reaper_too(start_mortal, tmp_path):
    """When the reaper is killed and then pytest, the ranks end themselves a moment later."""
    mortal = start_mortal(tmp_path, "-k", "lingers")
    mortal.wait_for_ranks()
    ranks = [int(Path(f"{mortal.ready}.{r}").read_text()) for r in (0, 1)]
    (reaper,) = (pid for pid in carrying(str(mortal.pids_file)) if b"ranks.reaper" in command_of(pid))
    os.kill(reaper, signal.SIGKILL)
    os.kill(mortal.child.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, ranks)), 60, f"the end of {ranks}")
    for pid in mortal.alive():  # the ranks' own children, whom nobody was left to end
        os.kill(pid, signal.SIGKILL)
    for file in Path("/dev/shm").glob(f"*{mortal.mark}*"):
        file.unlink()


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_two_runs_side_by_side(start_mortal, tmp_path):
    """The death of one run is nothing to another one beside it, whose tests go on and pass."""
    (tmp_path / "one").mkdir(), (tmp_path / "other").mkdir()
    one, other = start_mortal(tmp_path / "one", "-k", "lingers"), start_mortal(tmp_path / "other", "-k", "until_told")
    one.wait_for_ranks(), other.wait_for_ranks()
    os.kill(one.child.process.pid, signal.SIGKILL)
    one.check_gone()
    other.ready.touch()
    other.check_gone()
    assert other.child.process.returncode == 0, other.child.output


def test_ignored_interrupt(start_mortal, tmp_path):
    """With SIGINT ignored, interrupts change nothing and the kill that follows leaves nothing."""
    mortal = start_mortal(tmp_path, "-k", "ignores")
    mortal.wait_for_ranks()
    os.killpg(mortal.child.process.pid, signal.SIGINT)
    assert len(mortal.alive()) >= 7
    os.kill(mortal.child.process.pid, signal.SIGKILL)
    mortal.check_gone()


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_timeout(start_mortal, tmp_path, method):
    """pytest-timeout leaves nothing, whether it raises in the test or ends the process."""
    mortal = start_mortal(tmp_path, "-k", f"timeout_by_{method}")
    mortal.check_gone()
    assert "timeout" in mortal.child.output.lower()
    assert mortal.child.process.returncode != 0


def test_worker_of_xdist_crashes(start_mortal, tmp_path):
    """When a worker of `pytest -n 2` is killed its ranks are gone at once, the others finish."""
    mortal = start_mortal(tmp_path, "-k", "lingers", "-n", "2", "--max-worker-restart", "0")
    mortal.wait_for_ranks()
    worker = int(mortal.pids_file.read_text().split()[0])
    os.kill(worker, signal.SIGKILL)
    mortal.check_gone()
    assert "crashed" in mortal.child.output


def random_kill(start_mortal, folder: Path, chance: random.Random) -> None:
    """One child pytest, one signal at a random moment."""
    tests = chance.choice(["lingers", "chats", "chats", "reduces"])
    mortal = start_mortal(folder, "-k", tests, *chance.choice([[], [], ["--ranks-fresh"]]))
    time.sleep(chance.uniform(0.2, 3.0))  # the moment is the experiment
    number = chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGHUP])
    if mortal.child.process.poll() is None:
        target = os.killpg if chance.random() < 0.3 else os.kill
        target(mortal.child.process.pid, number)
    try:
        mortal.child.process.wait(20)
    except subprocess.TimeoutExpired:
        mortal.child.process.kill()  # an interrupt was lost in the import of a library, which Python allows
    mortal.check_gone()


def test_random_kills(start_mortal, tmp_path):
    """Killed at random moments by random signals, pytest leaves nothing (GEFEN_RANKS_KILLS: how often)."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(int(os.environ.get("GEFEN_RANKS_KILLS", "20"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        random_kill(start_mortal, folder, chance)

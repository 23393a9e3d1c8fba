"""However the parent dies, its ranks, their children and their files are gone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from support.child_pytest import ChildPytest, wait_until

pytestmark = pytest.mark.timeout(7200)  # each wait has a bound of its own; see GEFEN_RANKS_KILLS
SUITE = Path(__file__).parent / "suites" / "mortal_suite.py"
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT]


class Mortal:
    """A child pytest that is going to be killed, and what must be gone afterwards."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex[:12]
        self.pids_file, self.ready = folder / "pids", folder / "ready"
        environ = {"PIDS": str(self.pids_file), "READY": str(self.ready), "MORTAL": self.mark}
        self.child = ChildPytest(folder, [str(SUITE), *arguments], environ)

    def wait_for_ranks(self) -> None:
        wait_until(lambda: all(self.ready.with_suffix(f".{r}").exists() for r in (0, 1)), 90, "both ranks' bodies")

    def pids(self) -> set[int]:
        return {int(line) for line in self.pids_file.read_text().split()} if self.pids_file.exists() else set()

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if is_running(pid)] + carrying(str(self.pids_file))

    def check_gone(self, patience: float = 30) -> None:
        """No process of the run, no file of it in /dev/shm or in its temporary directory."""
        self.child.wait()
        wait_until(lambda: not self.alive(), patience, f"the end of {self.pids()}")
        wait_until(lambda: not self.child.left_behind(), patience, f"an empty {self.child.temp}")
        assert [p.name for p in Path("/dev/shm").iterdir() if self.mark in p.name] == []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def carrying(mark: str) -> list[int]:
    """Processes with this text in their environment: every process of the child's, also one we never heard of."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes() and is_running(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_signal_to_the_parent(tmp_path, number):
    """A signal to pytest alone, while its ranks are in their bodies, leaves nothing."""
    mortal = Mortal(tmp_path, "-k", "lingers")
    mortal.wait_for_ranks()
    assert len(mortal.pids()) == 7
    os.kill(mortal.child.process.pid, number)
    mortal.check_gone()


def test_interrupt_of_the_whole_group(tmp_path):
    """Ctrl-C, which goes to the process group, ends pytest as an interrupt and leaves nothing."""
    mortal = Mortal(tmp_path, "-k", "lingers")
    mortal.wait_for_ranks()
    os.killpg(mortal.child.process.pid, signal.SIGINT)
    mortal.check_gone()
    assert mortal.child.process.returncode == pytest.ExitCode.INTERRUPTED
    assert "interrupted by KeyboardInterrupt" in mortal.child.output
    assert "in linger" in mortal.child.output  # where the ranks were


def test_death_of_the_reaper_too(tmp_path):
    """When the reaper is killed and then pytest, the ranks end themselves a moment later."""
    mortal = Mortal(tmp_path, "-k", "lingers")
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


def test_two_runs_side_by_side(tmp_path):
    """The death of one run is nothing to another one beside it, whose tests go on and pass."""
    (tmp_path / "one").mkdir(), (tmp_path / "other").mkdir()
    one, other = Mortal(tmp_path / "one", "-k", "lingers"), Mortal(tmp_path / "other", "-k", "until_told")
    one.wait_for_ranks(), other.wait_for_ranks()
    os.kill(one.child.process.pid, signal.SIGKILL)
    one.check_gone()
    other.ready.touch()
    other.check_gone()
    assert other.child.process.returncode == 0, other.child.output


def test_ignored_interrupt(tmp_path):
    """With SIGINT ignored, interrupts change nothing and the kill that follows leaves nothing."""
    mortal = Mortal(tmp_path, "-k", "ignores")
    mortal.wait_for_ranks()
    os.killpg(mortal.child.process.pid, signal.SIGINT)
    assert len(mortal.alive()) >= 7
    os.kill(mortal.child.process.pid, signal.SIGKILL)
    mortal.check_gone()


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_timeout(tmp_path, method):
    """pytest-timeout leaves nothing, whether it raises in the test or ends the process."""
    mortal = Mortal(tmp_path, "-k", f"timeout_by_{method}")
    mortal.check_gone()
    assert "timeout" in mortal.child.output.lower()
    assert mortal.child.process.returncode != 0


def test_worker_of_xdist_crashes(tmp_path):
    """When a worker of `pytest -n 2` is killed its ranks are gone at once, the others finish."""
    mortal = Mortal(tmp_path, "-k", "lingers", "-n", "2", "--max-worker-restart", "0")
    mortal.wait_for_ranks()
    worker = int(mortal.pids_file.read_text().split()[0])
    os.kill(worker, signal.SIGKILL)
    mortal.check_gone()
    assert "crashed" in mortal.child.output


def random_kill(folder: Path, chance: random.Random) -> None:
    """One child pytest, one signal at a random moment."""
    tests = chance.choice(["lingers", "chats", "chats", "reduces"])
    mortal = Mortal(folder, "-k", tests, *chance.choice([[], [], ["--ranks-fresh"]]))
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


def test_random_kills(tmp_path):
    """Killed at random moments by random signals, pytest leaves nothing (GEFEN_RANKS_KILLS: how often)."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(int(os.environ.get("GEFEN_RANKS_KILLS", "20"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        random_kill(folder, chance)

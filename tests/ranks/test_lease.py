"""Leases: N GPUs for one run at a time, by UUID, all or nothing, freed by death; on simulated inventories."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from gefen_offload.ranks import lease
from support.child_pytest import ChildPytest, wait_until

SUITE = Path(__file__).parent / "suites" / "leased_suite.py"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder of locks of this test alone."""
    monkeypatch.setenv(lease.FOLDER, str(tmp_path / "leases"))
    return lease.folder()


def nothing_to_let_go() -> None:
    pass


def take(names: str, count: int, patience: float = 5) -> lease.Lease:
    return lease.acquire(list(names), count, patience, nothing_to_let_go)


def test_order_and_exclusion(folder):
    """A lease has the first free GPUs in the order of the candidates, and nobody else gets them."""
    first = take("abcd", 2)
    second = take("abcd", 2)
    assert (first.devices, second.devices) == (("a", "b"), ("c", "d"))
    first.release()
    assert take("dbac", 2).devices == ("b", "a")


def test_all_or_nothing(folder):
    """A request that cannot be met holds nothing, and its error names the holders."""
    held = take("ab", 1)
    with pytest.raises(lease.LeaseTimeoutError, match=f"a by process {os.getpid()}"):
        take("ab", 2, patience=0.2)
    assert take("b", 1).devices == ("b",)
    held.release()


def test_one_folder_for_the_machine(tmp_path, monkeypatch):
    """Whoever's temporary directory is elsewhere, as a batch job's is, still meets the others' locks."""
    monkeypatch.delenv(lease.FOLDER, raising=False)
    before = lease.folder()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert lease.folder() == before == Path("/tmp/gefen-ranks-leases")
    lease.sweep(before)


def test_a_lock_of_another_users_is_not_created(folder, monkeypatch):
    """Kernels that protect files in /tmp forbid O_CREAT on another user's; one that is there is opened without it."""
    held = take("a", 1)
    asked = []
    opened = os.open

    def open_as_told(path, flags, *more, **named):
        asked.append(flags)
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", open_as_told)
    with pytest.raises(lease.LeaseTimeoutError):
        lease.acquire(["a"], 1, 0, nothing_to_let_go)
    assert any(not flags & os.O_CREAT for flags in asked)
    assert all(flags & os.O_EXCL for flags in asked if flags & os.O_CREAT)
    held.release()


def test_more_than_there_are(folder):
    """More GPUs than are visible is an error at once."""
    with pytest.raises(lease.LeaseTimeoutError, match="3 GPUs wanted, 2 are visible"):
        take("ab", 3)


def test_a_large_request_is_not_starved(folder):
    """While a request for both waits, a later one for a single free GPU waits behind it."""
    held = take("ab", 1)
    order: list[str] = []
    large = threading.Thread(target=lambda: (take("ab", 2, 30).release(), order.append("large")))
    large.start()
    wait_until(lambda: lease.wanted("b"), what="the large request's ticket")
    small = threading.Thread(target=lambda: (take("ab", 1, 30).release(), order.append("small")))
    small.start()
    wait_until(lambda: len(list(folder.glob("ticket-*"))) == 2, what="the small request's ticket")
    held.release()
    large.join(), small.join()
    assert order == ["large", "small"]


def test_letting_go(folder):
    """A caller that finds too few free is asked once to give back what it holds idle."""
    held = take("ab", 1)
    assert lease.acquire(["a", "b"], 2, 5, held.release).devices == ("a", "b")


def test_wanted_only_by_the_living(folder):
    """A ticket that nobody holds is no wish."""
    (folder / "ticket-0-1").write_text(json.dumps(["a"]))
    assert not lease.wanted(["a"])


def test_nothing_is_left(folder):
    """Released leases leave no file; a sweep removes what dead runs left, and not what is held."""
    take("ab", 2).release()
    assert list(folder.iterdir()) == []
    held = take("ab", 1)
    (folder / "gpu-dead").touch()
    lease.sweep(folder)
    assert [p.name for p in folder.iterdir()] == ["gpu-a"]
    held.release()
    lease.sweep(folder)
    assert not folder.exists()


# whole runs


class Leased:
    """A child pytest on simulated GPUs."""

    def __init__(self, tmp_path: Path, gpus: int, *arguments: str, name: str = "run", **environ: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        simulated = tmp_path / "gpus.json"
        simulated.write_text(json.dumps([f"SIM-{i}" for i in range(gpus)]))
        self.notes = folder / "notes"
        variables = {"GEFEN_RANKS_INVENTORY": str(simulated), "NOTES": str(self.notes)}
        variables[lease.FOLDER] = str(tmp_path / "locks")
        self.child = ChildPytest(folder, [str(SUITE), *arguments], {**variables, **environ})

    def noted(self, word: str) -> list[list[str]]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line.split()[1:] for line in lines if line.startswith(word)]

    def spans(self) -> list[tuple[str, float, float]]:
        """UUID, begin and end of every body, in pairs."""
        spans = []
        for uuid in sorted({u for u, _ in self.noted("begin")}):
            begins, ends = (sorted(float(t) for u, t in self.noted(word) if u == uuid) for word in ("begin", "end"))
            spans += [(uuid, b, e) for b, e in zip(begins, ends, strict=True)]
        return spans

    def outcomes(self) -> dict[str, str]:
        return {r.name: r.outcome for r in self.child.reports if r.when == "call"}


def overlapping(spans: list[tuple[str, float, float]]) -> int:
    """The most bodies at any one time."""
    return max(sum(b <= begin < e for _, b, e in spans) for _, begin, _ in spans)


def test_four_at_a_time_on_eight(tmp_path):
    """`pytest -n 4 -m gpu2` on eight GPUs: no GPU is used twice at once, and several tests do run at once."""
    run = Leased(tmp_path, 8, "-n", "4", "-m", "gpu2", "-k", "test_two")
    assert run.child.wait() == 0, run.child.output
    assert len(run.spans()) == 16
    for _, group in itertools.groupby(run.spans(), key=lambda span: span[0]):
        assert overlapping(list(group)) == 1
    assert 4 <= overlapping(run.spans()) <= 8
    proofs = [value for r in run.child.reports if r.when == "teardown" for key, value in r.properties if key == "ranks"]
    assert len(proofs) == 8
    assert all(len(set(p["devices"])) == 2 and p["finished"] == [0, 1] and p["simulated"] for p in proofs)


def test_pairs_take_turns_on_two(tmp_path):
    """On two GPUs `-n 2` runs gpu2 tests one at a time and gpu1 tests beside each other, and all come to their turn."""
    run = Leased(tmp_path, 2, "-n", "2", "-k", "test_one or test_two")
    assert run.child.wait() == 0, run.child.output
    assert len(run.spans()) == 20
    assert overlapping(run.spans()) <= 2


def test_a_foreign_process_holds_one(tmp_path, monkeypatch):
    """With one of two GPUs held elsewhere, gpu1 tests run on the other, and a gpu2 test says who holds it."""
    monkeypatch.setenv(lease.FOLDER, str(tmp_path / "locks"))
    held = lease.acquire(["SIM-0"], 1, 5, nothing_to_let_go)
    run = Leased(tmp_path, 2, "-k", "test_one or test_idle_first", "--ranks-lease-timeout", "0.5")
    run.child.wait()
    assert {uuid for uuid, _ in run.noted("begin")} == {"SIM-1"}
    assert set(run.outcomes().values()) == {"passed", "failed"}
    assert f"SIM-0 by process {os.getpid()}" in run.child.report("test_idle_first").text
    held.release()


def test_an_idle_lease_is_given_back(tmp_path):
    """A run whose ranks are idle lets another run have their GPUs before it ends itself."""
    idle = Leased(tmp_path, 2, "-k", "idle", name="idle")
    wait_until(lambda: len(idle.noted("idle")) == 1, 60, "the idle test")
    other = Leased(tmp_path, 2, "-k", "test_two and 0", name="other")
    assert other.child.wait() == 0, other.child.output
    assert idle.child.process.poll() is None
    Path(f"{idle.notes}.release").touch()
    assert idle.child.wait() == 0


def test_death_frees(tmp_path):
    """When a run that holds GPUs is killed, another gets them, and no lock file stays."""
    first = Leased(tmp_path, 2, "-k", "test_holds_for_long", name="first")
    wait_until(lambda: len(first.noted("begin")) == 2, 60, "the first run's bodies")
    os.kill(first.child.process.pid, signal.SIGKILL)
    first.child.process.wait()
    second = Leased(tmp_path, 2, "-k", "test_two and 0", "--ranks-lease-timeout", "30", name="second")
    assert second.child.wait() == 0, second.child.output
    wait_until(lambda: not (tmp_path / "locks").exists(), what="the removal of the lock files")


def test_visible_devices_are_respected(tmp_path):
    """Only the GPUs in the caller's CUDA_VISIBLE_DEVICES are leased, in its order."""
    run = Leased(tmp_path, 4, "-k", "test_two and 0", CUDA_VISIBLE_DEVICES="SIM-3,1")
    assert run.child.wait() == 0, run.child.output
    assert {uuid for uuid, _ in run.noted("begin")} == {"SIM-3", "SIM-1"}


def test_a_test_does_not_wait_for_itself(tmp_path):
    """A test that runs on fresh and on warm ranks, which both need all GPUs, gives back before it takes."""
    run = Leased(tmp_path, 2, "-k", "test_fresh_and_warm", "--ranks-lease-timeout", "20")
    assert run.child.wait() == 0, run.child.output


def test_too_few_gpus(tmp_path):
    """Too few GPUs: a skip that says how many, unless --require-gpus covers the test, then an error."""
    lenient = Leased(tmp_path, 2, "-k", "test_four", "--require-gpus", "2", name="lenient")
    lenient.child.wait()
    assert lenient.child.report("test_four", "setup").outcome == "skipped"
    assert "needs 4 GPU(s), found 2" in lenient.child.report("test_four", "setup").text
    strict = Leased(tmp_path, 2, "-k", "test_four", "--require-gpus", "4", name="strict")
    assert strict.child.wait() == pytest.ExitCode.TESTS_FAILED
    assert strict.child.report("test_four", "setup").outcome == "failed"
    assert "and --require-gpus 4 was given" in strict.child.report("test_four", "setup").text

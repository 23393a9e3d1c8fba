"""Every way a rank can fail or vanish, seen to give the right verdict, rank, cause and time. The broken tests are in
`suites/`; each suite runs once, in a pytest of its own, and the tests here read what it reported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.child_pytest import ChildPytest, run_child

pytestmark = pytest.mark.timeout(900)  # the first test waits for whole suites
BROKEN = Path(__file__).parent / "suites"
SLACK = 12.0  # seconds to a verdict on a busy machine: the sleeps in the broken tests are 60 s, so this still tells

BODY_ENDINGS = {
    "raise": "raised ValueError: the reason in stage 'body'",
    "assert": "Differing items:",
    "exit0": "exited with code 0 and no outcome in stage 'body'",
    "exit3": "exited with code 3 and no outcome in stage 'body'",
    "sysexit": "raised SystemExit: 4",
    "sigkill": "was killed by SIGKILL (9) in stage 'body'",
    "sigterm": "was killed by SIGTERM (15) in stage 'body'",
    "segfault": "was killed by SIGSEGV (11) in stage 'body'",
    "abort": "was killed by SIGABRT (6) in stage 'body'",
    "unpicklable-exception": "HoldsALock: locked in",
    "textless-exception": "its text could not be made",
    "keyboard-interrupt": "raised KeyboardInterrupt",
    "loud": "characters left out",
    "no-text": "raised ValueError: half a character: \\udcff",
    "cut-off": "closed its pipe and handed over no outcome in stage 'body'",
    "another-program": "closed its pipe and handed over no outcome in stage 'body'",
    "garbage": "wrote something else than an outcome into its pipe (a message of",
    "short-garbage": "wrote something else than an outcome into its pipe (UnpicklingError",
    "thread": "exited with code 8 and no outcome in stage 'body'",
    "last-words": "the last words",
    "verbose": "raised ValueError: the reason",
}
OTHERWISE = {
    "test_unpicklable_value[lambda]": ["ranks 0 and 1 of 2 failed", "lambda", "stage 'result'"],
    "test_unpicklable_value[socket]": ["ranks 0 and 1 of 2 failed", "cannot pickle 'socket'", "stage 'result'"],
    "test_unpicklable_value[unopenable]": ["ranks 0 and 1 of 2 failed", "cannot be made again here", "stage 'result'"],
    "test_hang[python]": ["rank 1 of 2 failed", "did not finish", "in sleep_in_python"],
    "test_hang[gil]": ["rank 1 of 2 failed", "did not finish", "in hold_the_gil", "in stage 'body'"],
    "test_hang[stopped]": ["rank 1 of 2 failed", "did not finish (process stopped)", "in kill_self"],
    "test_stopped_between_runs": ["rank 1 of 2 failed", "(process stopped) in stage 'wait for a task'"],
    "test_second_run_hangs": ["rank 1 of 2 failed", "did not finish", "in sleep_in_python"],
    "test_stall": ["ranks 0 and 1 of 2 failed", "did not finish", "after mark 'about to be quiet'", "in quiet"],
    "test_extra_outcome": ["rank 1 of 2 failed", "handed over more than one outcome"],
    "test_skip[two]": ["the ranks do not agree on skipping", "rank 0 skipped: one", "rank 1 skipped: other"],
    "test_skip[one]": ["the ranks do not agree on skipping", "rank 0 passed", "rank 1 skipped: alone"],
    "test_dies_in_teardown": ["rank 1 of 2 failed", "exited with code 9 and no outcome in stage 'teardown'"],
    "test_children_of_a_killed_rank": ["ranks 0 and 1 of 2 failed", "did not finish"],
    "test_worker_is_local": ["TypeError", "top level"],
    "test_fault_never_fires": ["a fault never fired: kill rank 1 at mark step 7"],
    "test_fault_never_fires_in_an_expected_failure": ["a fault never fired: kill rank 1 at mark step 7"],
    "test_expected_otherwise": ["rank 1 failed first, not rank 0", "not 'result'", "did not get SIGTERM"],
    "test_expected_and_passed": ["expected a failure of the ranks, and they passed"],
}
STAGES = ["device", "load worker", "body", "result", "teardown"]
FAULTS = {
    "throw": "raised gefen_offload.ranks.faults.InjectedError: injected",
    "kill": "was killed by SIGKILL (9)",
    "leave": "exited with code 0 and no outcome",
}
PASS = [
    *(f"test_sizes[{size}]" for size in (0, 1, 20_000, 1_000_000, 100_000_000)),
    *("test_dies_between_tests", "test_after_one_that_died", "test_leaks_a_thread", "test_leaks_a_file"),
    *("test_leaks_a_daemon", "test_leaves_a_temporary_folder"),
    *("test_leaks_children", "test_pollutes", "test_is_not_polluted", "test_expected"),
]


PASS_IN_A_GROUP = [
    *("test_corrupt", "test_pollutes", "test_leaves_a_group", "test_destroys_the_default_group"),
    *("test_environment_of_one_test", "test_stays_warm", "test_new_group"),
]


QUICK = ["-k", "peer_done or skip or unpicklable or polluted or leaks_a"]


@pytest.fixture(scope="session")
def suites(tmp_path_factory) -> Iterator[dict[str, ChildPytest]]:
    """The broken suites, all running at once; one that no test of this process has waited for is ended."""
    started = {}
    for name, options in {"free": [], "gloo": [], "fresh": [*QUICK, "--ranks-fresh"]}.items():
        folder = tmp_path_factory.mktemp(name)
        suite = BROKEN / ("gloo_suite.py" if name == "gloo" else "free_suite.py")
        started[name] = ChildPytest(folder, [str(suite), *options], {"CHILD_PIDS": str(folder / "pids")})
    yield started
    for suite in started.values():
        if suite.process.poll() is None:
            suite.process.kill()
            suite.process.wait()


@pytest.fixture
def free(suites) -> ChildPytest:
    """The suite on ranks without torch."""
    suites["free"].wait()
    return suites["free"]


@pytest.fixture
def fresh(suites) -> ChildPytest:
    """The same suite's quick part with new processes for every test."""
    suites["fresh"].wait()
    return suites["fresh"]


@pytest.fixture
def gloo(suites) -> ChildPytest:
    """The suite with peers in collectives."""
    suites["gloo"].wait()
    return suites["gloo"]


@pytest.mark.parametrize("ending", BODY_ENDINGS)
def test_the_end_of_one_rank(free, ending):
    """However rank 1 ends, the verdict names it and the way it ended, soon."""
    report = free.report(f"test_peer_done[{ending}]")
    check_ending(report, ending)
    assert "rank 0 passed" in report.text


@pytest.mark.parametrize("ending", ["raise", "exit3", "sigkill", "abort", "loud", "cut-off"])
def test_the_end_of_one_rank_beside_a_busy_one(free, ending):
    """With rank 0 busy for a minute the verdict is as soon, and says where rank 0 was."""
    report = free.report(f"test_peer_busy[{ending}]")
    check_ending(report, ending)
    assert "secondary: rank 0 was still running" in report.text
    assert "in on_rank_one_alone" in report.text.partition("secondary")[2]
    assert "threading.py" not in report.text.partition("secondary")[2]  # the rank's own watch says nothing


def latency(report) -> float:
    """Seconds from the first cause to the verdict, as the report has it; how long ranks take to start is no part."""
    return float(re.search(r"verdict ([0-9.]+) s after the first cause", report.text)[1])


def check_ending(report, ending):
    assert report.outcome == "failed"
    assert "rank 1 of 2 failed" in report.text
    assert BODY_ENDINGS[ending] in report.text
    assert latency(report) < SLACK


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_failures(free, name):
    """Each failure is reported with its rank, its cause and where the rank was."""
    report = free.report(name)
    assert report.outcome == "failed"
    assert [part for part in OTHERWISE[name] if part not in report.text] == [], report.text
    assert "first cause" not in report.text or latency(report) < SLACK


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_every_stage(free, fault, stage):
    """A rank that raises, dies or exits in a stage is reported with that stage, also while it is being set up."""
    report = free.report(f"test_fault_in_stage[{fault}-{stage}]")
    assert report.outcome == "failed"
    assert f"rank 1 {FAULTS[fault]} in stage '{stage}'" in report.text
    assert "fault fired" in report.text
    assert latency(report) < SLACK


@pytest.mark.parametrize("name", PASS)
def test_what_must_pass(free, name):
    """The clean twins, among them messages of 0 bytes to 100 MB each way, pass beside the broken tests."""
    assert free.report(name).outcome == "passed", free.report(name).text


def test_skip_of_all(free):
    """All ranks skipping for one reason is a skip with that reason."""
    report = free.report("test_skip[same]")
    assert report.outcome == "skipped"
    assert "same" in report.text


def test_death_between_tests(free):
    """A rank that dies after its test is an error of the next test's teardown, which names the one it died after."""
    report = free.report("test_after_one_that_died", "teardown")
    assert report.outcome == "failed"
    assert "rank 1 was killed by SIGALRM (14)" in report.text
    assert "test_dies_between_tests had passed" in report.text


def test_death_after_the_last_test(tmp_path):
    """A rank that dies after the last test fails the session."""
    suite = tmp_path / "test_last.py"
    suite.write_text(DIES_LATE)
    child = run_child(tmp_path, str(suite), "-p", "no:randomly")
    assert child.report("test_dies_late").outcome == "passed"
    assert child.process.returncode == pytest.ExitCode.TESTS_FAILED
    assert "after the last test: rank 0 was killed by SIGALRM (14)" in child.output


DIES_LATE = """
import os, signal
import pytest

pids = []

def pid(context):
    return os.getpid()

@pytest.mark.gloo2
def test_dies_late(ranks):
    pids[:] = ranks.options(backend=None).run(pid).values

def test_later():
    os.kill(pids[0], signal.SIGALRM)
    os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)  # all of its threads; its first may be a zombie before
"""


LEAKS = {
    "thread": "thread 'left-behind'",
    "file": "open file",
    "children": "child process",
    "daemon": "child process",
}


def test_leaks_are_named(free):
    """A thread, an open file and children are told as warnings that name the test."""
    for name, what in LEAKS.items():
        test = f"test_leaks_{'a_' if name != 'children' else ''}{name}"
        assert f"{test} left behind: rank 1: {what}" in free.output, free.output[-3000:]


def test_children_of_ranks_are_gone(free):
    """What a rank had started is dead after its pool was retired, in the rank's session and in one of its own."""
    pids = [int(line) for line in (free.folder / "pids").read_text().split()]
    assert len(pids) == 4
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_fixture_without_a_marker(free):
    """The fixture without a tier is an error that lists the tiers."""
    assert "gloo2, gloo4, gloo8, gpu1" in free.report("test_without_a_tier", "setup").text


def test_artifacts(free):
    """A failing test leaves one folder, with the ranks' output and the line that runs it again."""
    folder = free.folder / "artifacts" / "test_peer_done-verbose"
    assert len((folder / "run0" / "rank1.out").read_text()) > 1_000_000
    assert "pytest" in (folder / "rerun.sh").read_text()
    assert "the reason" in (folder / "report.txt").read_text()
    assert (folder / "run0" / "outcomes.json").exists()
    assert str(folder) in free.report("test_peer_done[verbose]").text


@pytest.mark.parametrize("suite", ["free", "gloo", "fresh"])
def test_nothing_is_left(request, suite):
    """After a whole suite of broken tests nothing is left in the temporary directory."""
    assert request.getfixturevalue(suite).left_behind() == []


def test_pooled_and_fresh_agree(free, fresh):
    """New processes for every test give the verdicts of pooled ones, test by test."""
    new = {r.name: r.outcome for r in fresh.reports if r.when == "call"}
    pooled = {r.name: r.outcome for r in free.reports if r.when == "call" and r.name in new}
    assert len(new) > 20
    assert new == pooled


GLOO_ENDINGS = {
    "throw": "rank 1 raised gefen_offload.ranks.faults.InjectedError: injected",
    "kill": "rank 1 was killed by SIGKILL (9)",
    "leave": "rank 1 exited with code 0 and no outcome",
}


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("ending", GLOO_ENDINGS)
def test_peer_in_a_collective(gloo, ending, size):
    """With rank 0 in an all-reduce of 4 B or 100 MB, rank 1's end is the first cause, rank 0's error secondary."""
    report = gloo.report(f"test_peer_in_a_collective[{ending}-{size}]")
    assert f"first cause: {GLOO_ENDINGS[ending]} in stage 'body' after mark 'step 1'" in report.text
    assert "secondary: rank 0" in report.text
    assert latency(report) < SLACK


def test_hang_in_a_collective(gloo):
    """A collective that one rank never enters is reported with its number and that rank, which is the first cause."""
    report = gloo.report("test_hang_in_a_collective")
    assert "first cause: rank 1" in report.text
    assert "never entered all_reduce (number 2), where rank 0 waited: rank 1 (entered 1 before)" in report.text
    assert "in reduce_without_rank_one" in report.text


def test_stopped_in_a_collective(gloo):
    """A stopped rank is reported as stopped, with its stack, and its peer as waiting in the collective."""
    report = gloo.report("test_stopped_in_a_collective")
    assert "rank 0 did not finish (process stopped)" in report.text
    assert "never entered all_reduce (number 2), where rank 1 waited" in report.text


@pytest.mark.parametrize("stage", ["device", "store", "process group"])
def test_failure_before_the_group(gloo, stage):
    """A rank that raises before there is a group shows its own traceback."""
    report = gloo.report(f"test_fault_before_the_group[{stage}]")
    assert (
        f"first cause: rank 1 raised gefen_offload.ranks.faults.InjectedError: before the group in stage '{stage}'"
        in (report.text)
    )
    assert latency(report) < SLACK


def test_killed_in_a_collective(gloo):
    """A signal from outside ends rank 0; rank 1's connection error does not hide it."""
    assert "first cause: rank 0 was killed by SIGALRM (14)" in gloo.report("test_killed_by_an_alarm").text


@pytest.mark.parametrize("name", PASS_IN_A_GROUP)
def test_what_must_pass_with_a_group(gloo, name):
    """Warm pools, restored defaults, fresh groups and corrupted elements behave as they should."""
    assert gloo.report(name).outcome == "passed", gloo.report(name).text

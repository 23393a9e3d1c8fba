"""Broken on purpose: every way a rank can fail or vanish, on ranks without torch. Run by test_failures.py."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from gefen_offload.ranks import expect_failure
from gefen_offload.ranks import faults as f

LONG = 60


@pytest.fixture
def free(ranks):
    """Ranks without a group, hence without torch."""
    return ranks.options(backend=None, timeout=20)


def on_rank_one(context, action, *args):
    """Worker: rank 1 does it, rank 0 returns."""
    if context.rank == 1:
        action(*args)
    return context.rank


def on_rank_one_alone(context, action, *args):
    """Worker: rank 1 does it while rank 0 is busy for long."""
    if context.rank == 1:
        action(*args)
    time.sleep(LONG)


def fail():
    raise ValueError("the reason")


def compare():
    left = {"a": [1, 2, 3]}
    assert left == {"a": [1, 2, 4]}, "said in the rank"


def kill_self(number):
    os.kill(os.getpid(), number)
    time.sleep(LONG)


def segfault():
    ctypes.string_at(0)


def cut_off():
    os.closerange(3, 256)
    time.sleep(LONG)


def become_another():
    os.execv(sys.executable, [sys.executable, "-S", "-c", f"import time; time.sleep({LONG})"])


def write_into_the_pipe(data):
    for fd in range(3, 32):
        if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            os.write(fd, data)
    time.sleep(LONG)


class Unopenable:
    """Can be packed, and not be made again."""

    def __reduce__(self):
        return int, ("not a number",)


def die_from_a_thread():
    threading.Thread(target=lambda: (time.sleep(0.1), os._exit(8))).start()
    time.sleep(LONG)


def print_and_die():
    print("the last words")
    os.kill(os.getpid(), signal.SIGKILL)


class HoldsALock(Exception):
    """Cannot be pickled, and its constructor cannot be called again."""

    def __init__(self, one, two):
        super().__init__("locked in")
        self.lock = threading.Lock()


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


def throw(kind, *args):
    raise kind(*args)


def hold_the_gil():
    ctypes.PyDLL(None).sleep(LONG)  # a PyDLL keeps the GIL during the call
    raise RuntimeError("the sleep was cut short by the signal that asked for the stack")


def sleep_in_python():
    while True:
        time.sleep(0.01)


def fork_and_return(context):
    if context.rank == 1 and os.fork() == 0:
        time.sleep(0.3)  # the child comes second, as it may on a busy machine
    return context.rank


def returns(context, kind, size):
    values = {"bytes": bytes(size), "lambda": lambda: 0, "unopenable": Unopenable()}
    return values[kind] if kind != "socket" else socket.socket()


def receive(context, data):
    return len(data)


def shout(size):
    raise RuntimeError("x" * size)


def print_much(size):
    sys.stdout.write("y" * size)
    fail()


def skips(context, reasons):
    if reasons[context.rank]:
        pytest.skip(reasons[context.rank])


class Landmine:
    """Ends the process when it is collected."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        os._exit(9)


def leave_a_landmine():
    Landmine()


pids = []


def kill_and_wait(pid):
    """An end between tests."""
    os.kill(pid, signal.SIGALRM)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # all of its threads; its first may be a zombie before


def leave_a_thread():
    threading.Thread(target=time.sleep, args=[LONG], name="left-behind", daemon=True).start()


kept = []


def leave_a_file(path):
    kept.append(open(path, "w"))  # noqa: SIM115 (left open on purpose)


def leave_a_folder():
    return tempfile.mkdtemp()


def leave_a_child(path, new_session):
    command = [sys.executable, "-c", f"import time; time.sleep({LONG})"]
    child = subprocess.Popen(command, start_new_session=new_session)
    with open(path, "a") as file:
        file.write(f"{child.pid}\n")


def leave_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(LONG)
        os._exit(0)
    os.wait()


def leave_children(path):
    leave_a_child(path, False)
    leave_a_child(path, True)


def pollute(context):
    os.environ["POLLUTED"] = "yes"
    os.chdir("/")
    sys.path.insert(0, "/polluted")
    os.environ["TORCH_NCCL_POLLUTED"] = "yes"
    os.umask(0o777)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    sys.stdout.close()


def polluted(context):
    import random

    print("heard")
    process = os.umask(0o022), signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    variables = os.environ.get("POLLUTED"), os.environ.get("TORCH_NCCL_POLLUTED")
    return variables, os.getcwd(), "/polluted" in sys.path, process, random.random()


def pid(context):
    return os.getpid()


def marks(context, count):
    for number in range(count):
        context.step(number)


def quiet(context):
    context.mark("about to be quiet")
    time.sleep(LONG)


ENDINGS = {
    "raise": (fail,),
    "assert": (compare,),
    "exit0": (os._exit, 0),
    "exit3": (os._exit, 3),
    "sysexit": (sys.exit, 4),
    "sigkill": (kill_self, signal.SIGKILL),
    "sigterm": (kill_self, signal.SIGTERM),
    "segfault": (segfault,),
    "abort": (os.abort,),
    "unpicklable-exception": (throw, HoldsALock, 1, 2),
    "textless-exception": (throw, NoText),
    "keyboard-interrupt": (throw, KeyboardInterrupt),
    "loud": (shout, 100_000_000),
    "no-text": (throw, ValueError, "half a character: \udcff"),
    "cut-off": (cut_off,),
    "another-program": (become_another,),
    "garbage": (write_into_the_pipe, b"no message"),
    "short-garbage": (write_into_the_pipe, b"\3\0\0\0\0\0\0\0abc"),
    "thread": (die_from_a_thread,),
    "last-words": (print_and_die,),
    "verbose": (print_much, 100_000_000),
}


@pytest.mark.gloo2
@pytest.mark.parametrize("ending", ENDINGS)
def test_peer_done(free, ending):
    free.run(on_rank_one, *ENDINGS[ending])


@pytest.mark.gloo2
@pytest.mark.parametrize("ending", ["raise", "exit3", "sigkill", "abort", "loud", "cut-off"])
def test_peer_busy(free, ending):
    free.run(on_rank_one_alone, *ENDINGS[ending])


@pytest.mark.gloo2
@pytest.mark.parametrize("kind", ["lambda", "socket", "unopenable"])
def test_unpicklable_value(free, kind):
    free.run(returns, kind, 0)


@pytest.mark.gloo2
@pytest.mark.parametrize("size", [0, 1, 20_000, 1_000_000, 100_000_000], ids=str)
def test_sizes(free, size):
    assert free.run(returns, "bytes", size).values == [bytes(size)] * 2
    assert free.run(receive, bytes(size)).values == [size] * 2


@pytest.mark.gloo2
@pytest.mark.parametrize("hang", [sleep_in_python, hold_the_gil, kill_self], ids=["python", "gil", "stopped"])
def test_hang(free, hang):
    free.options(timeout=1).run(on_rank_one, hang, *([signal.SIGSTOP] if hang is kill_self else []))


@pytest.mark.gloo2
def test_stall(free):
    free.options(stall=1).run(quiet)


@pytest.mark.gloo2
def test_extra_outcome(free):
    free.run(fork_and_return)


@pytest.mark.gloo2
@pytest.mark.parametrize("reasons", [("same", "same"), ("one", "other"), ("", "alone")], ids=["same", "two", "one"])
def test_skip(free, reasons):
    free.run(skips, reasons)


@pytest.mark.gloo2
@pytest.mark.parametrize("stage", ["device", "load worker", "body", "result", "teardown"])
@pytest.mark.parametrize("fault", ["throw", "kill", "leave"])
def test_fault_in_stage(free, stage, fault):
    free.options(faults=[getattr(f, fault)(1, f.stage(stage))]).run(marks, 1)


@pytest.mark.gloo2
def test_dies_in_teardown(free):
    free.run(on_rank_one, leave_a_landmine)


@pytest.mark.gloo2
def test_dies_between_tests(free):
    pids[:] = free.run(pid).values


@pytest.mark.gloo2
def test_after_one_that_died(free):
    kill_and_wait(pids[1])
    assert free.run(marks, 1).values == [None, None]


@pytest.mark.gloo2
def test_stopped_between_runs(free):
    os.kill(free.run(pid).values[1], signal.SIGSTOP)
    free.options(timeout=1).run(pid)


@pytest.mark.gloo2
@pytest.mark.timeout(12)
def test_second_run_hangs(ranks):
    ranks.options(backend=None).run(pid)
    time.sleep(5)
    ranks.options(backend=None).run(on_rank_one, sleep_in_python)


@pytest.mark.gloo2
def test_leaks_a_thread(free):
    free.run(on_rank_one, leave_a_thread)


@pytest.mark.gloo2
def test_leaks_a_daemon(free):
    free.run(on_rank_one, leave_a_daemon)


@pytest.mark.gloo2
def test_leaves_a_temporary_folder(free):
    free.run(on_rank_one, leave_a_folder)


@pytest.mark.gloo2
def test_leaks_a_file(free, tmp_path):
    free.run(on_rank_one, leave_a_file, str(tmp_path / "open"))


@pytest.mark.gloo2
def test_leaks_children(free):
    free.run(on_rank_one, leave_children, os.environ["CHILD_PIDS"])


@pytest.mark.gloo2
def test_children_of_a_killed_rank(free):
    free.options(timeout=1).run(on_rank_one_alone, leave_children, os.environ["CHILD_PIDS"])


@pytest.mark.gloo2
def test_pollutes(free):
    free.run(pollute)


@pytest.mark.gloo2
def test_is_not_polluted(free):
    result = free.run(polluted)
    umask = os.umask(0)
    os.umask(umask)
    assert result.values[0][:4] == ((None, None), os.getcwd(), False, (umask, signal.SIG_DFL, set()))
    assert result.stdout(1) == "heard\n"
    assert free.run(polluted).values == result.values


@pytest.mark.gloo2
def test_worker_is_local(free):
    free.run(lambda context: 0)


@pytest.mark.gloo2
def test_fault_never_fires(free):
    free.options(faults=[f.kill(1, at=7)]).run(marks, 3)


@pytest.mark.gloo2
def test_fault_never_fires_in_an_expected_failure(free):
    with expect_failure(rank=1):
        free.options(faults=[f.kill(1, at=7)]).run(on_rank_one, fail)


@pytest.mark.gloo2
def test_expected(free):
    with expect_failure(rank=1, stage="body", signal=signal.SIGKILL, within=10) as expected:
        free.options(faults=[f.kill(1, at=2)]).run(marks, 5)
    assert expected.first.mark == "step 2"
    with expect_failure(rank=0, exception=f.InjectedError, message="by hand"):
        free.options(faults=[f.throw(0, "step 0", "by hand")]).run(marks, 1)
    with expect_failure(rank=0, exit_code=6):
        free.options(faults=[f.leave(0, 0, code=6)]).run(marks, 1)
    assert free.options(faults=[f.delay(0, 0, 0.01)]).run(marks, 1).fired == ("delay rank 0 at mark step 0",)


@pytest.mark.gloo2
def test_expected_otherwise(free):
    with expect_failure(rank=0, stage="result", signal=signal.SIGTERM):
        free.options(faults=[f.kill(1, at=2)]).run(marks, 5)


@pytest.mark.gloo2
def test_expected_and_passed(free):
    with expect_failure():
        free.run(marks, 1)


def test_without_a_tier(ranks):
    raise AssertionError("not reached")

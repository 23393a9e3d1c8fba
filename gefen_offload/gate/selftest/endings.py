"""Sessions that stopped, died or left something: each could look green to who reads only an exit code."""

from __future__ import annotations

from gefen_offload.gate.reason import Reason
from gefen_offload.gate.selftest.case import SUITE, Case, Suite, suite_case
from gefen_offload.gate.selftest.outcomes import TWO, first, hooked

CUT = (Reason.NO_END, Reason.INTERRUPTED, Reason.NOT_RUN)
HANG = Suite(
    {
        "test_it.py": """
    import threading
    def test_one():
        threading.Event().wait()
"""
        + TWO
    },
    timeout=4.0,
)

CASES: list[Case] = [
    suite_case(
        "exit with status 0 in a test",
        *CUT,
        broken=first("""
    def test_one():
        os._exit(0)
"""),
    ),
    suite_case(
        "exit with status 0 in a fixture",
        *CUT,
        broken=first("""
    @pytest.fixture
    def thing():
        os._exit(0)
    def test_one(thing):
        assert thing
"""),
    ),
    suite_case(
        "exit with status 0 in conftest",
        Reason.NO_RECORD,
        broken=hooked("""
    import os
    os._exit(0)
"""),
    ),
    suite_case(
        "exit with status 0 in a hook",
        Reason.NO_END,
        broken=hooked("""
    import os
    def pytest_sessionfinish(session):
        os._exit(0)
"""),
    ),
    suite_case(
        "pytest.exit with status 0",
        Reason.INTERRUPTED,
        Reason.NOT_RUN,
        broken=first("""
    def test_one():
        pytest.exit("enough", returncode=0)
"""),
    ),
    suite_case(
        "sys.exit while collecting",
        Reason.MISSING,
        Reason.INTERNAL_ERROR,
        broken=Suite(
            {
                "test_it.py": """
    import sys
    sys.exit(0)
"""
            }
        ),
    ),
    suite_case(
        "stopped after the first test",
        Reason.NOT_RUN,
        broken=hooked("""
    def pytest_runtest_logfinish():
        SESSION[0].shouldstop = "enough"
    SESSION = []
    def pytest_sessionstart(session):
        SESSION.append(session)
"""),
    ),
    suite_case(
        "protocol swallowed",
        Reason.NOT_RUN,
        broken=hooked("""
    def pytest_runtest_protocol(item):
        return True
"""),
    ),
    suite_case(
        "loop replaced",
        Reason.NOT_RUN,
        broken=hooked("""
    def pytest_runtestloop(session):
        return True
"""),
    ),
    suite_case(
        "segfault",
        Reason.CRASHED,
        *CUT,
        broken=first("""
    def test_one():
        import signal
        os.kill(os.getpid(), signal.SIGSEGV)
"""),
    ),
    suite_case(
        "killed",
        Reason.CRASHED,
        *CUT,
        broken=first("""
    def test_one():
        import signal
        os.kill(os.getpid(), signal.SIGKILL)
"""),
    ),
    suite_case("hang", Reason.DEADLINE, *CUT, broken=HANG),
    suite_case(
        "another exit code than reported",
        Reason.EXIT_MISMATCH,
        broken=hooked("""
    import atexit, os
    atexit.register(os._exit, 7)
"""),
    ),
    suite_case(
        "exit status without a cause",
        Reason.UNEXPLAINED_EXIT,
        broken=hooked("""
    def pytest_sessionfinish(session):
        session.exitstatus = 1
"""),
    ),
    suite_case(
        "a hook fails inside",
        Reason.INTERNAL_ERROR,
        Reason.NOT_RUN,
        broken=hooked("""
    def pytest_runtest_logfinish():
        raise RuntimeError("the hook is broken")
"""),
    ),
    suite_case(
        "a process is left running",
        Reason.LEFTOVER,
        broken=Suite(
            {
                "test_it.py": """
    import subprocess
    def test_one():
        subprocess.Popen(["sleep", "300"], start_new_session=True)
"""
                + TWO
            },
            grace=0.3,
        ),
    ),
    suite_case(
        "a process without parent, session or mark is left running",
        Reason.LEFTOVER,
        broken=Suite(
            {
                "test_it.py": """
    import subprocess
    def test_one():
        command = "/bin/sleep 300 >/dev/null 2>&1 &"
        subprocess.run(["/bin/sh", "-c", command], env={}, start_new_session=True)
"""
                + TWO
            },
            grace=0.3,
        ),
    ),
    suite_case(
        "file that cannot be imported",
        Reason.COLLECTION_ERROR,
        Reason.MISSING,
        broken=Suite(
            {
                "test_it.py": """
    import no_such_module_anywhere
"""
                + SUITE
            }
        ),
    ),
]

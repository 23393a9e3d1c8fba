"""Tests that did not simply pass: skipped, expected to fail, flaky, failed around the body, passed without a body."""

from __future__ import annotations

from dataclasses import replace

from gefen_offload.gate.reason import Reason
from gefen_offload.gate.selftest.case import IDS, SUITE, Case, Suite, suite_case

HEAD = "    import os, pytest\n"
TWO = """
    def test_two():
        assert 2 + 2 == 4
"""


def first(body: str) -> Suite:
    """The common suite with another first test."""
    return Suite({"test_it.py": HEAD + body + TWO})


def hooked(conftest: str, suite: str = SUITE) -> Suite:
    """A suite under a conftest of its own."""
    return Suite({"conftest.py": conftest, "test_it.py": HEAD + suite})


RERUN = """
    from _pytest.runner import runtestprotocol
    def pytest_runtest_protocol(item, nextitem):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for _ in range(2):
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
            if {again}:
                break
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
"""
FLAKY = (
    """
    seen = []
    def test_one():
        seen.append(1)
        assert len(seen) > 1
"""
    + TWO
)
FALSE_PASS = """
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item, call):
        report = yield
        report.outcome, report.longrepr = "passed", None
        return report
"""

SWALLOW = """
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_{phase}(item):
        outcome = yield
        outcome.force_result(None)
"""
BROKEN_FIXTURE = (
    """
    @pytest.fixture(autouse=True)
    def thing(request):
        if {early} and request.node.name == "test_one":
            raise ValueError("no thing")
        yield
        if request.node.name == "test_one":
            raise ValueError("thing is stuck")
"""
    + SUITE
)
AWAITED = (
    """
    async def test_one():
        assert 1 + 1 == {sum}
"""
    + TWO
)
ASYNC = """
    import asyncio, inspect
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem):
        if inspect.iscoroutinefunction(pyfuncitem.obj):
            {does}
            return True
"""
UNITTEST = (
    """
    import unittest
    class TestIt(unittest.{case}):
        {kind} test_it(self):
            self.assertEqual(1 + 1, {sum})
        def tearDown(self):
            self.assertTrue({clean})
"""
    + TWO
)
UNITTEST_IDS = ("test_it.py::TestIt::test_it", IDS[1])
ITEM = """
    class Special(pytest.{kind}):
        def runtest(self):
            {does}
    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(collector, name, obj):
        if name == "test_one":
            return Special.from_parent(collector, name=name)
"""


def unittests(case: str = "TestCase", kind: str = "def", sum: int = 2, clean: bool = True) -> Suite:
    """A unittest, under a hook that calls every test passed."""
    text = UNITTEST.format(case=case, kind=kind, sum=sum, clean=clean)
    return replace(hooked(FALSE_PASS, text), ids=UNITTEST_IDS)


CASES: list[Case] = [
    suite_case(
        "assert statements left out",
        Reason.OPTIMIZED,
        broken=Suite(
            {
                "support.py": """
    def check(holds):
        assert holds
""",
                "test_it.py": """
    from support import check
    def test_one():
        check(1 + 1 == 3)
"""
                + TWO,
            },
            variables={"PYTHONOPTIMIZE": "1"},
        ),
    ),
    suite_case(
        "skip mark",
        Reason.SKIPPED,
        broken=first("""
    @pytest.mark.skip(reason="later")
    def test_one():
        assert 1 + 1 == 2
"""),
    ),
    suite_case(
        "skip on a condition",
        Reason.SKIPPED,
        broken=first("""
    @pytest.mark.skipif("os.sep == '/'", reason="not here")
    def test_one():
        assert 1 + 1 == 2
"""),
    ),
    suite_case(
        "skip in the body",
        Reason.SKIPPED,
        broken=first("""
    def test_one():
        pytest.skip("no time")
"""),
    ),
    suite_case(
        "skip in a fixture",
        Reason.SKIPPED,
        broken=first("""
    @pytest.fixture
    def thing():
        pytest.skip("no thing")
    def test_one(thing):
        assert thing
"""),
    ),
    suite_case(
        "skip in a hook",
        Reason.SKIPPED,
        broken=hooked("""
    def pytest_runtest_setup(item):
        if item.name == "test_one":
            pytest.skip("the hook says so")
"""),
    ),
    suite_case(
        "importorskip takes the file away",
        Reason.MISSING,
        broken=Suite(
            {
                "test_it.py": """
    import pytest
    pytest.importorskip("no_such_module_anywhere")
"""
                + SUITE
            }
        ),
    ),
    suite_case(
        "module-level skip",
        Reason.MISSING,
        broken=Suite(
            {
                "test_it.py": """
    import pytest
    pytest.skip("all of it", allow_module_level=True)
"""
                + SUITE
            }
        ),
    ),
    suite_case(
        "expected to fail, and failed",
        Reason.XFAILED,
        broken=first("""
    @pytest.mark.xfail
    def test_one():
        assert False
"""),
    ),
    suite_case(
        "expected to fail, and passed",
        Reason.XPASSED,
        broken=first("""
    @pytest.mark.xfail
    def test_one():
        assert True
"""),
    ),
    suite_case(
        "xfail called in the body",
        Reason.XFAILED,
        broken=first("""
    def test_one():
        pytest.xfail("known")
"""),
    ),
    suite_case(
        "plain failure",
        Reason.FAILED,
        broken=first("""
    def test_one():
        assert 1 + 1 == 3
"""),
    ),
    suite_case(
        "failure with the exit status set to 0",
        Reason.FAILED,
        broken=hooked(
            """
    def pytest_sessionfinish(session):
        session.exitstatus = 0
""",
            """
    def test_one():
        assert 1 + 1 == 3
"""
            + TWO,
        ),
    ),
    suite_case(
        "error in setup",
        Reason.SETUP_ERROR,
        broken=first("""
    @pytest.fixture
    def thing():
        raise ValueError("no thing")
    def test_one(thing):
        assert thing
"""),
    ),
    suite_case(
        "error in teardown",
        Reason.TEARDOWN_ERROR,
        broken=first("""
    @pytest.fixture
    def thing():
        yield 1
        raise ValueError("thing is stuck")
    def test_one(thing):
        assert thing
"""),
    ),
    suite_case("passed on the second try", Reason.FLAKY, broken=hooked(RERUN.format(again="reports[1].passed"), FLAKY)),
    suite_case("ran twice", Reason.RAN_TWICE, broken=hooked(RERUN.format(again="False"))),
    suite_case(
        "body never called",
        Reason.BODY_NOT_RUN,
        broken=hooked("""
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem):
        return True
"""),
    ),
    suite_case(
        "failure rewritten as a pass",
        Reason.FAILED,
        broken=hooked(
            FALSE_PASS,
            """
    def test_one():
        assert 1 + 1 == 3
"""
            + TWO,
        ),
    ),
    suite_case(
        "unittest failure rewritten as a pass",
        Reason.FAILED,
        broken=unittests(sum=3),
        clean=unittests(),
    ),
    suite_case(
        "unittest that fails behind its body, rewritten as a pass",
        Reason.FAILED,
        broken=unittests("IsolatedAsyncioTestCase", "async def", clean=False),
        clean=unittests("IsolatedAsyncioTestCase", "async def"),
    ),
    suite_case(
        "coroutine never awaited",
        Reason.BODY_NOT_RUN,
        broken=hooked(ASYNC.format(does="pyfuncitem.obj().close()"), AWAITED.format(sum=3)),
        clean=hooked(ASYNC.format(does="asyncio.run(pyfuncitem.obj())"), AWAITED.format(sum=2)),
    ),
    suite_case(
        "generator never run",
        Reason.BODY_NOT_RUN,
        broken=first("""
    def wrapped(body):
        return lambda: body()
    @wrapped
    def test_one():
        yield
        assert False
"""),
    ),
    suite_case(
        "item of a plugin that forgets the function",
        Reason.BODY_NOT_RUN,
        broken=hooked(ITEM.format(kind="Function", does="pass")),
        clean=hooked(ITEM.format(kind="Function", does="self.obj()")),
    ),
    suite_case(
        "failure of a plugin's item rewritten as a pass",
        Reason.FAILED,
        broken=hooked(FALSE_PASS + ITEM.format(kind="Item", does="assert 1 + 1 == 3")),
        clean=hooked(FALSE_PASS + ITEM.format(kind="Item", does="assert 1 + 1 == 2")),
    ),
    suite_case(
        "error in setup swallowed by a hook",
        Reason.SETUP_ERROR,
        broken=hooked(SWALLOW.format(phase="setup"), BROKEN_FIXTURE.format(early=True)),
    ),
    suite_case(
        "error in teardown swallowed by a hook",
        Reason.TEARDOWN_ERROR,
        broken=hooked(SWALLOW.format(phase="teardown"), BROKEN_FIXTURE.format(early=False)),
    ),
    suite_case(
        "error in teardown rewritten as a pass",
        Reason.TEARDOWN_ERROR,
        broken=hooked(FALSE_PASS, BROKEN_FIXTURE.format(early=False)),
    ),
    suite_case(
        "called until it passes",
        Reason.FLAKY,
        broken=hooked(
            """
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem):
        for _ in range(3):
            try:
                return pyfuncitem.obj() or True
            except AssertionError:
                pass
""",
            FLAKY,
        ),
    ),
    suite_case(
        "run until it passes, and the last try alone reported",
        Reason.FLAKY,
        broken=hooked(
            """
    from _pytest.runner import runtestprotocol
    def pytest_runtest_protocol(item, nextitem):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        while any(r.failed for r in runtestprotocol(item, nextitem=nextitem, log=False)):
            pass
        runtestprotocol(item, nextitem=nextitem)
        return True
""",
            FLAKY,
        ),
    ),
    suite_case(
        "call phase left out",
        Reason.INTERRUPTED,
        broken=hooked("""
    from _pytest.runner import call_and_report
    def pytest_runtest_protocol(item, nextitem):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        call_and_report(item, "setup", True)
        call_and_report(item, "teardown", True, nextitem=nextitem)
        return True
"""),
    ),
    suite_case(
        "failure outside the list",
        Reason.UNLISTED_FAILURE,
        broken=Suite(
            {
                "test_it.py": SUITE
                + """
    def test_three():
        assert False
"""
            }
        ),
    ),
]
SUBTESTS = suite_case(
    "a subtest skipped",
    Reason.SUBTEST_FAILED,
    broken=first("""
    def test_one(subtests):
        with subtests.test("part"):
            pytest.skip("this part")
"""),
    clean=first("""
    def test_one(subtests):
        with subtests.test("part"):
            assert 1 + 1 == 2
"""),
)
"""For a pytest that has subtests (9 and newer)."""

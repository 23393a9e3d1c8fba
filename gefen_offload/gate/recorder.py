"""The evidence: a pytest plugin that appends each event to a file and flushes it, so that no ending loses the past.

This file is loaded by path inside the session that is judged, before anything of that session's own; it therefore
imports only the standard library and pytest. Each line is a JSON object with a ``chain``: a keyed digest of the line
and of all lines before it, so an edited, shortened or exchanged record does not read as the one that was written.

Under pytest-xdist every worker writes a record of its own, and the session's own record names the workers and says how
each ended. The launcher and :data:`LOAD` put this module where ``-p`` finds it. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import hmac
import inspect
import json
import os
import signal
import sys
import threading
import time
import unittest
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

VERSION = 2
NAME = "_gefen_offload_gate_recorder"
"""The name under which a session, and each of its workers, knows this module; no suite imports it."""
LOAD = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location({NAME!r}, {__file__!r})
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.explain_on_signal()
"""
"""Run in a worker before its pytest starts, so that its ``-p`` finds this module on no path."""
LOAD_TIMEOUT = 120.0
TIERS = ("cpu", "gloo2", "gloo4", "gloo8", "gpu1", "gpu2", "gpu4", "gpu8")
LONGEST_TEXT = 4000


def link(key: str, previous: str, body: str) -> str:
    """The chain value of one line: keyed with the run's nonce, over the line and the value before it."""
    return hmac.new(key.encode(), (previous + body).encode(), hashlib.sha256).hexdigest()[:24]


def explain_on_signal() -> None:
    """SIGUSR1 prints every thread's stack to what is standard error now; pytest redirects it while a test runs."""
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True, chain=False)


def worker_record(path: Path, worker: str) -> Path:
    """Where a worker of the session that is recorded at ``path`` writes."""
    return path.with_suffix(f".{worker}.jsonl")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """In a worker: record it."""
    given = getattr(config, "workerinput", {}).get(NAME)
    if given is not None:
        recorder = WorkerRecorder(Path(given["path"]), given["nonce"], given["package"], given["worker"])
        config.pluginmanager.register(recorder)


class Recorder:
    """Writes one process's events, never those of a forked child: its echoes are not evidence."""

    def __init__(self, path: Path, nonce: str, package: str | None, worker: str = "") -> None:
        self._path, self._nonce, self._package, self._worker = path, nonce, package, worker
        self._chain, self._lines, self._owner = "", 0, os.getpid()
        self._lock = threading.Lock()
        self._spread = False
        self._bodies: set[str] = set()
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event and push it to the file at once."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            body = json.dumps({"kind": kind, **fields}, sort_keys=True, default=repr)
            self._chain = link(self._nonce, self._chain, body)
            self._file.write(json.dumps({"chain": self._chain, "body": body}) + "\n")
            self._file.flush()
            self._lines += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Open the record: who runs, with what, from where."""
        self.write(
            "header",
            version=VERSION,
            nonce=self._nonce,
            worker=self._worker,
            pid=self._owner,
            python=sys.version.split()[0],
            pytest=pytest.__version__,
            arguments=list(config.invocation_params.args),
            rootdir=str(config.rootpath),
            time=time.time(),
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker its recorder, and note that its record must be there."""
        self._spread, worker = True, node.gateway.id
        path = worker_record(self._path, worker)
        given = {"path": str(path), "nonce": self._nonce, "package": self._package, "worker": worker}
        node.workerinput[NAME] = given
        self.write("worker", id=worker)
        node.gateway.remote_exec(LOAD).waitclose(LOAD_TIMEOUT)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Note how a worker ended."""
        self.write("worker-down", id=node.gateway.id, error=str(error) if error else "")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note every id before any other hook may drop, double or reorder it."""
        self.write("collected", ids=[item.nodeid for item in items])

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Note what selection left out."""
        self.write("deselected", ids=[item.nodeid for item in items])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what is going to run, each with its tier."""
        self.write("selected", tests=[[item.nodeid, tiers_of(item)] for item in session.items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected, or was skipped whole."""
        if report.outcome != "passed":
            self.write("collect", id=report.nodeid, outcome=report.outcome, text=text_of(report))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """See whether the test's own body runs to its end: a hook may call the test passed without that."""
        body = pyfuncitem.obj
        if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
            self._bodies.add(pyfuncitem.nodeid)
            return (yield)

        @functools.wraps(body)
        def watched(*args: object, **kwargs: object) -> object:
            result = body(*args, **kwargs)
            self._bodies.add(pyfuncitem.nodeid)
            return result

        pyfuncitem.obj = watched
        try:
            return (yield)
        finally:
            pyfuncitem.obj = body

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Count the body of what is no plain function as run: unittest and doctest items cannot tell."""
        cls = getattr(item, "cls", None)
        if not isinstance(item, pytest.Function) or (cls is not None and issubclass(cls, unittest.TestCase)):
            self._bodies.add(item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins, so that the one that never ended has a name; a worker's test is in its record."""
        if self._spread:
            return
        self._bodies.discard(nodeid)
        self.write("start", id=nodeid, time=time.time())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of one test, in the process that ran it."""
        if self._spread:
            return
        self.write(
            "phase",
            id=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            xfail=hasattr(report, "wasxfail"),
            subtest=hasattr(report, "context"),
            body=report.nodeid in self._bodies,
            seconds=round(report.duration, 4),
            text=text_of(report),
            properties=[list(entry) for entry in report.user_properties] if report.when == "teardown" else [],
        )

    def pytest_internalerror(self, excrepr: object) -> None:
        """Note an error of pytest's or of a hook."""
        self.write("internal", text=str(excrepr)[-LONGEST_TEXT:])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Close the record after every other hook has had its turn with the exit status."""
        result = yield
        self.close(session)
        return result

    def close(self, session: pytest.Session) -> None:
        """Note what was imported, and the end."""
        self.write("imports", modules=modules_of(self._package), torch=torch_version())
        self.write("end", status=int(session.exitstatus), lines=self._lines, time=time.time())


class WorkerRecorder(Recorder):
    """The recorder of a worker, which may be killed as soon as it has told its session that it is finished."""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Close the record after the hooks of plugins, and before pytest-xdist's own tells the session."""
        result = yield
        self.close(session)
        return result


def tiers_of(item: pytest.Item) -> list[str]:
    """The tier markers of a test; one, if the suite is in order."""
    return sorted({mark.name for mark in item.iter_markers()} & set(TIERS))


def text_of(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why a phase did not pass: the reason of a skip, the end of a traceback."""
    if report.outcome == "passed" and not hasattr(report, "wasxfail"):
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return (getattr(report, "wasxfail", "") or report.longreprtext)[-LONGEST_TEXT:]


def modules_of(package: str | None) -> dict[str, str]:
    """The files of the judged package's modules that this session really loaded."""
    if package is None:
        return {}
    loaded = {name: module for name, module in list(sys.modules.items()) if (name + ".").startswith(package + ".")}
    return {name: str(getattr(module, "__file__", None)) for name, module in sorted(loaded.items())}


def torch_version() -> str | None:
    """The torch of this session, if it loaded one."""
    return getattr(sys.modules.get("torch"), "__version__", None)

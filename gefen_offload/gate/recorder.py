"""The evidence: a pytest plugin that appends each event to a file and flushes it, so that no ending loses the past.

This file is loaded by path inside the session that is judged, before anything of that session's own; it therefore
imports only the standard library and pytest. Each line is a JSON object with a ``chain``: a keyed digest of the line
and of all lines before it, so an edited, shortened or exchanged record does not read as the one that was written.

Under pytest-xdist every worker writes a record of its own, and the session's own record names the workers and says how
each ended. The launcher and :data:`LOAD` put this module where ``-p`` finds it. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

VERSION = 4
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
LONGEST_NOTE = 2_000_000
"""Characters of JSON that a test may note under one name."""
EXIT_PATIENCE = 60.0
"""Seconds that a worker may take to end once it has nothing left to do."""


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
        self._workers: dict[str, Any] = {}
        self._seen: dict[str, Seen] = {}
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event and push it to the file at once."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            body = json.dumps(plain({"kind": kind, **fields}), sort_keys=True)
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
            optimize=sys.flags.optimize,
            pytest=pytest.__version__,
            arguments=list(config.invocation_params.args),
            rootdir=str(config.rootpath),
            time=time.time(),
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker its recorder, and note that its record must be there."""
        worker = node.gateway.id
        self._workers[worker] = node.gateway
        node.nodemanager.EXIT_TIMEOUT = EXIT_PATIENCE  # who is killed for being slow looks like one that crashed
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
        if not session.config.pluginmanager.has_plugin(Witness.__name__):
            session.config.pluginmanager.register(Witness(self._seen), Witness.__name__)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected, or was skipped whole."""
        if report.outcome != "passed":
            self.write("collect", id=report.nodeid, outcome=report.outcome, text=text_of(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins, so that the one that never ended has a name; a worker's test is in its record."""
        if self._workers:
            return
        self.write("start", id=nodeid, time=time.time())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of one test, in the process that ran it."""
        if self._workers:
            return
        seen = self._seen.setdefault(report.nodeid, Seen())
        raised, why = seen.raised.pop(report.when or "", ("", ""))
        self.write(
            "phase",
            id=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            xfail=hasattr(report, "wasxfail"),
            subtest=hasattr(report, "context"),
            body=seen.ended,
            tries=seen.tries,
            raised=raised,
            seconds=round(report.duration, 4),
            text=text_of(report) or why,
            properties=notes(report.user_properties) if report.when == "teardown" else [],
        )
        if report.when == "call" and not hasattr(report, "context"):
            seen.forget()

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
        """Note how the workers' processes ended, what was imported, and the end."""
        for worker, gateway in self._workers.items():
            self.write("worker-exit", id=worker, code=exit_code(gateway))
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


@dataclass
class Seen:
    """What was seen of one test itself since its last call was reported, whatever the reports say."""

    setups: int = 0
    begun: int = 0
    ended: bool = False
    raised: dict[str, tuple[str, str]] = field(default_factory=dict)
    """For each phase the first exception in it: skipped, xfailed or failed, and its text."""

    @property
    def tries(self) -> int:
        """How often the test was set up, or its body begun."""
        return max(1, self.setups, self.begun)

    def forget(self) -> None:
        """What comes next is another try, and reported as such."""
        self.setups, self.begun, self.ended = 0, 0, False

    def note(self, when: str, error: BaseException) -> None:
        """Keep the first exception of a phase."""
        self.raised.setdefault(when, (word_of(error), f"{type(error).__name__}: {said(error, str)}"))


class Witness:
    """Sees each test itself. Registered after all other plugins, it stands inside and outside of their hooks."""

    def __init__(self, seen: dict[str, Seen]) -> None:
        self._seen = seen

    @contextlib.contextmanager
    def _noting(self, item: pytest.Item, when: str) -> Iterator[Seen]:
        seen = self._seen.setdefault(item.nodeid, Seen())
        try:
            yield seen
        except BaseException as error:
            seen.note(when, error)
            raise

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """See what the fixtures raise before another hook can swallow it."""
        with self._noting(item, "setup") as seen:
            seen.setups += 1
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """See how often the test's own code begins, and whether it ends; unittest keeps what it raised to itself."""
        with self._noting(item, "call") as seen, watching(item, seen):
            result = yield
            for kept in getattr(item, "_excinfo", None) or ():
                seen.note("call", kept.value)
            return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """See what the fixtures raise at their end."""
        with self._noting(item, "teardown"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, object, object]:
        """See what a hook raised, before others make a report of it."""
        if call.excinfo is not None:
            self._seen.setdefault(item.nodeid, Seen()).note(call.when, call.excinfo.value)
        return (yield)


@contextlib.contextmanager
def watching(item: pytest.Item, seen: Seen) -> Iterator[None]:
    """Count starts and ends of the test's own code: its function, or what an item that has none does instead."""
    name = "obj" if isinstance(item, pytest.Function) else "runtest"
    body, testcase = getattr(item, name), getattr(item, "instance", None)
    setattr(item, name, watched(body, seen))
    alone = isinstance(testcase, unittest.TestCase) and inspect.iscoroutinefunction(body)
    if alone:  # unittest looks for a coroutine function itself
        setattr(testcase, item.name, getattr(item, name))
    try:
        yield
    finally:
        setattr(item, name, body)
        if alone:
            delattr(testcase, item.name)


def watched(body: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    """The body, telling when it begins and when it has run to its end."""

    @functools.wraps(body)
    def called(*args: object, **kwargs: object) -> object:
        seen.begun += 1
        result = body(*args, **kwargs)
        seen.ended = not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result))
        return result

    @functools.wraps(body)
    async def awaited(*args: object, **kwargs: object) -> object:
        seen.begun += 1
        result = await body(*args, **kwargs)
        seen.ended = True
        return result

    if inspect.isasyncgenfunction(body):
        return body  # pytest fails it, and what a hook makes of it is no end of a body
    return awaited if inspect.iscoroutinefunction(body) else called


def word_of(error: BaseException) -> str:
    """What an exception in a test means."""
    if isinstance(error, (pytest.skip.Exception, unittest.SkipTest)):
        return "skipped"
    return "xfailed" if isinstance(error, pytest.xfail.Exception) else "failed"


def exit_code(gateway: Any) -> int | None:
    """How a worker's process ended, once pytest-xdist has waited for it; None where that cannot be seen."""
    popen = getattr(getattr(gateway, "_io", None), "popen", None)
    return None if popen is None else popen.poll()


def plain(value: object) -> object:
    """A value as JSON can hold it: keys as text, and as text whatever else JSON lacks."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {said(key, str): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return said(value, repr)


def said(value: object, how: Callable[[object], str]) -> str:
    """A value's text; one that has none does not stop the record."""
    try:
        return how(value)[:LONGEST_TEXT]
    except Exception as error:
        return f"<{type(value).__name__} without text: {type(error).__name__}>"


def notes(properties: Iterable[Any]) -> list[list[Any]]:
    """What a test noted with ``record_property``, each entry as far as it can be kept."""
    return [note(entry) for entry in properties]


def note(entry: Any) -> list[Any]:
    """One entry as a name and a value."""
    try:
        name, value = entry
        if len(json.dumps(kept := plain(value))) <= LONGEST_NOTE:
            return [said(name, str), kept]
        return [said(name, str), f"<longer than {LONGEST_NOTE} characters>"]
    except Exception as error:
        return ["unreadable", f"{type(error).__name__}: {said(entry, repr)}"]


def tiers_of(item: pytest.Item) -> list[str]:
    """The tier markers of a test; one, if the suite is in order."""
    return sorted({mark.name for mark in item.iter_markers()} & set(TIERS))


def text_of(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why a phase did not pass: the reason of a skip, the end of a traceback."""
    if report.outcome == "passed" and not hasattr(report, "wasxfail"):
        return ""
    if isinstance(report.longrepr, tuple):
        return said(report.longrepr[-1], str)
    return said(report, lambda _: getattr(report, "wasxfail", "") or report.longreprtext[-LONGEST_TEXT:])


def modules_of(package: str | None) -> dict[str, str]:
    """Where the judged package's modules that this session really loaded come from."""
    if package is None:
        return {}
    loaded = {name: module for name, module in list(sys.modules.items()) if (name + ".").startswith(package + ".")}
    return {name: origin(module) for name, module in sorted(loaded.items())}


def origin(module: object) -> str:
    """A module's file; of a namespace, which has none, its folders, each with a slash at its end."""
    folders = getattr(module, "__path__", None)
    if getattr(module, "__file__", None) is None and type(folders).__name__ == "_NamespacePath":
        return os.pathsep.join(f"{folder}/" for folder in folders or ())
    return str(getattr(module, "__file__", None))


def torch_version() -> str | None:
    """The torch of this session, if it loaded one."""
    return getattr(sys.modules.get("torch"), "__version__", None)

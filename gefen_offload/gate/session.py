"""One judged pytest session: a process group of its own, a deadline, and a search for what it left behind."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gefen_offload.gate.leftover import MARK, POLL, leftovers
from gefen_offload.gate.progress import Watch, new_events
from gefen_offload.gate.record import Exit, Session, read
from gefen_offload.gate.recorder import worker_record

LAUNCHER = Path(__file__).with_name("launch.py")
SCRUBBED = (
    "PYTEST_ADDOPTS",
    "PYTEST_PLUGINS",
    "COVERAGE_PROCESS_START",
    "COVERAGE_PROCESS_CONFIG",
    "PYTEST_CURRENT_TEST",
    "GEFEN_RANKS_INVENTORY",
    "PYTEST_XDIST_AUTO_NUM_WORKERS",
    "PYTEST_XDIST_TESTRUNUID",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
)
"""Variables that change what a session runs without standing in its command line."""
PYTHON_KEPT = (
    "PYTHON",
    "PYTHONHOME",
    "PYTHONUSERBASE",
    "PYTHONNOUSERSITE",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "PYTHONIOENCODING",
    "PYTHONUTF8",
)
"""The interpreter's own variables that reach a session: where its packages are, and what changes no program. Any other
may (PYTHONOPTIMIZE leaves out every ``assert``) and does not."""
STOP_PATIENCE = 5.0


@dataclass(frozen=True)
class Plan:
    """What to run: one tier's tests, on one interpreter, in one folder."""

    tier: str
    python: str
    folder: Path
    arguments: tuple[str, ...]
    timeout: float
    package: str | None = None
    path: tuple[str, ...] = ()
    """Put first on the session's module path: where the judged wheel is installed."""
    variables: Mapping[str, str] = field(default_factory=dict)
    grace: float = 10.0
    """Seconds that the session's helpers have to be gone after its end."""


class StoppedError(RuntimeError):
    """A session was ended because the run that it belongs to ends."""


def spread(workers: int) -> tuple[str, ...]:
    """The arguments that spread a session's tests over processes of pytest-xdist; none for one process."""
    return ("-n", str(workers), "--dist", "worksteal") if workers > 1 else ()


def run(plan: Plan, into: Path, watch: Watch | None = None, stopping: threading.Event | None = None) -> Session:
    """Run the session and read its record; ``into`` receives ``<tier>.jsonl`` and ``<tier>.log``.

    ``watch`` is called now and then with the paths of its records, to show progress; ``stopping``, once set, ends the
    session, and the call with :class:`StoppedError`.
    """
    nonce = secrets.token_hex(8)
    record, log = into / f"{plan.tier}.jsonl", into / f"{plan.tier}.log"
    began = time.monotonic()
    with log.open("wb") as output, launched(plan, record, nonce, output) as running:
        try:
            expired = not wait(running, plan.timeout, record, watch, stopping or threading.Event())
        except BaseException:  # an interrupt, too, leaves nothing of the session behind
            running.stop()
            leftovers(running.launcher.pid, nonce, grace=0)
            raise
        running.stop()
        left = leftovers(running.launcher.pid, nonce, plan.grace)
        exit = Exit(running.code, expired, round(time.monotonic() - began, 2), left)
    return read(record, plan.tier, nonce, exit)


@contextlib.contextmanager
def launched(plan: Plan, record: Path, nonce: str, output: IO[bytes]) -> Iterator[Running]:
    """The session's processes, of which the launcher is gone afterwards."""
    told, pipe = os.pipe()
    os.set_blocking(told, False)
    with open(told, "rb", buffering=0) as telling:
        with open(pipe, "wb"):  # closed here once the launcher has its own
            launcher = subprocess.Popen(
                command(plan, pipe, record, nonce),
                cwd=plan.folder,
                env=environment(plan, nonce),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(pipe,),
            )
        try:
            yield Running(launcher, telling)
        finally:
            launcher.kill()
            launcher.wait()


class Running:
    """The processes of a session: its launcher, and below it the pytest of which the launcher tells."""

    def __init__(self, launcher: subprocess.Popen[bytes], telling: io.FileIO) -> None:
        self.launcher, self._telling, self._said = launcher, telling, b""

    @property
    def told(self) -> list[int]:
        """What the launcher told until now: pytest's process, and how that ended."""
        self._said += self._telling.read() or b""
        return [int(line) for line in self._said.split(b"\n")[:-1]]

    @property
    def pid(self) -> int:
        """The leader of the judged processes' group: the launcher itself until it has started them."""
        return (self.told or [self.launcher.pid])[0]

    @property
    def code(self) -> int | None:
        """Pytest's exit code, negative for a signal; that of a launcher that could not tell it; None while it runs."""
        ended = self.launcher.poll()  # first: what it told, it told before its end
        return next(iter(self.told[1:]), ended)

    def stop(self) -> None:
        """End pytest's process group, politely first where it still runs."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + STOP_PATIENCE
            if self.code is None:
                signal_group(self.pid, number)
            while self.code is None and time.monotonic() < deadline:
                time.sleep(POLL)


def command(plan: Plan, pipe: int, record: Path, nonce: str) -> list[str]:
    """The session's command line."""
    return [plan.python, str(LAUNCHER), str(pipe), str(record), nonce, plan.package or "", "--", *plan.arguments]


def environment(plan: Plan, nonce: str) -> dict[str, str]:
    """The caller's environment without what would choose tests or packages silently, and with this run's mark."""
    marks = ":".join(filter(None, [os.environ.get(MARK), nonce]))
    path = os.pathsep.join([*plan.path, *inherited_path(plan.package)])
    added = {MARK: marks, "PYTHONUNBUFFERED": "1", **({"PYTHONPATH": path} if path else {})}
    return {**inherited(), **added, **plan.variables}


def inherited() -> dict[str, str]:
    """The caller's environment without what would silently change what runs."""
    kept = {name: value for name, value in os.environ.items() if name not in SCRUBBED}
    return {name: value for name, value in kept.items() if name in PYTHON_KEPT or not name.startswith("PYTHON")}


def inherited_path(package: str | None) -> list[str]:
    """The caller's PYTHONPATH, for packages that it carries there, without any folder that holds the judged one."""
    folders = [Path(entry).absolute() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [str(folder) for folder in folders if not (package and holds(folder, package))]


def holds(folder: Path, package: str) -> bool:
    """Whether ``package`` can be imported from ``folder``."""
    return (folder / package).is_dir() or (folder / f"{package}.py").is_file()


def wait(running: Running, timeout: float, record: Path, watch: Watch | None, stopping: threading.Event) -> bool:
    """Wait for the session's end; False when the deadline came first, its stacks then being in the log."""
    deadline = time.monotonic() + timeout
    while running.code is None:
        if stopping.wait(POLL):
            raise StoppedError(record.stem)
        if time.monotonic() > deadline:
            for pid in (running.pid, *workers(record)):
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(pid) == running.pid != running.launcher.pid:
                        os.kill(pid, signal.SIGUSR1)
            time.sleep(1.0)
            return False
        if watch is not None:
            watch(records(record))
    return True


def records(record: Path) -> list[Path]:
    """A session's own record, and those of its workers."""
    return [record, *sorted(record.parent.glob(worker_record(record, "*").name))]


def workers(record: Path) -> list[int]:
    """The processes of the session's workers, as far as their records name them."""
    heads = [new_events(path, 0)[0][:1] for path in records(record)[1:]]
    return [pid for events in heads for event in events if isinstance(pid := event.get("pid"), int)]


def signal_group(group: int, number: int) -> None:
    """Signal a process group, which may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def tail(path: Path, lines: int = 20) -> Sequence[str]:
    """The last lines of a log."""
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace").splitlines()[-lines:]
    except OSError:
        return ()

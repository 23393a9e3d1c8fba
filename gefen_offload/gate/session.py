"""One judged pytest session: a process group of its own, a deadline, and a search for what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gefen_offload.gate.record import Exit, Session, read
from gefen_offload.gate.recorder import worker_record

LAUNCHER = Path(__file__).with_name("launch.py")
MARK = "GEFEN_OFFLOAD_GATE_RUN"
SCRUBBED = (
    "PYTEST_ADDOPTS",
    "PYTEST_PLUGINS",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTEST_CURRENT_TEST",
    "GEFEN_RANKS_INVENTORY",
    "PYTEST_XDIST_AUTO_NUM_WORKERS",
    "PYTEST_XDIST_TESTRUNUID",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
)
"""Variables that change what a session runs without standing in its command line."""
POLL = 0.05
Watch = Callable[[Sequence[Path]], None]
KILL_PATIENCE = 5.0


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
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(plan, record, nonce),
            cwd=plan.folder,
            env=environment(plan, nonce),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            expired = not wait(process, plan.timeout, record, watch, stopping or threading.Event())
        except BaseException:  # an interrupt, too, leaves nothing of the session behind
            stop(process)
            leftovers(nonce, grace=0)
            raise
        stop(process)
    left = leftovers(nonce, plan.grace)
    exit = Exit(process.returncode, expired, round(time.monotonic() - began, 2), left)
    return read(record, plan.tier, nonce, exit)


def command(plan: Plan, record: Path, nonce: str) -> list[str]:
    """The session's command line."""
    return [plan.python, str(LAUNCHER), str(record), nonce, plan.package or "", "--", *plan.arguments]


def environment(plan: Plan, nonce: str) -> dict[str, str]:
    """The caller's environment without what would choose tests or packages silently, and with this run's mark."""
    kept = {name: value for name, value in os.environ.items() if name not in SCRUBBED}
    marks = ":".join(filter(None, [os.environ.get(MARK), nonce]))
    path = os.pathsep.join([*plan.path, *inherited_path(plan.package)])
    added = {MARK: marks, "PYTHONUNBUFFERED": "1", **({"PYTHONPATH": path} if path else {})}
    return {**kept, **added, **plan.variables}


def inherited_path(package: str | None) -> list[str]:
    """The caller's PYTHONPATH, for packages that it carries there, without any folder that holds the judged one."""
    folders = [Path(entry).absolute() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [str(folder) for folder in folders if not (package and holds(folder, package))]


def holds(folder: Path, package: str) -> bool:
    """Whether ``package`` can be imported from ``folder``."""
    return (folder / package).is_dir() or (folder / f"{package}.py").is_file()


def wait(
    process: subprocess.Popen[bytes], timeout: float, record: Path, watch: Watch | None, stopping: threading.Event
) -> bool:
    """Wait for the session's end; False when the deadline came first, its stacks then being in the log."""
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        if stopping.wait(POLL):
            raise StoppedError(record.stem)
        if time.monotonic() > deadline:
            for pid in (process.pid, *workers(record)):
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(pid) == process.pid:
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
    heads = (tail_of.read_text(errors="replace").partition("\n")[0] for tail_of in records(record)[1:])
    return [json.loads(json.loads(head)["body"])["pid"] for head in heads if head.endswith("}")]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the session's own process group, politely first where it still runs."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            signal_group(process.pid, number)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def signal_group(group: int, number: int) -> None:
    """Signal a process group, which may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def leftovers(nonce: str, grace: float) -> tuple[str, ...]:
    """Processes that carry this run's mark after its end: they get a grace to go, are named, and then killed."""
    deadline = time.monotonic() + grace
    while (found := marked(nonce)) and time.monotonic() < deadline:
        time.sleep(POLL)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_PATIENCE
    while found and marked(nonce) and time.monotonic() < deadline:
        time.sleep(POLL)
    return tuple(f"process {pid}: {line}" for pid, line in sorted(found.items()))


def marked(nonce: str) -> dict[int, str]:
    """Live processes whose environment carries the mark, with their command lines."""
    name = f"{MARK}=".encode()
    found: dict[int, str] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = Path(entry.path, "environ").read_bytes().split(b"\0")
                marks = next((value for value in variables if value.startswith(name)), b"").decode(errors="replace")
                if nonce in marks.partition("=")[2].split(":"):
                    line = Path(entry.path, "cmdline").read_bytes()
                    found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace").strip()[:200]
            except OSError:
                continue
    return found


def tail(path: Path, lines: int = 20) -> Sequence[str]:
    """The last lines of a log."""
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return ()

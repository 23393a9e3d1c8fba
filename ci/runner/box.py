"""What the two hooks share: what runs on the box that should not. Standard library only; the box needs just Python."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

MARK = "GITHUB_RUN_ID"
ALLOWED = {"push": "refs/heads/main", "schedule": "refs/heads/main", "workflow_dispatch": "refs/heads/main"}
"""Events whose jobs may run here, each with the ref it must come from. No kind of pull request is among them."""


def refusal(environ):
    """Why a job may not run here, or an empty string."""
    event, ref = environ.get("GITHUB_EVENT_NAME", ""), environ.get("GITHUB_REF", "")
    repository, ours = environ.get("GITHUB_REPOSITORY", ""), environ.get("GEFEN_OFFLOAD_REPOSITORY", "")
    if not ours:
        return "GEFEN_OFFLOAD_REPOSITORY is not set in the runner's .env: no job runs until it names owner/repository"
    if repository != ours:
        return f"the job is of {repository or 'no repository'}, this box serves {ours}"
    if event not in ALLOWED:
        return f"event {event or 'none'} is not allowed here; allowed: {', '.join(sorted(ALLOWED))}"
    if ref != ALLOWED[event]:
        return f"event {event} from {ref or 'no ref'} is not allowed here, only from {ALLOWED[event]}"
    return ""


def gpu_users():
    """Processes that hold a GPU, one line each; a box without nvidia-smi is one line too."""
    if shutil.which("nvidia-smi") is None:
        return ["nvidia-smi is not on PATH: the GPUs cannot be seen"]
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,gpu_uuid", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return [f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[:200]}"]
    return [f"on a GPU: {line.strip()}" for line in done.stdout.splitlines() if line.strip()]


def ancestors():
    """This process and all above it: the runner's own."""
    found, pid = set(), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def left_running(mark):
    """Processes of the job with this run id that are no part of the runner: pid and command line."""
    wanted, spared, found = f"{MARK}={mark}".encode(), ancestors(), {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) not in spared:
            try:
                if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    line = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = line.strip()[:200]
            except OSError:
                continue
    return found


def end(pids):
    """Kill these processes and wait, at most ten seconds, until they are gone."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    limit = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)


def alive(pid):
    """Whether a process still runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

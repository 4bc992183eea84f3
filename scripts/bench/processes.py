"""What other processes cost, read from Linux: CPU time to the nanosecond, resident memory, children."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            parents.setdefault(int(after_name[1]), []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += parents.get(known, [])
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds, user and system, of all threads that these processes have or had."""
    # the clock id that clock_getcpuclockid(3) makes of a pid: CPUCLOCK_SCHED of the whole thread group
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def rss_kib(pids: Sequence[int]) -> int:
    """Resident memory."""
    return sum(
        int(line.split()[1])
        for pid in pids
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    )


def allow_many_sockets() -> None:
    """Raise the soft limit of open files to the hard one; children inherit it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, its output in `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        for pid in tree(process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            continue
        return

"""What processes are and use, read from Linux: children, CPU time, resident memory."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that this one has started, and that have not ended."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


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
    """CPU seconds, user and system, of all threads that these processes have or had. Raises: OSError: one has ended."""
    # the clock id that clock_getcpuclockid(3) makes of a pid: CPUCLOCK_SCHED of the whole thread group
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def resident_bytes(pids: Sequence[int]) -> int:
    """Resident memory of these processes. Raises: OSError: one has ended."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")

"""CPU, memory and open files of the router's processes, read from /proc at each scrape.

The page of a router with relays comes from one process, so a series has the label `process`. The names begin with
`balanceroute_`, because `process_*` are by convention those of the one process that answers.
"""

import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

NAME: Final = "br-"  # how the kernel's names of the processes begin
_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_BOOT_S: Final = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # /proc/stat may be hidden (ProcSubset=pid)
_USER_TICKS, _SYSTEM_TICKS, _START_TICKS, _RESIDENT_PAGES = 11, 12, 19, 21  # proc_pid_stat(5), behind the name


@dataclass(frozen=True, slots=True)
class _Use:
    start_s: float
    cpu_s: float
    resident_bytes: int
    open_files: int  # 0: Linux before 6.2 does not tell, and to list those of 10,000 clients takes 0.1 s


def this_process() -> dict[str, int]:
    """The process id of a router that is one process."""
    return {"router": os.getpid()}


def all_processes() -> dict[str, int]:
    """The process ids of a router with relays, by name; called by a child. Standbys may be several."""
    parent = os.getppid()
    found = {"parent": parent}
    with suppress(OSError):  # a kernel without this list
        for pid in (_PROC / f"{parent}/task/{parent}/children").read_text().split():
            with suppress(OSError):  # it has just ended
                name = (_PROC / pid / "comm").read_text().strip()
                if name.startswith(NAME):
                    found[_free_name(name.removeprefix(NAME), found)] = int(pid)
    return found


def process_families(processes: Mapping[str, int]) -> Iterator[Metric]:
    """What these processes use, by name; those that have ended are left out."""
    labels = ["process"]
    start = GaugeMetricFamily(
        "balanceroute_process_start_time_seconds",
        "When a process of the router started, as Unix time to the second.",
        labels=labels,
    )
    cpu = CounterMetricFamily("balanceroute_process_cpu_seconds", "CPU time of a process of the router.", labels=labels)
    memory = GaugeMetricFamily(
        "balanceroute_process_resident_memory_bytes",
        "Memory of a process of the router; what processes share counts in each.",
        labels=labels,
    )
    files = GaugeMetricFamily(
        "balanceroute_process_open_fds",
        "Open files of a process of the router, connections included; no series before Linux 6.2.",
        labels=labels,
    )
    most_files = GaugeMetricFamily(
        "balanceroute_process_max_fds", "How many open files a process of the router may have.", labels=labels
    )
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # children inherit it
    for name, pid in processes.items():
        with suppress(OSError):
            use = _use_of(pid)
            start.add_metric([name], use.start_s)
            cpu.add_metric([name], use.cpu_s)
            memory.add_metric([name], use.resident_bytes)
            if use.open_files:
                files.add_metric([name], use.open_files)
            most_files.add_metric([name], float("inf") if most == resource.RLIM_INFINITY else most)
    return iter((start, cpu, memory, files, most_files))


def _use_of(pid: int) -> _Use:
    """Raises: OSError: it has ended."""
    of_process = _PROC / str(pid)
    fields = (of_process / "stat").read_bytes().rpartition(b")")[2].split()
    return _Use(
        round(_BOOT_S + int(fields[_START_TICKS]) / _TICKS_PER_S),
        (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / _TICKS_PER_S,
        int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES,
        (of_process / "fd").stat().st_size,
    )


def _free_name(name: str, taken: Mapping[str, int]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free

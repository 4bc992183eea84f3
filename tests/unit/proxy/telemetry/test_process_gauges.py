"""What a page says of the router's processes, against what the kernel says of them."""

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping

from balanceroute.proxy.telemetry.process_gauges import process_families, this_process

FAMILY = """
import json, os
from balanceroute.proxy.parent.supervisor import be_called
from balanceroute.proxy.telemetry.process_gauges import all_processes

named, end = os.pipe(), os.pipe()
pids = []
for name in ("relay-0", "standby", "standby", None):
    pids.append(os.fork())
    if not pids[-1]:
        os.close(end[1])
        if name is not None:  # the last one is no process of the router
            be_called(name)
        os.write(named[1], b".")
        os.read(end[0], 1)
        os._exit(0)
count = 0
while count < 4:
    count += len(os.read(named[0], 4))
pids.append(os.fork())
if not pids[-1]:
    be_called("brain")
    print(json.dumps([all_processes(), os.getppid(), pids[:4] + [os.getpid()]]), flush=True)
    os._exit(0)
os.close(end[1])
for pid in pids:
    os.waitpid(pid, 0)
"""


def values(processes: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """By name of the metric and of the process."""
    return {
        family.name.removeprefix("balanceroute_process_"): {
            sample.labels["process"]: sample.value for sample in family.samples
        }
        for family in process_families(processes)
    }


def test_a_process_has_its_cpu_time_memory_and_open_files() -> None:
    gc.collect()  # earlier tests' garbage has descriptors
    found = values(this_process())
    counted = os.stat("/proc/self/fd").st_size > 0  # from Linux 6.2 on
    assert {name: list(of_processes) for name, of_processes in found.items()} == {
        "start_time_seconds": ["router"],
        "cpu_seconds": ["router"],
        "resident_memory_bytes": ["router"],
        "open_fds": ["router"] * counted,
        "max_fds": ["router"],
    }
    used = resource.getrusage(resource.RUSAGE_SELF)
    assert 0 < found["cpu_seconds"]["router"] <= used.ru_utime + used.ru_stime + 0.02  # ticks of 10 ms
    assert 2**20 < found["resident_memory_bytes"]["router"] <= 1.1 * 1024 * used.ru_maxrss
    assert found["max_fds"]["router"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]
    try:
        more = values(this_process())["open_fds"]
    finally:
        for descriptor in opened:
            os.close(descriptor)
    assert more == {name: files + 10 for name, files in found["open_fds"].items()}


def test_a_process_started_when_the_kernel_says() -> None:
    before_s = time.time()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (start_s,) = values({"router": child.pid})["start_time_seconds"].values()
        assert before_s - 1.5 < start_s < time.time() + 1.5
    finally:
        child.communicate(b"\n")


def test_a_process_that_has_ended_has_no_series() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    found = values({"relay-0": ended.pid, "brain": os.getpid()})
    assert {name for of_processes in found.values() for name in of_processes} == {"brain"}


def test_a_child_finds_its_parent_and_all_children_by_name_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", FAMILY], capture_output=True, text=True, check=True, timeout=60)
    found, parent, (relay, standby, other_standby, _, brain) = json.loads(done.stdout)
    assert found == {
        "parent": parent,
        "relay-0": relay,
        "standby": standby,
        "standby-2": other_standby,
        "brain": brain,
    }

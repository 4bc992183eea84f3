"""The router's clock: a machine that is suspended is like a process that is stopped."""

import asyncio
import subprocess
import sys
import time

import pytest

from balanceroute.proxy.telemetry.clock import Loop, now_s


def test_the_clock_includes_suspended_time_and_timers_still_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    read, suspended_s = time.clock_gettime, 0.0

    async def suspended() -> None:
        nonlocal suspended_s
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        suspended_s += 600.0
        assert loop.time() - before_s >= 600.0 and loop.time() <= now_s()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        assert loop.time() - before_s < 660.0

    monkeypatch.setattr(time, "clock_gettime", lambda clock: read(clock) + suspended_s)
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(suspended())


WITHOUT_DESCRIPTORS = """
import os, resource
from balanceroute.proxy.telemetry.clock import Loop
least = os.open("/dev/null", os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (least + 1, least + 1))
try:
    Loop()
except OSError as error:
    print(error.strerror)
"""


def test_a_process_without_a_free_descriptor_can_tell_why_it_has_no_event_loop() -> None:
    """libuv aborted it: its parent logged that it had died by SIGABRT."""
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "Too many open files\n"


def test_the_clock_is_boottime() -> None:
    earliest_s, latest_s = time.clock_gettime(time.CLOCK_BOOTTIME), now_s()
    assert earliest_s <= latest_s <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_the_clock_advances_within_a_turn_of_the_event_loop() -> None:
    async def stopped() -> None:
        loop = asyncio.get_running_loop()
        turn_s, until_s = loop.time(), now_s() + 0.002
        while now_s() < until_s:
            pass
        assert loop.time() - turn_s >= 0.002

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(stopped())

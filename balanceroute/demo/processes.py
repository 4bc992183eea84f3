"""The processes of a demo: the cluster and the router, each in one, which end with this process."""

import asyncio
import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import httpx

from balanceroute.errors import BalanceRouteError

READY_TIMEOUT_S = 60.0  # of a machine that has other things to do
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CLUSTER_PORTS = range(21_000, 32_500, 500)  # the first one of each cluster
BUSY = 0.5  # processes per core before the demo begins, from which on its figures are the machine's, not the routers'

Progress = Callable[[int, int], None]
"""Told the requests ended and in all."""


MOST_REQUESTS = 1_000_000  # of a trace: a day of them, and more than one machine sends


class DemoFailed(BalanceRouteError):
    """A process did not come up, or has ended, or there is too little to measure or too much; the text says which."""


def check_most(requests: float, remedy: str) -> None:
    """Raises: DemoFailed: no machine sends so many."""
    if requests > MOST_REQUESTS:
        raise DemoFailed(f"{requests:,.0f} requests are too many, accepted are {MOST_REQUESTS:,}: lower {remedy}")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """It is gone on the way out. Raises: DemoFailed: there is no place for one."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="balanceroute-demo-")
    except OSError as error:  # a container whose root is read-only, a full disk
        raise DemoFailed(f"the demo needs a temporary folder: {error.strerror}") from None
    with folder as name:
        yield Path(name)


@contextmanager
def process(arguments: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A `balanceroute` command in the background, ended on the way out."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "balanceroute", *arguments]
        child = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, preexec_fn=die_with_parent(os.getpid())
        )
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """What a child does before it becomes a command: ask the kernel to kill it once its parent is gone (Linux alone).

    A parent that is killed by SIGKILL can't end its children itself.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before we could ask
            os._exit(1)

    return ask


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind what runs, as Ctrl-C does, so that nothing is left behind. Raises: SystemExit."""
    received: list[int] = []

    def end(number: int, frame: object) -> None:
        received.append(number)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise SystemExit(128 + number) from None
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except asyncio.CancelledError:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def busy_with() -> float:
    """How many processes ran or wanted to run on each core over the last minute: 0 on an idle machine."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


@contextmanager
def emulated(
    prefillers: int, workers: int, slots: int, flags: list[str], folder: Path
) -> Iterator[tuple[Path, list[str]]]:
    """A running cluster: the configuration for `serve`, and the prefillers' URLs. Raises: DemoFailed."""
    config, log, base_port = folder / "cluster.yaml", folder / "cluster.log", free_port_range(prefillers, workers)
    shape = ["--prefill", str(prefillers), "--decode", str(workers), "--max-num-seqs", str(slots)]
    places = ["--base-port", str(base_port), "--write-config", str(config)]
    with process(["emulate", *shape, *places, *flags], log) as cluster:
        wait_until(config.exists, "the emulated cluster", cluster, log)  # its ports may answer for another cluster
        yield config, [f"http://127.0.0.1:{base_port + index}" for index in range(prefillers)]


def wait_ready(url: str, child: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the URL answers 200. Raises: DemoFailed with the end of the log."""

    def answers() -> bool:
        try:
            return httpx.get(url, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False  # not listening yet

    wait_until(answers, url, child, log)


def wait_until(ready: Callable[[], bool], what: str, child: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until `ready` says so. Raises: DemoFailed with the end of the log."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and child.poll() is None:
        if ready():
            return
        time.sleep(0.1)
    tail = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise DemoFailed(f"{what} did not come up: {' '.join(tail) or 'no output'}")


def page(url: str) -> str:
    """A server's /metrics, at the end of a run. Raises: DemoFailed: it does not answer any more."""
    try:
        return httpx.get(f"{url}/metrics", trust_env=False).text
    except httpx.TransportError as error:
        raise DemoFailed(f"{url} does not answer any more: {str(error) or type(error).__name__}") from error


def total(text: str, name: str) -> float:
    """The sum of a metric of that page over its labels; 0: it is not there."""
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now: beside those of clusters, and below those that Linux gives to connections, of
    which any may be taken before a server listens.
    """
    beside = [base + offset for base in CLUSTER_PORTS for offset in range(400, CLUSTER_PORTS.step)]
    random.SystemRandom().shuffle(beside)
    free = list(islice(filter(is_free, beside), count))
    if len(free) < count:
        raise DemoFailed(f"no {count} free loopback ports between {CLUSTER_PORTS.start} and {CLUSTER_PORTS.stop}")
    return free


def free_port_range(prefillers: int, workers: int) -> int:
    """A base port such that all ports of the cluster (prefillers from it, decode ranks from 100 above) are free.

    Each process looks from another place on, since a second demo that starts now sees the same ones free. From 32,768
    on are those that Linux gives to connections.
    """
    bases, later = list(CLUSTER_PORTS), list(range(CLUSTER_PORTS.stop, 60_000, CLUSTER_PORTS.step))
    first = os.getpid() % len(bases)
    for base in bases[first:] + bases[:first] + later:
        ports = [base + index for index in range(prefillers)]
        ports += [base + 100 + index for index in range(workers)]
        if all(is_free(port) for port in ports):
            return base
    raise DemoFailed("no free range of loopback ports between 21000 and 60000")


def is_free(port: int) -> bool:
    """Whether a server may listen on the loopback port: it has no listener and no connection."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers have it
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

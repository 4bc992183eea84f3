"""`balanceroute` commands as processes, by what they have logged."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from balanceroute.cli.emulate import DECODE_PORT_OFFSET
from tests.forked import Forked
from tests.plain_http import PLAIN
from tests.ports import free_base_port
from tests.waiting import PATIENCE_S, block_until

Running = subprocess.Popen[bytes] | Forked


@contextmanager
def process(*arguments: str, log: Path, open_files: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """One with its children in a process group of its own, which ends with it."""
    command = [sys.executable, "-m", "balanceroute", *arguments]
    if open_files is not None:
        command = ["bash", "-c", f'ulimit -n {open_files}; exec "$@"', "-", *command]
    with log.open("ab") as sink:
        running = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
        try:
            yield running
        finally:
            end_group(running)


@contextmanager
def forked_process(*arguments: str, log: Path) -> Iterator[Forked]:
    """The same, without an interpreter's start."""
    running = Forked(arguments, log)
    try:
        yield running
    finally:
        end_group(running)


def end_group(running: Running) -> None:
    """Kill all at once."""
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.send_signal(signal.SIGKILL)  # one that has just been forked leads no group yet
    running.wait()


def wait_for(url: str, log: Path, running: Running) -> None:
    """Wait until the URL answers 200. Raises: AssertionError: the process has ended."""

    def answers() -> bool:
        assert running.poll() is None, log.read_text()
        try:
            return httpx.get(url, timeout=PATIENCE_S, **PLAIN).status_code == 200
        except httpx.TransportError:
            return False

    block_until(answers)


def listening_port(log: Path, running: Running, from_character: int = 0) -> int:
    """Wait until the process says where it listens. Raises: AssertionError: it has ended."""

    def listening_line() -> "re.Match[str] | None":
        return re.search(r'"event":"listening".*"port":(\d+).*\n', log.read_text()[from_character:])

    block_until(lambda: listening_line() or running.poll() is not None, "no word of listening")
    found = listening_line()
    assert found, log.read_text()
    return int(found[1])


def complete_lines(log: Path) -> list[str]:
    """The lines of a log. What is written just now may be seen in part, even its line's last character."""
    return log.read_text().rpartition("\n")[0].splitlines()


@dataclass(frozen=True, slots=True)
class Cluster:
    """An emulated one: its configuration, and its workers' URLs."""

    config: Path
    prefillers: tuple[str, ...]
    decoders: tuple[str, ...]

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Within this, decode workers generate no token: streams last as long as a busy machine needs."""
        self._order("freeze")
        try:
            yield
        finally:
            self._order("unfreeze")

    def _order(self, kind: str) -> None:
        for url in self.decoders:
            done = httpx.post(f"{url}/_emulator/fault", json={"kind": kind}, timeout=PATIENCE_S, **PLAIN)
            assert done.status_code == 200, done.text

    def holds_kv(self) -> bool:
        """Whether KV is pinned on a prefiller."""
        return any(_usage(url) > 0.0 for url in self.prefillers)


def _usage(url: str) -> float:
    found = re.search(
        r"kv_cache_usage_perc\{[^}]*\} (\S+)", httpx.get(f"{url}/metrics", timeout=PATIENCE_S, **PLAIN).text
    )
    assert found
    return float(found[1])


@contextmanager
def emulated(folder: Path, prefillers: int, ranks: int, *flags: str) -> Iterator[Cluster]:
    """An emulated cluster."""
    base = free_base_port((*range(prefillers), *range(DECODE_PORT_OFFSET, DECODE_PORT_OFFSET + ranks)))
    config, log = folder / "cluster.yaml", folder / "emulate.log"
    shape = ["--prefill", str(prefillers), "--decode", str(ranks), *flags]
    arguments = ["emulate", *shape, "--base-port", str(base), "--write-config", str(config)]
    with forked_process(*arguments, log=log) as running:
        block_until(lambda: config.exists() or running.poll() is not None)  # it is written when all workers listen
        assert running.poll() is None, log.read_text()
        urls = tuple(f"http://127.0.0.1:{base + number}" for number in range(prefillers))
        first = base + DECODE_PORT_OFFSET
        yield Cluster(config, urls, tuple(f"http://127.0.0.1:{first + number}" for number in range(ranks)))

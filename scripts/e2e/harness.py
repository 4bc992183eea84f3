"""What the checks of this folder share: processes that log to a file, free ports, what a router holds, the verdict."""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx

PATIENCE_S: Final = 60.0


class Wrong(Exception):
    """Something is not as it must be."""


class Process:
    """One with its children, in a process group of its own."""

    def __init__(self, log: Path, *command: str) -> None:
        self.log, self._command = log, command
        self.start()

    def start(self) -> None:
        """Start it, after its death again."""
        with self.log.open("ab") as sink:
            self._told_from = self.log.stat().st_size
            self.running = subprocess.Popen(self._command, stdout=sink, stderr=sink, start_new_session=True)

    def kill(self) -> None:
        """All its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.running.pid, signal.SIGKILL)
        self.running.wait()

    def lines(self, event: str) -> list[dict[str, Any]]:
        """What the present life has logged of an event."""
        text = self.log.read_bytes()[self._told_from :].decode()
        told = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in told if line.get("event") == event]


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses."""
    with ExitStack() as held:
        socks = [held.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in socks]


def free_base_port() -> int:
    """One for an emulated cluster of two prefillers and two ranks."""
    return next(
        port for port in range(21_000, 29_000, 200) if all(map(_is_free, (port, port + 1, port + 100, port + 101)))
    )


def held(state_answer: httpx.Response | None, prefillers: list[str]) -> dict[str, float]:
    """Requests that are left, by the brain's /state, and shares of KV, by the prefillers; nothing: all is over."""
    if state_answer is None:
        return {"no brain": 1}
    state = state_answer.json()
    active = sum(len(worker["active"]) for worker in state["workers"])
    left: dict[str, float] = {"waiting": len(state["waiting"]), "at relays": state["exchanges"], "active": active}
    for url in prefillers:
        page = httpx.get(f"{url}/metrics", trust_env=False).text
        left[url] = sum(float(use) for use in re.findall(r"kv_cache_usage_perc\{.*\} (\S+)", page))
    return {what: count for what, count in left.items() if count}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def wait_for(what: str, happened: Callable[[], bool]) -> float:
    """Wait until it has; returns how long that took, in seconds. Raises: Wrong."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > PATIENCE_S:
            raise Wrong(f"{what}: not after {PATIENCE_S:.0f} s")
        time.sleep(0.1)
    return time.monotonic() - began


@contextmanager
def kept(folder: str | None) -> Iterator[Path]:
    """The folder for logs; one of its own is gone at the end."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="balanceroute-e2e-") as made:
            yield Path(made)
    else:
        Path(folder).mkdir(parents=True)
        yield Path(folder).absolute()


def verdict(check: Callable[[Path], None], keep: str | None) -> int:
    """The exit code: of a check, which gets a folder for its logs and raises Wrong, and of what these logs hold."""
    with kept(keep) as folder:
        try:
            check(folder)
            for log in folder.glob("*.log"):
                if "Traceback" in log.read_text() or "internal error" in log.read_text():
                    raise Wrong(f"{log}: there is a traceback in it")
        except Wrong as error:
            print(f"wrong: {error}")
            return 1
    return 0

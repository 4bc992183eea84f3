"""What the checks of this folder share: processes that log to a file, streams and how they end, what a router holds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from balanceroute.demo.processes import total
from balanceroute.engine.tokens import FIRST_TRIPLE_ID, continuation, decode
from scripts.chaos_run.aftermath import held_by_router
from scripts.chaos_run.folder import logs_folder

PATIENCE_S: Final = 180.0
NO_TLS: Final = False  # for `verify`: httpx reads all certificates of CAs for each client, 30 ms of CPU


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
        records = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in records if line.get("event") == event]


class Site:
    """The processes of a check, which end with `stack`; they log to files in `folder`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack

    def start(self, name: str, *command: str) -> Process:
        """Start a process."""
        process = Process(self.folder / f"{name}.log", *command)
        self.stack.callback(process.kill)
        return process

    def serve(self, name: str, config: Path, port: int, *flags: str) -> Process:
        """Start a router."""
        address = ["--host", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-m", "balanceroute", "serve", "--config", str(config), *address]
        return self.start(name, *command, *flags)


def answer_of(url: str) -> httpx.Response | None:
    """What a server answers; None: nothing, or 5xx."""
    with suppress(httpx.TransportError):
        answer = httpx.get(url, trust_env=False, verify=NO_TLS, timeout=5.0)
        return answer if answer.status_code < 500 else None
    return None


async def judged_stream(
    http: httpx.AsyncClient, number: int, tokens: int, on_first: Callable[[float], None]
) -> tuple[str, str]:
    """Ask for a stream of so many tokens; returns right, cut short, refused or wrong, and why it is not right.

    `on_first` gets the seconds to its first token.
    """
    first = FIRST_TRIPLE_ID + 7 * (number % 4000)
    prompt = list(range(first, first + 50))
    body = {"model": "emulated", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    expected, text, began = decode(continuation(prompt, tokens)), "", time.monotonic()
    reason, is_done = "", False
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return "refused", f"{answer.status_code} {(await answer.aread()).decode()}"
            reason = "the stream has no end"
            async for line in answer.aiter_lines():
                is_done = is_done or line == "data: [DONE]"  # the body's end is read, too, to keep the connection
                if not line.startswith("data: {"):
                    continue
                if not text:
                    on_first(time.monotonic() - began)
                text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", ()))
    except httpx.TransportError as error:
        if not reason:
            return "refused", repr(error)
        reason, is_done = repr(error), False
    if is_done:
        return ("right", "") if text == expected else ("wrong", f"{text!r}, not {expected!r}")
    return ("cut short" if expected.startswith(text) else "wrong"), reason


def held(state_answer: httpx.Response | None, prefillers: list[str]) -> dict[str, float]:
    """What is left, by the brain's /state, and shares of KV, by the prefillers; nothing: all is over."""
    if state_answer is None:
        return {"no brain": 1}
    ask = partial(httpx.get, trust_env=False, verify=NO_TLS, timeout=PATIENCE_S)
    pages = {url: ask(f"{url}/metrics").text for url in prefillers}
    usage = {url: total(page, "vllm:kv_cache_usage_perc") for url, page in pages.items()}
    return {**held_by_router(state_answer.json()), **{url: share for url, share in usage.items() if share}}


def wait_for(what: str, happened: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
    """Wait until it has; returns how long that took, in seconds. Raises: Wrong."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > timeout_s:
            raise Wrong(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.1)
    return time.monotonic() - began


def verdict(check: Callable[[Path], None], keep: Path | None) -> int:
    """The exit code: of a check, which gets a folder for its logs and raises Wrong, and of what these logs hold."""
    with logs_folder("e2e", keep) as folder:
        try:
            check(folder)
            for log in folder.glob("*.log"):
                if "Traceback" in log.read_text() or "internal error" in log.read_text():
                    raise Wrong(f"{log}: there is a traceback in it")
        except Wrong as error:
            print(f"wrong: {error}")
            return 1
    return 0

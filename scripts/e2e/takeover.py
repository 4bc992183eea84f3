"""A router replaced by `serve --take-over` under a fixed rate of streams: every answer of it checked.

The load is an open loop: each request is sent at its time, whether others have been answered or not, so a router that
stands still meets all that piles up. Half of the requests use connections that are kept, half a new one each. Streams
last some seconds, so that many are open at each change. Each new router gives the decode workers other slots.
Everything listens on 127.0.0.1 and is ended by process id.

    take over 1, 2, ..    a new router takes the port; the old one finishes its streams and ends with exit code 0
    at the end            all requests are counted as finished by the last router; no request and no KV is held

An answer is right, cut short (the tokens so far are right), refused (another status than 200, or no connection), or
wrong. Exits with 1 where one is not right. How late requests were sent tells whether the load's own process kept up.
"""

import argparse
import asyncio
import math
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import httpx

from balanceroute.demo.processes import emulated, free_ports
from scripts.arguments import count, positive
from scripts.chaos_run.aftermath import outcomes
from scripts.e2e.harness import PATIENCE_S, Process, Site, Wrong, answer_of, held, judged_stream, verdict, wait_for

PREFILLERS, RANKS, SLOTS = 2, 2, 256
STEP_S: Final = 0.1
TOKENS: Final = (20, 30, 40)  # of a stream, in turn: 2 to 4 s


class Routers(Site):
    """The emulated cluster, and the routers that follow each other on one port."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        step = ["--step-overhead", str(STEP_S)]
        self._config, self.prefillers = stack.enter_context(emulated(PREFILLERS, RANKS, SLOTS, step, folder))
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self._routers = 0
        self.router = self._follow()
        wait_for("the first answer", lambda: answer_of(f"{self.url}/ready") is not None)

    def _follow(self, *flags: str) -> Process:
        self._routers += 1
        settings = ["--relays", "2", "--set", f"listen.run_folder={self.folder / 'run'}"]
        return self.serve(f"router-{self._routers}", self._config, self._port, *settings, *flags)

    def take_over(self) -> float:
        """Replace the router; returns after how many seconds the old one has ended. Raises: Wrong."""
        slots = SLOTS + self._routers  # streams go on at workers that the new router describes otherwise
        old, self.router = self.router, self._follow("--take-over", "--max-num-seqs", str(slots))
        took_s = wait_for("the old router ends", lambda: old.running.poll() is not None)
        if old.running.returncode != 0:
            raise Wrong(f"the old router ended with {old.running.returncode}: {old.log}")
        if not old.lines("another router takes over"):
            raise Wrong(f"the old router ended without handing over: {old.log}")
        return took_s

    def held(self) -> dict[str, float]:
        """What is left of requests; nothing: all is over."""
        return held(answer_of(f"{self.url}/state"), self.prefillers)

    def counted(self) -> dict[str, float]:
        """Requests by their outcome, as the router counts them, those of the routers before it as well."""
        answer = answer_of(f"{self.url}/metrics")
        counts = outcomes(answer.text) if answer is not None else {}
        return {outcome: count for outcome, count in counts.items() if count}


@dataclass(slots=True)
class Found:
    """What came of the requests that were sent in one phase."""

    answers: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # of answers that are not right
    first_token_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{dict(self.answers)}, first token p99 {_p99(self.first_token_s):.2f} s, sent late by p99 "
            f"{_p99(self.late_s) * 1e3:.0f} ms"
        )


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else math.nan


class Load:
    """Requests at a fixed rate. They are counted in the phase in which they were sent."""

    def __init__(self, url: str, rate_per_s: float) -> None:
        self.found, self.open, self.sent = Found(), 0, 0
        self._period_s = 1 / rate_per_s
        self._http = [
            httpx.AsyncClient(
                base_url=url,
                timeout=PATIENCE_S,
                trust_env=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept_open),
            )
            for kept_open in (None, 0)
        ]
        self._requests: set[asyncio.Task[None]] = set()
        self._stops = asyncio.Event()
        self._sends = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._stops.is_set():
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.found.late_s.append(loop.time() - due)
            request = loop.create_task(self._judge(self.sent, self.found))
            self._requests.add(request)
            self.sent += 1
            due += self._period_s

    async def _judge(self, number: int, found: Found) -> None:
        self.open += 1
        tokens = TOKENS[number // 2 % len(TOKENS)]
        answer, reason = await judged_stream(self._http[number % 2], number, tokens, found.first_token_s.append)
        self.open -= 1
        found.answers[answer] += 1
        if answer != "right":
            found.reasons[reason] += 1

    async def phase_ends(self) -> Found:
        """What has come of what was sent since the last call, once all of it is answered; the load goes on."""
        found, self.found = self.found, Found()
        requests, self._requests = self._requests, set()
        await asyncio.gather(*requests)
        return found

    async def end(self) -> None:
        """Send no more, and wait for what is under way."""
        self._stops.set()
        await self._sends  # it may send one more
        await asyncio.gather(*self._requests)
        for http in self._http:
            await http.aclose()


async def run(site: Routers, rate_per_s: float, times: int, seconds: float) -> None:
    """All phases, printed. Raises: Wrong."""
    load = Load(site.url, rate_per_s)
    try:
        for number in range(1, times + 1):
            await asyncio.sleep(seconds)
            n_open = load.open
            took_s = await asyncio.to_thread(site.take_over)
            found = await load.phase_ends()
            print(f"take over {number}  {found}")
            print(f"    {n_open} streams open when it began, the old router left after {took_s:.1f} s", flush=True)
            if set(found.answers) != {"right"}:
                raise Wrong(f"take over {number}: {dict(found.reasons)}")
    finally:
        await load.end()
    last = load.found
    if set(last.answers) - {"right"}:
        raise Wrong(f"the last ones: {dict(last.reasons)}")

    def is_over() -> bool:
        return site.counted() == {"finished": load.sent} and not site.held()

    try:
        await asyncio.to_thread(wait_for, "all is over", is_over)
    except Wrong as error:
        raise Wrong(f"{error}: {load.sent} sent, counted: {site.counted()}, held: {site.held()}") from None
    print(f"at the end   {load.sent} requests sent and counted as finished, nothing is held")


def check(folder: Path, rate_per_s: float, times: int, seconds: float) -> None:
    """Run all of it with logs in a folder. Raises: Wrong."""
    with ExitStack() as stack:
        asyncio.run(run(Routers(folder, stack), rate_per_s, times, seconds))


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=positive, default=50.0, help="requests per second")
    parser.add_argument("--times", type=count, default=3, help="routers that take over, one after the other")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load before each of them")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a folder in which the logs stay")
    arguments = parser.parse_args()
    load = {"rate_per_s": arguments.rate, "times": arguments.times, "seconds": arguments.seconds}
    return verdict(partial(check, **load), arguments.keep)


if __name__ == "__main__":
    sys.exit(main())

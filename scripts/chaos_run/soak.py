"""A hundred thousand requests, and the router's memory meanwhile.

    scripts/soak [--requests N] [--clients N] [--seed N] [--keep DIR]

Small requests at a high concurrency, every tenth client leaves, no other faults; every answer is verified. Resident
memory after the first tenth is what a warm router needs; the bar is 5 % above that at the end.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import uvloop

from balanceroute.engine.tokens import OutputLengths
from scripts.arguments import count
from scripts.chaos_run.aftermath import Findings, router_settles
from scripts.chaos_run.asks import Asker, Mix
from scripts.chaos_run.chaos import Tally
from scripts.chaos_run.folder import logs_folder
from scripts.chaos_run.stack import HOST, OUTPUT_LENGTHS, Shape, Stack
from scripts.chaos_run.verdict import FAULTS, Kind, judge
from scripts.chaos_run.wire import Client

GROWTH_RATIO = 1.05
POINTS = 20
SHAPE = Shape(
    prefillers=6, kv_blocks=4096, prefill_kv_blocks=8192, step_overhead_s=0.01, prefill_tokens_per_s=200_000.0
)
MIX = Mix(
    prompt_tokens=(4, 24),
    output_tokens=(1, 12),
    timeout_s=(60.0, 90.0),
    long_share=0.0,
    leave_share=0.1,
    malformed_share=0.002,
    hurried_share=0.0,
    pausing_share=0.0,
)
# one line per request would be most of what such short requests cost
QUIET = {"log": {"level": "warning"}}


class Soak:
    """The clients, and a sample of the memory after every twentieth of the requests."""

    def __init__(self, stack: Stack, requests: int, clients: int, seed: int) -> None:
        self._stack, self._requests, self._clients = stack, requests, clients
        self._asker = Asker(seed, MIX, OutputLengths.parse(OUTPUT_LENGTHS, stack.shape.seed))
        self._client = Client(HOST, stack.port)
        self._sent = self._done = 0
        self._started_s = time.monotonic()
        self.tally = Tally()
        self.series: list[tuple[int, float, int]] = []  # requests done, seconds, bytes

    async def run(self) -> None:
        """Send everything."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._clients):
                clients.create_task(self._drive())
        self._client.close()

    async def _drive(self) -> None:
        while self._sent < self._requests and self._stack.router.alive:
            self._sent += 1
            ask = self._asker.next()
            answer = await self._client.send(ask)
            elapsed_s = time.monotonic() - self._started_s
            self.tally.add(ask, answer, judge(ask, answer), elapsed_s)
            self._done += 1
            if self._done % max(1, self._requests // POINTS) == 0:
                self.series.append((self._done, elapsed_s, self._stack.router.rss_bytes()))


async def run(arguments: argparse.Namespace, folder: Path) -> bool:
    """One soak; True when every bar is met."""
    findings = Findings()
    async with Stack(replace(SHAPE, seed=arguments.seed), folder, overrides=QUIET) as stack:
        soak = Soak(stack, arguments.requests, arguments.clients, arguments.seed)
        await soak.run()
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            held = await router_settles(client, stack.url)
        findings.check(not held, f"router holds {held or 'nothing'}")
        cpu_s = stack.router.cpu_s()
        findings.check(await stack.router.stop() == 0, "exit code of the router after SIGTERM 0")
    tally, series = soak.tally, soak.series
    failed = tally.kinds[Kind.REFUSED] + tally.kinds[Kind.BROKEN]
    findings.check(not any(tally.kinds[kind] for kind in FAULTS), f"wrong, improper, hanging {len(tally.failures)}")
    warm = next((rss for done, _, rss in series if done >= arguments.requests // 10), 0)
    growth = series[-1][2] / warm - 1 if warm else 1.0
    first = max(1, arguments.requests // 10)
    findings.check(1 + growth <= GROWTH_RATIO, f"RSS growth after the first {first} requests {growth:+.2%}")
    print(
        f"soak: {series[-1][0]} requests, {arguments.clients} clients, {series[-1][1]:.0f} s,"
        f" {tally.kinds[Kind.RIGHT]} right, {failed} refused or broken off, {tally.kinds[Kind.LEFT]} left,"
        f" router CPU {cpu_s / max(1, arguments.requests) * 1e3:.2f} ms per request\n"
    )
    print("   requests   seconds   RSS MiB")
    for done, elapsed_s, rss in series:
        print(f"  {done:>9} {elapsed_s:>9.1f} {rss / 2**20:>9.1f}")
    print()
    print(findings)
    for _, failure in tally.failures[:10]:
        print(f"    {failure}")
    return not findings.faults


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=count, default=100_000, help="(100000)")
    parser.add_argument("--clients", type=count, default=128, help="at once (128)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (1)")
    parser.add_argument("--keep", type=Path, help="folder for logs and configuration; else they go")
    arguments = parser.parse_args()
    with logs_folder("soak", arguments.keep) as folder:
        good = uvloop.run(run(arguments, folder))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

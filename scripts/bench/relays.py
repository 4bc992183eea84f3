"""What a router of several processes costs beside one process: CPU of all of them per request and per event.

    .venv/bin/python scripts/bench/relays.py --rounds 5

`--relays 0`, 1 and 2 run at the same time before the same workers, which cost next to nothing, and are loaded in turn,
round after round, so what else the machine does hits all alike. Printed are medians over the rounds, and the median of
the same round's ratio to one process, with its 95 % bootstrap interval.

    requests  100 streams of 4 tokens per second, at random times: CPU us per request
    requests+ 32 connections that ask again when they are answered: CPU us per request
    events    64 streams, an event per 20 ms each, about three at a time: CPU us per event
    events+   256 streams, an event per 5 ms each, so that events come in bunches: CPU us per event

CPU is user and system time of all processes of the router. What a process costs that does nothing is part of it, and is
printed below: of all routers at the same time, after the rounds. So is, under events, what their requests cost: 64
streams of 200 tokens that end after 4 s are 16 requests per second. `--tokens 1000` makes that a fifth.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from processes import allow_many_sockets, cpu_s, tree
from relay import conditions, interval
from routers import Site, Target

RELAYS: Final = (0, 1, 2)
IDLE_S: Final = 10.0
LOADS: Final[dict[str, tuple[int, str, list[str]]]] = {  # interval of the workers in ms, what is counted, relay_load.py
    "requests": (5, "cpu_us_per_request", ["paced", "--rate", "100", "--tokens", "4"]),
    "requests+": (5, "cpu_us_per_request", ["unary", "--clients", "32"]),
    "events": (20, "cpu_us_per_event", ["stream", "--clients", "64"]),
    "events+": (5, "cpu_us_per_event", ["stream", "--clients", "256"]),
}


class Bench:
    """The workers and the routers."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.tokens = ["--tokens", str(tokens)]
        self.site = Site(folder, len(RELAYS))
        self.targets = [self._router(relays, port) for relays, port in zip(RELAYS, self.site.free, strict=True)]

    def _router(self, relays: int, port: int) -> Target:
        run_folder = str(self.site.folder / str(relays))
        return self.site.ours(f"--relays {relays}", port, relays=relays, run_folder=run_folder)

    def round(self, loads: list[str], seconds: float) -> None:
        for name in loads:
            interval_ms, _, arguments = LOADS[name]
            self.site.pace(interval_ms)
            if arguments[0] == "stream":
                arguments = [*arguments, *self.tokens]
            for target in self.targets:
                found = self.site.load(target, arguments, seconds)
                if found["failures"]:
                    raise SystemExit(f"{target.name}: {found['failures']} requests of {name} failed")
                target.found.setdefault(name, []).append(found)

    def idle(self) -> str:
        """What each router costs while nobody asks it for anything."""
        pids = [tree(target.process.pid) for target in self.targets if target.process is not None]
        before_s = [cpu_s(each) for each in pids]
        time.sleep(IDLE_S)
        costs = [(cpu_s(each) - before) / IDLE_S * 1e3 for each, before in zip(pids, before_s, strict=True)]
        costs_text = ", ".join(
            f"{target.name}: {cost:.1f} ms" for target, cost in zip(self.targets, costs, strict=True)
        )
        return f"idle, CPU per second: {costs_text}"

    def table(self, loads: list[str]) -> str:
        one = self.targets[0]
        rows = [f"| | {' | '.join(loads)} |", "|---" * (len(loads) + 1) + "|"]
        for target in self.targets:
            cells = []
            for name in loads:
                key = LOADS[name][1]
                values = target.values(name, key)
                cell = f"{statistics.median(values):.1f} us"
                cells.append(cell if target is one else f"{cell}, {interval(values, one.values(name, key))}")
            rows.append(f"| {target.name} | {' | '.join(cells)} |")
        rates = [f"{statistics.median(one.values(name, 'per_s')):,.0f}/s" for name in loads]
        return "\n".join([*rows, f"| what one process was asked for | {' | '.join(rates)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement, after at most 1 s of warming up")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer, under events and events+")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    arguments = parser.parse_args()
    allow_many_sockets()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.tokens)
        try:
            bench.site.start(bench.targets)
            for _ in range(arguments.rounds):
                bench.round(arguments.loads, arguments.seconds)
            idle = bench.idle()
        finally:
            bench.site.stop()
    print(bench.table(arguments.loads))
    print(f"\n{idle}")
    print(
        f"\n{conditions()}; {arguments.rounds} rounds of {arguments.seconds:g} s; load average {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()

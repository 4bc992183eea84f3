"""What a router of several processes costs beside one process: CPU of all of them per request and per event.

    .venv/bin/python -m scripts.bench.relays --rounds 5

`--relays 0`, 1 and 2 run at the same time before the same workers, which cost next to nothing, and are loaded in turn,
round after round, so what else the machine does hits all alike. Printed are medians over the rounds, and the median of
the same round's ratio to one process, with its 95 % bootstrap interval.

    requests  100 streams of 4 tokens per second, at random times: CPU us per request
    requests+ 32 connections that ask again when they are answered: CPU us per request
    events    64 streams, an event per 20 ms each, about three at a time: CPU us per event
    events+   256 streams, an event per 5 ms each, so that events come in bunches: CPU us per event

Beside them stand two routers of one process each, which share the load and know nothing of each other: two loops cost
that much before any process tells another one anything.

CPU is user and system time of all processes of the router. What a process costs that does nothing is part of it, and is
printed below: of all routers at the same time, after the rounds. So is, under events, what their requests cost: 64
streams of 200 tokens that end after 4 s are 16 requests per second. `--tokens 1000` makes that a fifth.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from scripts.bench.processes import allow_many_sockets
from scripts.bench.relay import conditions, interval
from scripts.bench.routers import Site, Target
from scripts.proc import cpu_s, tree

RELAYS: Final = (0, 1, 2)
IDLE_S: Final = 10.0
LOADS: Final[dict[str, tuple[int, str, list[str]]]] = {  # interval of the workers in ms, what is counted, relay_load.py
    "requests": (5, "cpu_us_per_request", ["paced", "--rate", "100", "--tokens", "4"]),
    "requests+": (5, "cpu_us_per_request", ["unary", "--clients", "32"]),
    "events": (20, "cpu_us_per_event", ["stream", "--clients", "64"]),
    "events+": (5, "cpu_us_per_event", ["stream", "--clients", "256"]),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """Routers that share a load, and what was found about them, by load."""

    name: str
    routers: list[Target]
    found: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def values(self, load: str, key: str) -> list[float]:
        return [found[key] for found in self.found[load]]

    def pids(self) -> list[int]:
        return [pid for router in self.routers if router.process is not None for pid in tree(router.process.pid)]


class Bench:
    """The workers and the routers."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.tokens = ["--tokens", str(tokens)]
        self.site = Site(folder, len(RELAYS) + 2)
        self.subjects = [Subject(f"--relays {relays}", [self._router(f"{relays}", relays)]) for relays in RELAYS]
        self.subjects.append(Subject("two routers", [self._router("left", 0), self._router("right", 0)]))

    def _router(self, name: str, relays: int) -> Target:
        run_folder = str(self.site.folder / f"run-{name}")
        return self.site.ours(name, next(self.site.free), relays=relays, run_folder=run_folder)

    def start(self) -> None:
        self.site.start([router for subject in self.subjects for router in subject.routers])

    def round(self, loads: list[str], seconds: float) -> None:
        for name in loads:
            interval_ms, key, arguments = LOADS[name]
            self.site.pace(interval_ms)
            if arguments[0] == "stream":
                arguments = [*arguments, *self.tokens]
            for subject in self.subjects:
                subject.found.setdefault(name, []).append(self._load(subject, key, arguments, seconds))

    def _load(self, subject: Subject, key: str, arguments: Sequence[str], seconds: float) -> dict[str, float]:
        """What a request or event cost, and how many there were per second. Raises: SystemExit: one has failed."""
        share = divided(arguments, len(subject.routers))
        with ThreadPoolExecutor(len(subject.routers)) as pool:
            parts: list[dict[str, Any]] = list(
                pool.map(lambda router: self.site.load(router, share, seconds), subject.routers)
            )
        if failures := sum(part["failures"] for part in parts):
            raise SystemExit(f"{subject.name}: {failures} requests of {arguments} failed")
        per_s = sum(part["per_s"] for part in parts)
        return {key: sum(part[key] * part["per_s"] for part in parts) / per_s, "per_s": per_s}

    def idle(self) -> str:
        """What each router costs while nobody asks it for anything."""
        pids = [subject.pids() for subject in self.subjects]
        before_s = [cpu_s(each) for each in pids]
        time.sleep(IDLE_S)
        costs = [(cpu_s(each) - before) / IDLE_S * 1e3 for each, before in zip(pids, before_s, strict=True)]
        costs_text = ", ".join(
            f"{subject.name}: {cost:.1f} ms" for subject, cost in zip(self.subjects, costs, strict=True)
        )
        return f"idle, CPU per second: {costs_text}"

    def table(self, loads: list[str]) -> str:
        one = self.subjects[0]
        rows = [f"| | {' | '.join(loads)} |", "|---" * (len(loads) + 1) + "|"]
        for subject in self.subjects:
            cells = []
            for name in loads:
                key = LOADS[name][1]
                values = subject.values(name, key)
                cell = f"{statistics.median(values):.1f} us"
                cells.append(cell if subject is one else f"{cell}, {interval(values, one.values(name, key))}")
            rows.append(f"| {subject.name} | {' | '.join(cells)} |")
        rates = [f"{statistics.median(one.values(name, 'per_s')):,.0f}/s" for name in loads]
        return "\n".join([*rows, f"| what one process was asked for | {' | '.join(rates)} |"])


def divided(arguments: Sequence[str], parts: int) -> list[str]:
    """The arguments of `relay_load.py` for one of so many equal parts of a load."""
    before = ["", *arguments]
    return [
        str(int(word) // parts) if option in {"--rate", "--clients"} else word
        for option, word in zip(before, arguments, strict=False)
    ]


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
            bench.start()
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

"""Measure what the router costs, beside a bare relay and any other router: CPU per request and event, delay, memory.

    scripts/bench_relay
    scripts/bench_relay --rounds 5 --target 'other=other-router --port {port} --prefill {prefill1} --decode {decode1}'

In the command of a target, {port} is where it must listen and {prefill1}, {prefill2}, {decode1} .. {decode4} are the
workers' URLs ({decode1_port} the port alone); {config} is our own configuration file, for another version of us:
`--target 'before=/there/bin/balanceroute serve --config {config} --port {port}'`. All targets run at the same time and
are loaded in turn, a few seconds each, round after round, so what else the machine does hits all alike. What ran just
before tells on who comes next (up to a seventh), so the order of the rounds is balanced. The table shows medians over
the rounds, and in brackets the median of the same round's ratio to the bare relay. A second table divides our figure
by each other's, round by round: the median of these ratios with its 95 % bootstrap interval. CPU is user and system
time of the target's processes.

    unary    32 connections, whole answers of 16 tokens, 1 kB prompt: CPU us per request
    stream   64 streams, an event per 20 ms each, 200 events: CPU us per event, opening the stream included, and the
             time from a worker's write to the client's read (hop)
    flood    256 streams, an event per 5 ms each: CPU us per event where events come in bunches
    hold     --held streams at once: resident memory per stream

Emulated workers without an engine: this says what the router itself costs, nothing about serving. The bare relay
(`relay_reference.py`) and `direct` send one request upstream where the router sends a probe and a decode. Workers and
clients take CPU of the same machine; above some ten thousand events/s it is they who set the rate.
"""

import argparse
import json
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from balanceroute import native
from balanceroute.proxy import hotpath
from scripts.bench.processes import allow_many_sockets
from scripts.bench.routers import KEY, Site, Target

REFERENCE, OURS, DIRECT = "bare relay", "balanceroute", "direct"
LOADS: dict[str, tuple[float, list[str]]] = {  # interval of the workers in ms, arguments of relay_load.py
    "unary": (20, ["unary", "--clients", "32", "--tokens", "16"]),
    "stream": (20, ["stream", "--clients", "64", "--tokens", "200"]),
    "flood": (5, ["stream", "--clients", "256", "--tokens", "200"]),
}
COLUMNS = (
    ("CPU us/request", "unary", "cpu_us_per_request"),
    ("CPU us/event", "stream", "cpu_us_per_event"),
    ("flood: CPU us/event", "flood", "cpu_us_per_event"),
    ("hop p50 ms", "stream", "hop_ms_p50"),
)


class Bench:
    """The workers and all targets."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.a, self.site = arguments, Site(folder, 2 + len(arguments.target))
        port = next(self.site.free)
        reference = [sys.executable, "-m", "scripts.bench.relay_reference", str(port), *map(str, self.site.decode)]
        self.targets = [Target(DIRECT, self.site.decode[0], []), Target(REFERENCE, port, reference), self._ours()]
        for text in arguments.target:
            name, _, command = text.partition("=")
            port = next(self.site.free)
            words = self._words(port)
            self.targets.append(Target(name, port, [word.format_map(words) for word in shlex.split(command)]))

    def _words(self, port: int) -> Mapping[str, str]:
        urls = {f"prefill{i}": f"http://127.0.0.1:{worker}" for i, worker in enumerate(self.site.prefill, 1)}
        urls |= {f"decode{i}": f"http://127.0.0.1:{worker}" for i, worker in enumerate(self.site.decode, 1)}
        ports = {f"{name}_port": url.rpartition(":")[2] for name, url in urls.items()}
        return urls | ports | {"config": str(self.site.config(OURS)), "port": str(port)}

    def _ours(self) -> Target:
        keys = [f"auth.client_keys={self._keys()}"] if self.a.keys else []
        return self.site.ours(OURS, next(self.site.free), max(64, self.a.held), [*self.a.set, *keys])

    def _keys(self) -> Path:
        """A file with the key of the load, and all limits that a key can have."""
        limits = {"max_in_flight": 10**6, "requests_per_minute": 10**6, "tokens_per_minute": 10**12}
        entry = {"name": "bench", "sha256": sha256(KEY.encode()).hexdigest(), "priority": {"min": 0, "max": 0}}
        file = self.site.folder / "keys.yaml"
        file.write_text(json.dumps({"keys": [entry | limits]}))
        return file

    def load(self, target: Target, arguments: list[str], seconds: float) -> dict[str, Any]:
        return self.site.load(target, [*arguments, "--key", KEY] if self.a.keys else arguments, seconds)

    def rounds(self) -> None:
        for number in range(self.a.rounds):
            for name, (interval_ms, arguments) in LOADS.items():
                self.site.pace(interval_ms)
                for target in in_turn(self.targets, number):
                    found = self.load(target, arguments, self.a.seconds)
                    target.found.setdefault(name, []).append(found)
                    self.tell(f"round {number + 1}", target, name, found)

    def hold(self) -> None:
        self.site.pace(1000)
        for target in self.targets[1:]:
            found = self.load(target, ["hold", "--clients", str(self.a.held), "--tokens", "1000"], 2.0)
            target.found.setdefault("hold", []).append(found)
            self.tell("held", target, "hold", found)

    def tell(self, when: str, target: Target, load: str, found: dict[str, Any]) -> None:
        if not self.a.quiet:
            print(f"{when} {load} {target.name}: {json.dumps(found)}", file=sys.stderr, flush=True)

    def table(self) -> str:
        names = [column[0] for column in COLUMNS] + ["KiB/stream", "failures"]
        rows = [f"| target | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        reference = self.targets[1]
        for target in self.targets:
            cells = [self._cell(target, reference, load, key) for _, load, key in COLUMNS]
            held = target.values("hold", "kib_per_stream")
            cells.append(f"{held[0]:.0f}" if held else "-")
            cells.append(str(sum(int(count) for load in LOADS for count in target.values(load, "failures"))))
            rows.append(f"| {target.name} | {' | '.join(cells)} |")
        return "\n".join(rows)

    def ratios(self) -> str:
        """Ours divided by each other target."""
        ours = next(target for target in self.targets if target.name == OURS)
        names = [column[0] for column in COLUMNS]
        rows = [f"| {OURS} / ... | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for other in self.targets:
            if other is not ours and other.process is not None:
                cells = [interval(ours.values(load, key), other.values(load, key)) for _, load, key in COLUMNS]
                rows.append(f"| {other.name} | {' | '.join(cells)} |")
        return "\n".join(rows)

    @staticmethod
    def _cell(target: Target, reference: Target, load: str, key: str) -> str:
        values = target.values(load, key)
        if target.process is None and key != "hop_ms_p50":
            return "-"
        middle = statistics.median(values)
        if key == "hop_ms_p50":
            return f"{middle:.2f}"
        ratios = [value / base for value, base in zip(values, reference.values(load, key), strict=True)]
        return f"{middle:.1f} ({statistics.median(ratios):.2f}x)"


def in_turn(targets: list[Target], number: int) -> list[Target]:
    """The same targets in the order of this round.

    A balanced Latin square (E. J. Williams, 1949): over as many rounds as there are targets, or twice as many where
    they are odd, each follows each other equally often.
    """
    n = len(targets)
    order = [(place // 2 if place % 2 == 0 else n - 1 - place // 2) + number for place in range(n)]
    ordered = [targets[index % n] for index in order]
    return ordered[::-1] if n % 2 and number // n % 2 else ordered


def interval(ours: list[float], others: list[float]) -> str:
    """The median of the rounds' ratios, and the 95 % bootstrap interval of that median."""
    ratios = [mine / other for mine, other in zip(ours, others, strict=True)]
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(2000))
    low, high = medians[50], medians[1950]
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def conditions() -> str:
    """Commit, whether it is compiled, processor and versions, for below the table."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in info if line.startswith("model name")), platform.machine())
    names = ("uvicorn", "uvloop", "httptools", "orjson", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    form = "compiled" if native.COMPILED and hotpath.COMPILED else "run as Python, not compiled"
    return f"commit {commit}, {form}; {os.cpu_count()} x {cpu}; Python {platform.python_version()}, {versions}"


def main() -> None:
    doc = __doc__ or ""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and targets end with us
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", default=[], metavar="NAME=COMMAND", help="another router")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement, after at most 1 s of warming up")
    parser.add_argument("--keys", action="store_true", help="ours asks for a client key that has every limit")
    parser.add_argument("--held", type=int, default=4000, help="streams of `hold`; 0 leaves it out")
    parser.add_argument("--out", type=Path, help="write every measurement here, as JSON")
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    if any("=" not in text for text in (*arguments.target, *arguments.set)):
        parser.error("--target wants NAME=COMMAND, --set KEY=VALUE")
    allow_many_sockets()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, Path(folder))
        load_before = os.getloadavg()[0]
        try:
            bench.site.start(bench.targets)
            bench.rounds()
            if arguments.held:
                bench.hold()
        finally:
            bench.site.stop()
    print(f"{bench.table()}\n\n{bench.ratios()}")
    loads = f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"\n{conditions()}; {arguments.rounds} rounds of {arguments.seconds:g} s; {loads}")
    if arguments.out:
        arguments.out.write_text(json.dumps({target.name: target.found for target in bench.targets}, indent=1))


if __name__ == "__main__":
    main()

"""How level the loads are behind a router of several processes, beside one process: on the emulated cluster.

    .venv/bin/python -m scripts.bench.spread --rounds 3

The cluster and the trace of `balanceroute demo`, through `--relays 0` and `--relays N` in turn, by the default policy.
Printed are means over the steps of the steady window: load spread (max - min of the ranks' KV tokens), what the fullest
rank has above the mean, and tokens per second; and the ratio of each round.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Final

from balanceroute.demo.decode_tier import DemoScale, emulated_cluster, play
from balanceroute.demo.processes import free_ports, process, wait_ready

FIGURES: Final = ("load_spread_tokens", "excess_tokens")


def run(scale: DemoScale, relays: int) -> dict[str, float]:
    """One router with a cluster of its own."""
    trace, (port,) = scale.trace(), free_ports(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with emulated_cluster(scale, scale.setting(trace), folder) as (config, cluster_url):
            flags = ["--config", str(config), "--port", str(port), "--relays", str(relays), "--log-level", "warning"]
            flags += ["--set", f"listen.run_folder={folder}/run"]
            with process(["serve", *flags], folder / "router.log") as router:
                url = f"http://127.0.0.1:{port}"
                wait_ready(f"{url}/ready", router, folder / "router.log")
                report, window = asyncio.run(play(trace, url, cluster_url, lambda *_: None))
    if report.errors:
        raise SystemExit(f"--relays {relays}: {report.errors}")
    steps = max(1.0, window["steps"])
    found = {name: window[name] / steps for name in FIGURES}
    return found | {"tokens_per_s": window["running"] / window["step_s"], "late_p95_ms": 1e3 * report.late_s.p95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relays", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=float, default=1.0, help="1 is what perfect balance carries")
    parser.add_argument("--seconds", type=float, default=28.0)
    arguments = parser.parse_args()
    ratios: list[float] = []
    for number in range(arguments.rounds):
        scale = DemoScale(load=arguments.load, seconds=arguments.seconds, seed=number + 1)
        found = {relays: run(scale, relays) for relays in (0, arguments.relays)}
        for relays, figures in found.items():
            text = ", ".join(f"{name} {value:,.1f}" for name, value in figures.items())
            print(f"round {number + 1} --relays {relays}: {text}", flush=True)
        ratios.append(found[arguments.relays]["load_spread_tokens"] / found[0]["load_spread_tokens"])
    text = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"load spread of --relays {arguments.relays} / one process: median {statistics.median(ratios):.3f} ({text})")


if __name__ == "__main__":
    main()

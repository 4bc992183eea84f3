"""A trace of one's own: from a log of requests to the policy that suits it.

    python examples/own_trace.py [LOG.csv]

The log has a line per request: time of arrival in seconds, prompt tokens, generated tokens. Without a file a small one
is made up. `balanceroute trace convert` reads the formats of public traces (Azure, Mooncake, Bailian, BurstGPT).
"""

import csv
import random
import sys
import tempfile
from pathlib import Path

import balanceroute


def make_up(path: Path) -> None:
    """A log of 1,200 requests: many short ones, and a long document now and then."""
    draw = random.Random(0)
    clock = 0.0
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        for _ in range(1200):
            clock += draw.expovariate(8.0)
            prompt = draw.randint(20_000, 60_000) if draw.random() < 0.05 else draw.randint(50, 2_000)
            rows.writerow((f"{clock:.3f}", prompt, draw.randint(50, 600)))


def main(path: Path) -> None:
    """Every policy at the load that the log has on four workers, and at nine tenths of what they can carry."""
    trace = balanceroute.read_trace(path)
    cluster = balanceroute.Setting(n_workers=4, slots=32)
    print(balanceroute.describe_trace(trace))
    for load in (None, 0.9):
        print(f"\n{'as it arrived' if load is None else f'load {load}':<22} load spread   TPOT p95   wait p99")
        for policy in ("join_shortest_queue", "least_kv", "br_0", "level_fit"):
            figures = balanceroute.simulate(trace, policy, setting=cluster, load=load).figures
            print(
                f"{policy:<22} {figures.load_spread_mean:11,.0f} {1000 * figures.tpot_p95_s:7.1f} ms"
                f" {figures.wait_p99_s:8.1f} s"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            made_up = Path(folder) / "log.csv"
            make_up(made_up)
            main(made_up)

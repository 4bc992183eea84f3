"""The simulator and the policies against the figures of an independent simulator, on the same traces.

Where a router has no free choice left the figures must agree within 1 %, and with an oracle, which is exact, nearly so;
where ties are broken at random or a prediction enters, small differences grow into other schedules: 5 % and more. How
much one schedule says: with every arrival of `capped` moved by up to 50 ms, 32 runs of target_fit have a load spread of
5,393 to 8,061.
"""

import math

import pytest

from balanceroute.core.policies import PolicySettings
from balanceroute.simulator import Figures, Replay
from balanceroute.traces import read_trace
from tests.shared_material import shared_path

PRINTED = {"max_wait_s": math.inf, "slack_placement": "free_slots"}
GREEDY_ALONE = {"s_greedy": 0, **PRINTED}
TWO_STAGES = {"s_greedy": 4, "guard": "head", **PRINTED}
AT_43 = {"beta": 43.0, "gamma": 0.86, **GREEDY_ALONE}
AT_14 = {"beta": 14.67, "gamma": 0.64, **GREEDY_ALONE}

# (policy, knobs, predictor), {trace: (load spread, TPOT p95 ms, wait p99 s, balance)},
# relative tolerance of the first figure and of the others
TABLE = {
    "least_kv": (
        ("least_kv", {}, "none"),
        {"heavy_tailed": (118_397, 69.3, 68, None), "capped": (110_295, 74.0, 40, None)},
        (0.01, 0.012),
    ),
    "pool_fifo": (
        ("pool_fifo", {}, "none"),
        {"heavy_tailed": (156_334, 76.3, 25, 0.844), "capped": (94_425, 72.5, 22, 0.920)},
        (0.01, 0.01),
    ),
    "br_0, greedy alone": (
        ("br_0", GREEDY_ALONE, "none"),
        {"heavy_tailed": (32_253, 65.6, 391, 0.976), "capped": (22_159, 68.3, 522, 0.986)},
        (0.01, 0.01),
    ),
    "br_0, two stages, r_max 4": (
        ("br_0", {"r_max": 4, **TWO_STAGES}, "none"),
        {"heavy_tailed": (56_227, 66.6, 23, 0.959), "capped": (22_191, 67.0, 23, 0.985)},
        (0.05, 0.05),
    ),
    "br_0, two stages, r_max 8": (
        ("br_0", {"r_max": 8, **TWO_STAGES}, "none"),
        {"heavy_tailed": (37_541, 66.3, 29, 0.973), "capped": (22_582, 67.3, 36, 0.985)},
        (0.05, 0.05),
    ),
    "join_shortest_queue": (
        ("join_shortest_queue", {}, "none"),
        {"heavy_tailed": (158_364, 78.0, 35, 0.845), "capped": (101_458, 74.1, 28, 0.909)},
        (0.05, 0.05),
    ),
    "br_h, oracle (43, .86)": (
        ("br_h", AT_43, "oracle"),
        {"heavy_tailed": (13_364, 66.6, 327, 0.990), "capped": (14_822, 69.4, 338, 0.990)},
        (0.01, 0.03),
    ),
    "br_h, oracle (14.67, .64)": (
        ("br_h", AT_14, "oracle"),
        {"heavy_tailed": (31_383, 64.0, 365, 0.979), "capped": (15_085, 67.9, 468, 0.990)},
        (0.01, 0.03),
    ),
    "br_h, survival": (
        ("br_h", AT_43, "survival"),
        {"heavy_tailed": (20_787, 64.1, 351, 0.984), "capped": (13_463, 67.6, 411, 0.991)},
        (0.15, 0.15),
    ),
    "target_fit": (
        ("target_fit", {}, "none"),
        {"heavy_tailed": (20_359, 66.1, 28, 0.978), "capped": (7_624, 67.6, 28, 0.992)},
        (0.20, 0.15),  # the spread on capped, 0.3 % of the load, is 19 % lower here; theirs is within those 32
    ),
}


def figures(trace: str, policy: str, knobs: dict[str, object], predictor: str) -> Figures:
    job = Replay(
        read_trace(shared_path(f"data/{trace}.csv.gz")),
        PolicySettings(policy=policy, **knobs),  # type: ignore[arg-type]
        predictor=predictor,
        train=read_trace(shared_path(f"data/{trace}_train.csv.gz")),
    )
    return job.run().figures


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["heavy_tailed", "capped"])
@pytest.mark.parametrize("row", TABLE)
def test_figures_agree_with_the_reference_table(row: str, trace: str) -> None:
    arguments, expected, (spread_tolerance, tolerance) = TABLE[row]
    ours = figures(trace, *arguments)
    spread, tpot_ms, wait_s, balance = expected[trace]
    assert ours.load_spread_mean == pytest.approx(spread, rel=spread_tolerance)
    # the table is printed with this many digits: half a unit of the last is not an error
    assert ours.tpot_p95_s * 1000 == pytest.approx(tpot_ms, rel=tolerance, abs=0.05)
    assert ours.wait_p99_s == pytest.approx(wait_s, rel=tolerance, abs=0.6)
    if balance is not None:
        assert ours.balance == pytest.approx(balance, rel=tolerance, abs=0.0005)

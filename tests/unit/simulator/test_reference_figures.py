"""The simulator and the policies against the figures of an independent simulator, on the same traces.

Equal to the last printed digit, which whole runs of 8,000 requests only are when every decision is the same: one
request of `capped` admitted a step later moves the load spread of target_fit by 20 %. Where ties are broken at random,
or details of a fitted predictor enter, rows have a tolerance.
"""

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from balanceroute.core.knobs import PolicySettings
from balanceroute.simulator import Outcome, Replay
from balanceroute.traces import read_trace
from tests.recorded import DATA, TRACES

PRINTED = {"max_wait_s": math.inf, "slack_placement": "free_slots"}
GREEDY_ALONE = {"s_greedy": 0, **PRINTED}
TWO_STAGES = {"s_greedy": 4, "guard": "head", **PRINTED}
AT_43 = {"beta": 43.0, "gamma": 0.86, **GREEDY_ALONE}
AT_14 = {"beta": 14.67, "gamma": 0.64, **GREEDY_ALONE}

RANDOM_TIES, OWN_CURVE, OWN_HISTORIES = 0.05, 0.02, 0.10  # relative tolerances

# (policy, knobs, predictor), the trace, relative tolerance. Each on one trace, as a run takes seconds: a fault in a
# policy changes its decisions on either. Prompts recur in `heavy_tailed` only.
ROWS = {
    "least_kv": (("least_kv", {}, "none"), "heavy_tailed", 0.0),
    "pool_fifo": (("pool_fifo", {}, "none"), "capped", 0.0),
    "br_0, greedy alone": (("br_0", GREEDY_ALONE, "none"), "heavy_tailed", 0.0),
    "br_0, two stages, r_max 4": (("br_0", {"r_max": 4, **TWO_STAGES}, "none"), "heavy_tailed", 0.0),
    "br_0, two stages, r_max 8": (("br_0", {"r_max": 8, **TWO_STAGES}, "none"), "capped", 0.0),
    "join_shortest_queue": (("join_shortest_queue", {}, "none"), "capped", RANDOM_TIES),
    "br_h, oracle (43, .86)": (("br_h", AT_43, "oracle"), "capped", 0.0),
    "br_h, oracle (14.67, .64)": (("br_h", AT_14, "oracle"), "heavy_tailed", 0.0),
    "br_h, survival": (("br_h", AT_43, "survival"), "capped", OWN_CURVE),
    "br_h, exact match": (("br_h", AT_43, "exact_match"), "heavy_tailed", OWN_HISTORIES),
    "target_fit": (("target_fit", {}, "none"), "capped", 0.0),
}
PRINTED_ROWS = json.loads((DATA / "reference_figures.json").read_text())["rows"]


def test_every_printed_row_is_compared() -> None:
    assert set(ROWS) == set(PRINTED_ROWS)


def replay(trace: str, policy: str, knobs: dict[str, object], predictor: str) -> Outcome:
    return Replay(
        read_trace(TRACES / f"{trace}.csv.gz"),
        PolicySettings(policy=policy, **knobs),  # type: ignore[arg-type]
        predictor=predictor,
        train=read_trace(TRACES / f"{trace}_train.csv.gz"),
    ).run()


def observed(values: NDArray[np.float64], share: float) -> float:
    """The percentile as that simulator takes it: an observed value, nothing between two."""
    return float(np.sort(values)[int(share * len(values))])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_figures_agree_with_the_reference_table(row: str) -> None:
    arguments, trace, tolerance = ROWS[row]
    printed = PRINTED_ROWS[row][trace]
    ours = replay(trace, *arguments)
    # the table is printed with this many digits: about half a unit of the last is not an error
    assert ours.figures.load_spread_mean == pytest.approx(printed["load_spread_tokens"], rel=tolerance, abs=0.6)
    assert observed(ours.tpot_s, 0.95) * 1000 == pytest.approx(printed["tpot_p95_ms"], rel=tolerance, abs=0.06)
    assert observed(ours.wait_s, 0.99) == pytest.approx(printed["wait_p99_s"], rel=tolerance, abs=0.6)
    if printed["balance"] is not None:
        assert ours.figures.balance == pytest.approx(printed["balance"], rel=tolerance, abs=0.0006)

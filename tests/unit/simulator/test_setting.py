"""Which simulated clusters are refused before anything runs."""

import math
from typing import Any

import pytest

from balanceroute.errors import InputError
from balanceroute.simulator import Failure, Setting


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_workers": 0}, "workers 0: accepted is a number from 1 to 4096"),
        ({"n_workers": 99_999_999_999}, "workers 99999999999: accepted is a number from 1 to 4096"),
        ({"slots": 99_999_999_999}, "slots 99999999999: accepted is a number from 1 to 65536"),
        ({"pool": 99_999_999_999}, "pool 99999999999: accepted is a number from 1 to 1000000"),
        ({"prefillers": 99_999_999_999}, "prefillers 99999999999: accepted is a number from 0 to 4096"),
        ({"transfer_steps": 10**11}, "transfer steps 100000000000: accepted is a number from 0 to 10000"),
        ({"telemetry_lag_steps": 10**11}, "telemetry lag 100000000000: accepted is a number from 0 to 10000"),
        ({"step_cost_s": math.nan}, "step cost nan: accepted is a number from 0 to 1"),
        ({"step_cost_s": math.inf}, "step cost inf: accepted is a number from 0 to 1"),
        ({"step_overhead_s": 1e308}, "step overhead 1e+308: accepted is a number from 0 to 1000000"),
        ({"step_overhead_s": -1.0}, "step overhead -1.0: accepted is a number from 0 to 1000000"),
        ({"step_cost_s": 0.0, "step_overhead_s": 1e-320}, "step cost 0.0 and step overhead 1e-320: a step must take"),
        ({"prefill_tokens_per_s": math.inf}, "prefill rate inf: accepted is a number from 1 to 1000000000"),
        ({"slowdowns": (1.0,)}, "slowdowns: 1 numbers for 2 workers"),
        ({"slowdowns": (1.0, math.inf)}, "slowdown inf: accepted is a number above 0 and at most 100"),
        ({"slowdowns": (1.0, math.nan)}, "slowdown nan: accepted is a number above 0 and at most 100"),
        ({"slowdowns": (math.nan, 1.0)}, "slowdown nan: accepted is a number above 0 and at most 100"),
        ({"slowdowns": (0.0, 1.0)}, "slowdown 0.0: accepted is a number above 0 and at most 100"),
        ({"failures": (Failure(2, 1.0),)}, "failure of worker 2: there are workers 0 to 1"),
        ({"failures": (Failure(0, math.nan),)}, "failure of worker 0 at second nan: accepted is a number from 0 to"),
        ({"failures": (Failure(0, 1.0, math.inf),)}, "failure of worker 0 at second inf: accepted is a number from 0"),
        ({"failures": (Failure(0, "x"),)}, "failure of worker 0 at second 'x': accepted is a number from 0 to"),  # type: ignore[arg-type]
        ({"failures": Failure(0, 1.0)}, "slowdowns, failures: accepted are lists, of numbers and of Failure objects"),
        ({"failures": [(0, 1.0)]}, "slowdowns, failures: accepted are lists, of numbers and of Failure objects"),
        ({"slowdowns": 1.3}, "slowdowns, failures: accepted are lists, of numbers and of Failure objects"),
        ({"failures": (Failure(0, 5.0, 5.0),)}, "failure of worker 0 ends before it starts"),
        ({"failures": (Failure(0.5, 1.0),)}, "failure of worker 0.5: there are workers 0 to 1"),  # type: ignore[arg-type]
        ({"n_workers": 4.0}, "workers 4.0: accepted is a whole number from 1 to 4096"),
        ({"slots": "4"}, "slots '4': accepted is a whole number from 1 to 65536"),
        ({"pool": None}, "pool None: accepted is a whole number from 1 to 1000000"),
        ({"kv_capacity_tokens": 8e3}, "KV capacity 8000.0: accepted is a whole number from 1 to"),
        ({"overlap_requests": 1.5}, "overlap 1.5: accepted is a whole number from 0 to 65536"),
        ({"transfers_by_size": 1}, "transfers by size 1: accepted is True or False"),
        ({"transfers_beside_full": "no"}, "transfers beside full 'no': accepted is True or False"),
        ({"cost_aware": None}, "cost aware None: accepted is True or False"),
    ],
)
def test_an_invalid_value_is_refused_with_its_name_and_what_is_accepted(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        Setting(**{"n_workers": 2} | values).checked()
    assert str(refused.value).startswith(message)


def test_the_bounds_leave_room_for_large_and_slow_clusters() -> None:
    large = Setting(n_workers=4096, slots=65_536, pool=1_000_000, slowdowns=(100.0,) * 4096)
    slow = Setting(step_cost_s=1.0, step_overhead_s=1e6, failures=(Failure(0, 0.0, 1e9),))
    assert large.checked() == large
    assert slow.checked() == slow


@pytest.mark.parametrize("change", [{"transfer_steps": 2}, {"kv_capacity_tokens": 10**6}, {"prefillers": 1}])
def test_the_engine_balancer_cannot_be_combined_with_other_options(change: dict[str, int]) -> None:
    with pytest.raises(InputError, match="engine balancer: it is not modelled together with"):
        Setting(engine_balancer_blocks=5.0, **change).checked()  # type: ignore[arg-type]
    with pytest.raises(InputError, match="engine balancer nan"):
        Setting(engine_balancer_blocks=math.nan).checked()

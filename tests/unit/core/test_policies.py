"""What each policy picks in small situations whose answer can be checked by hand."""

import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from balanceroute.config.sections.routing import Routing
from balanceroute.core.balance_route import BalanceRoute, BalanceRouteParams
from balanceroute.core.knobs import ALL, PolicySettings, is_accepted
from balanceroute.core.policies import POLICIES, make_policy, settings_from_dict, settings_to_dict
from balanceroute.core.pool_bypass import PoolBypass
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, WorkerState
from balanceroute.errors import ConfigError
from tests.unit.core.builders import a_request, a_scheduler, admitted, hold, pool_all

ASSIGNING = ["random", "round_robin", "power_of_two", "join_shortest_queue", "least_kv"]


def test_unknown_policies_are_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match="'magic' is unknown; accepted: .*br_0, br_h"):
        make_policy(PolicySettings(policy="magic"))


@pytest.mark.parametrize(
    ("knobs", "problem"),
    [
        ({"policy": "br_0", "r_max": 0}, "r_max: expected a whole number from 1 to 64, found 0"),
        ({"policy": "br_0", "guard": "x"}, "guard: expected pool or head, found 'x'"),
        ({"policy": "br_h", "gamma": -3.0}, "gamma: expected a number above 0 and at most 1, found -3.0"),
        ({"policy": "level_fit", "max_wait_s": math.nan}, "max_wait_s: expected a number from 0 to 86400, or inf"),
    ],
)
def test_a_policy_with_an_invalid_knob_is_refused(knobs: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        make_policy(PolicySettings(**knobs))  # type: ignore[arg-type]


def configuration_accepts(name: str, value: object) -> bool:
    try:
        Routing.model_validate({name: value})
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"policy"}))
def test_a_knob_accepts_the_same_values_as_the_configuration(name: str) -> None:
    knob = ALL[name]
    least, most = (0, 1) if knob.least is None else (knob.least, knob.most)
    values = [
        least - 1,
        least,
        least + 1,
        most,
        most + 1,
        0.25,
        -0.25,
        math.nan,
        math.inf,
        -math.inf,
        True,
        "head",
        [],
        {},
    ]
    values += knob.choices
    assert [is_accepted(name, value) for value in values] == [configuration_accepts(name, value) for value in values]


@pytest.mark.parametrize("name", ["max_wait_s", "hold_s"])
def test_an_infinite_time_is_a_valid_knob_and_survives_json(name: str) -> None:
    settings = PolicySettings(policy="target_fit", **{name: math.inf})  # type: ignore[arg-type]
    assert is_accepted(name, math.inf)
    assert settings_to_dict(settings)["params"][name] is None
    assert settings_from_dict(settings_to_dict(settings)) == settings


@pytest.mark.parametrize("policy", ASSIGNING)
def test_assigning_policies_do_not_wait_for_a_slot(policy: str) -> None:
    scheduler = a_scheduler(policy, workers=2, slots=1)
    pool_all(scheduler, dict.fromkeys("abcdef", 10))
    assert len(admitted(scheduler)) == 6
    assert len(scheduler.snapshot.pool) == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_uses_a_worker_that_is_down_or_draining(policy: str) -> None:
    scheduler = a_scheduler(policy, workers=3, slots=8)
    scheduler.set_worker_state("d0", WorkerState.DOWN, 0.0)
    scheduler.set_worker_state("d2", WorkerState.DRAINING, 0.0)
    pool_all(scheduler, dict.fromkeys("abcd", 10))
    assert {worker for _, worker in admitted(scheduler)} == {"d1"}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_waits_when_no_worker_is_up(policy: str) -> None:
    scheduler = a_scheduler(policy, workers=1)
    scheduler.set_worker_state("d0", WorkerState.DOWN, 0.0)
    pool_all(scheduler, {"a": 10})
    assert admitted(scheduler) == []


def test_round_robin_takes_turns() -> None:
    scheduler = a_scheduler("round_robin", workers=3)
    pool_all(scheduler, dict.fromkeys("abcd", 10))
    assert [worker for _, worker in admitted(scheduler)] == ["d0", "d1", "d2", "d0"]


def test_join_shortest_queue_counts_requests_and_least_kv_counts_tokens() -> None:
    for policy, expected in (("join_shortest_queue", "d1"), ("least_kv", "d0")):
        scheduler = a_scheduler(policy, workers=2, slots=8)
        scheduler.set_worker_state("d1", WorkerState.DOWN, 0.0)
        pool_all(scheduler, {"a": 10, "b": 10})
        scheduler.admit(0.0)
        scheduler.set_worker_state("d1", WorkerState.UP, 0.0)
        scheduler.set_worker_state("d0", WorkerState.DOWN, 0.0)
        pool_all(scheduler, {"big": 1000})
        scheduler.admit(0.0)
        scheduler.set_worker_state("d0", WorkerState.UP, 0.0)
        pool_all(scheduler, {"new": 1})
        assert admitted(scheduler) == [("new", expected)]


def test_power_of_two_takes_the_emptier_of_two_workers() -> None:
    scheduler = a_scheduler("power_of_two", workers=2, slots=8)
    pool_all(scheduler, dict.fromkeys("abcdefgh", 10))
    scheduler.admit(0.0)
    assert [len(worker.active) for worker in scheduler.snapshot.workers] == [4, 4]


@pytest.mark.parametrize("policy", ["random", "power_of_two", "join_shortest_queue"])
def test_the_same_seed_gives_the_same_draws_and_another_seed_others(policy: str) -> None:
    def run(seed: int) -> list[tuple[str, str]]:
        scheduler = a_scheduler(policy, workers=8, slots=4, seed=seed)
        pool_all(scheduler, {str(index): 10 for index in range(40)})
        return admitted(scheduler)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_pool_fifo_gives_the_oldest_to_the_lightest_worker_with_room() -> None:
    scheduler = a_scheduler("pool_fifo", workers=2, slots=2)
    pool_all(scheduler, {"a": 100, "b": 10, "c": 10, "d": 10, "e": 1})
    assert admitted(scheduler) == [("a", "d0"), ("b", "d1"), ("c", "d1"), ("d", "d0")]


def with_loads(policy: str, loads: list[int], slots: int = 2, **settings: object):  # type: ignore[no-untyped-def]
    """Workers that hold one request of these sizes each (0: none)."""
    scheduler = a_scheduler(policy, workers=len(loads), slots=slots, **settings)
    hold(scheduler, [[load] if load else [] for load in loads])
    return scheduler


def test_stage_1_takes_the_largest_request_that_fits_the_margin_of_the_worker_with_most_slots() -> None:
    scheduler = with_loads("br_0", [1000, 400], s_greedy=0, slack_placement="free_slots")
    pool_all(scheduler, {"small": 100, "fits": 600, "over": 700, "huge": 5000})
    first = scheduler.admit(0.0)[0]
    # equal slots: d1 has the smaller load; margin 600; F(600) = 600, F(700) = 700 - 2 * 100 = 500
    assert (first.request, first.worker, first.stage, first.score) == ("fits", "d1", 1, 600.0)


def test_overflow_costs_g_times_so_the_smallest_overflow_wins_when_nothing_fits() -> None:
    scheduler = with_loads("br_0", [1000, 900], s_greedy=0, slack_placement="free_slots", slots=2)
    pool_all(scheduler, {"a": 500, "b": 300, "c": 400})
    assert admitted(scheduler)[0] == ("b", "d1")


def test_stage_2_picks_the_subset_that_fills_the_margin() -> None:
    scheduler = with_loads("br_0", [1000, 0], slots=4, s_greedy=99, slack_placement="free_slots")
    for index in range(3):  # d0 is full
        scheduler.set_worker_state("d1", WorkerState.DOWN, 0.0)
        pool_all(scheduler, {f"filler{index}": 1})
        scheduler.admit(0.0)
    scheduler.set_worker_state("d1", WorkerState.UP, 0.0)
    pool_all(scheduler, {"a": 700, "b": 400, "c": 603, "d": 300})
    first = [action for action in scheduler.admit(0.0) if action.score == 1003.0]
    assert [(action.request, action.stage) for action in first] == [("b", 2), ("c", 2)]


def test_the_guard_admits_the_least_bad_request_of_the_pool_or_of_the_head() -> None:
    for guard, expected in (("pool", "small"), ("head", "mid")):
        scheduler = with_loads("br_0", [100, 100], slots=2, s_greedy=9, r_max=2, guard=guard)
        pool_all(scheduler, {"big": 900, "mid": 500, "x": 800, "y": 800, "z": 800, "small": 10})
        scheduler.set_worker_state("d1", WorkerState.DRAINING, 0.0)
        assert admitted(scheduler) == [(expected, "d0")]


def test_an_overdue_request_goes_first_and_large_prompts_become_overdue_later() -> None:
    for now, first in ((11.0, "fits"), (61.0, "large")):
        scheduler = with_loads("br_0", [1000, 0], slots=2, s_greedy=0, max_wait_s=10.0, slack_placement="free_slots")
        pool_all(scheduler, {"large": 30_000}, now=0.0)
        pool_all(scheduler, {"fits": 1000, "tiny": 10, "more": 20}, now=now)
        assert admitted(scheduler, now)[0] == (first, "d1")


def test_no_patience_outlasts_three_quarters_of_the_pools_ttl() -> None:
    scheduler = a_scheduler("br_0", config=SchedulerConfig(pool_ttl_s=20.0), max_wait_s=10.0)
    pool_all(scheduler, {str(index): 10 for index in range(60)} | {"huge": 100_000})
    assert {tracker.id: tracker.overdue_s for tracker in scheduler.snapshot.pool}["huge"] == 15.0


def test_in_slack_the_largest_prompts_go_to_the_lightest_workers() -> None:
    scheduler = with_loads("br_0", [500, 0, 0], slots=8)
    pool_all(scheduler, {"a": 10, "b": 300, "c": 200})
    assert admitted(scheduler) == [("b", "d1"), ("c", "d2"), ("a", "d2")]


def test_br_h_sees_that_a_load_is_about_to_leave() -> None:
    """d0 is the lighter one now, but d1's load ends within the window: over the horizon d1 has more room."""
    scheduler = a_scheduler("br_h", workers=3, slots=2, horizon_steps=10, gamma=1.0, beta=3.0, s_greedy=0)
    for index, (load, remaining) in enumerate([(700, 10.0), (900, 1.0), (1000, 10.0)]):
        for other in range(3):
            scheduler.set_worker_state(f"d{other}", WorkerState.UP if other == index else WorkerState.DOWN, 0.0)
        scheduler.submit_prefilled(a_request(f"held{index}", load), 0.0, remaining)
        scheduler.admit(0.0)
    for index in range(3):
        scheduler.set_worker_state(f"d{index}", WorkerState.UP, 0.0)
    loads = scheduler.snapshot.projection.loads()
    assert loads[1].tolist() == [900, 901] + [0] * 9
    policy = scheduler.policy
    margins = policy.margins(scheduler.snapshot)  # type: ignore[attr-defined]
    scores = [margins.score(worker)(500) for worker in scheduler.snapshot.workers]
    assert scores[1] > scores[0] > scores[2]


def test_br_h_without_lookahead_is_br_0() -> None:
    """INV-9 on one busy run; the property test covers many."""
    runs = []
    for policy, settings in (("br_0", {}), ("br_h", {"horizon_steps": 0, "alpha": 1.0, "beta": 3.0})):
        scheduler = a_scheduler(policy, workers=3, slots=4, config=SchedulerConfig(), s_greedy=2, **settings)
        taken: list[tuple[str, str]] = []
        for wave in range(12):
            pool_all(scheduler, {f"{wave}-{k}": 37 * (wave * 7 + k * k) % 501 + 1 for k in range(5)}, now=float(wave))
            taken += admitted(scheduler, float(wave))
            for tracker in list(scheduler.snapshot.decoding())[::3]:
                scheduler.finish(tracker.id, Outcome.FINISHED, float(wave))
        runs.append(taken)
    assert runs[0] == runs[1]
    assert len(runs[0]) > 20


@pytest.mark.parametrize(("policy", "settings"), [("br_0", {}), ("br_h", {"horizon_steps": 1, "gamma": 1e-9})])
@pytest.mark.parametrize("state", [WorkerState.UP, WorkerState.DRAINING, WorkerState.DOWN])
def test_the_penalty_of_br_0_counts_the_workers_in_the_barrier(
    policy: str, settings: dict[str, float], state: WorkerState
) -> None:
    """On d1, with a margin of 100 tokens, 200 tokens score 200 - G * 100."""
    knobs = BalanceRouteParams(0, 1.0, None, 0.86, 0, 4, "fifo", "free_slots", "pool", math.inf, False)
    knobs = replace(knobs, **settings)  # type: ignore[arg-type]
    scheduler = with_loads("br_0", [1000, 900, 500], slots=2)
    scheduler.snapshot.horizon_steps = knobs.horizon_steps
    scheduler.snapshot.projection = scheduler.snapshot.recount_projection()
    scheduler.policy = BalanceRoute(policy, knobs)
    scheduler.set_worker_state("d0", WorkerState.UP, 0.0)
    scheduler.set_worker_state("d2", state, 0.0)
    in_barrier = 2 if state is WorkerState.DOWN else 3
    margins = scheduler.policy.margins(scheduler.snapshot)
    assert margins.score(scheduler.snapshot.workers[1])(200) == pytest.approx(200 - in_barrier * 100, abs=1e-3)


def test_the_penalty_of_the_bypass_counts_the_workers_in_the_barrier() -> None:
    scheduler = with_loads("br_0", [1000, 900, 500], slots=2)
    scheduler.policy = PoolBypass(1.0, None, 4)
    scheduler.set_worker_state("d0", WorkerState.DRAINING, 0.0)
    scheduler.set_worker_state("d2", WorkerState.DOWN, 0.0)
    pool_all(scheduler, {"r": 200})
    (admission,) = scheduler.admit(0.0)
    assert (admission.worker, admission.score) == ("d1", 200 - 2 * 100)

"""The load that decisions balance is the engine's: slowdown * (tokens + c * requests), for every policy."""

from dataclasses import replace

import pytest

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.types import Outcome, RequestSpec, WorkerState
from balanceroute.simulator import Replay, Setting, at_load
from balanceroute.traces import generate_trace
from tests.unit.core.builders import a_scheduler, admitted, hold, pool_all

BY_LOAD = ["br_0", "br_h", "target_fit", "level_fit", "pool_fifo", "least_kv"]
ONE_SLOW = Setting(n_workers=4, slots=16, pool=32, slowdowns=(1.0, 1.0, 1.0, 3.0), request_tokens=13_400)
WAITING = {"a": 900, "b": 150, "c": 2400, "d": 40, "e": 700, "f": 1300}


def loaded(
    policy: str, held: list[list[int]], *, each: int = 0, slowdowns: tuple[float, ...] = (), **settings: object
) -> Scheduler:
    """Workers of six slots that hold requests of these sizes; `each` is c."""
    workers = {"workers": len(held), "slots": 6, "slowdowns": slowdowns, "request_tokens": each}
    scheduler = a_scheduler(policy, **workers, **settings)  # type: ignore[arg-type]
    hold(scheduler, held)
    return scheduler


HELD = [[500] * 4, [100] * 5, [3000, 20, 10, 400]]


@pytest.mark.parametrize(
    ("policy", "bypass"), [*((name, False) for name in BY_LOAD if name != "level_fit"), ("br_0", True)]
)
def test_request_tokens_decide_like_prompts_longer_by_as_many_tokens(policy: str, bypass: bool) -> None:
    each = 5000
    charged = loaded(policy, HELD, each=each, pool_bypass=bypass)
    longer = loaded(policy, [[size + each for size in sizes] for sizes in HELD], pool_bypass=bypass)
    free = loaded(policy, HELD, pool_bypass=bypass)
    pool_all(charged, WAITING)
    pool_all(free, WAITING)
    pool_all(longer, {name: size + each for name, size in WAITING.items()})
    decided = admitted(charged)
    assert decided == admitted(longer)
    assert decided != admitted(free), "c matters in this situation"


@pytest.mark.parametrize(("policy", "max_wait_s"), [("target_fit", 100.0), ("level_fit", 1500.0)])
@pytest.mark.parametrize(("each", "first"), [(0, "fits"), (50_000, "old")])
def test_request_tokens_make_a_wait_weigh_more_and_a_misfit_less(
    policy: str, max_wait_s: float, each: int, first: str
) -> None:
    """d1 has room for 3,000 up to the others; the old request is 10,000 too large for it."""
    held = [[1000] * 6, [500] * 5, [1000] * 6]
    scheduler = loaded(policy, held, each=each, max_wait_s=max_wait_s)
    scheduler.submit_prefilled(RequestSpec("old", 13_000), 0.0)
    pool_all(scheduler, {"fits": 3000}, now=60.0)
    scheduler.snapshot.means.prompt_tokens, scheduler.snapshot.means.wait_s = 1000.0, 0.0
    assert admitted(scheduler, 60.0) == [(first, "d1")]


@pytest.mark.parametrize("policy", [*BY_LOAD, "join_shortest_queue", "power_of_two"])
def test_a_slower_worker_gets_less(policy: str) -> None:
    """Two workers with the same requests; the first takes twice the time for each token."""
    scheduler = loaded(policy, [[500, 500], [500, 500]], slowdowns=(2.0, 1.0))
    pool_all(scheduler, {"a": 300})
    assert admitted(scheduler) == [("a", "d1")]


@pytest.mark.parametrize("policy", ["least_kv", "br_0", "br_h", "target_fit", "level_fit"])
def test_known_slowdowns_equalise_the_step_times(policy: str) -> None:
    trace = generate_trace("capped", rows=400, seed=3).with_lengths(1.0, 0.1)
    setting = Setting(n_workers=4, slots=16, pool=32, slowdowns=(1.0, 1.0, 1.0, 2.0))
    aware, unaware = (
        Replay(trace, PolicySettings(policy=policy), replace(setting, cost_aware=known)).run().figures.load_spread_mean
        for known in (True, False)
    )
    assert aware < 0.7 * unaware


@pytest.mark.parametrize("waiting", [1, 3, 5], ids=["slots for more", "for all", "for fewer"])
def test_level_fit_keeps_slots_of_a_slower_worker_free_where_a_request_costs_more_than_it_serves(waiting: int) -> None:
    """All have a load of 6,600. The next request there would make a step a third longer for a sixteenth more tokens."""
    scheduler = loaded("level_fit", [[100] * 6, [100] * 6, [100] * 3], each=1000, slowdowns=(1.0, 1.0, 2.0))
    pool_all(scheduler, {f"w{number}": 100 for number in range(waiting)})
    assert admitted(scheduler, 60.0) == []
    scheduler.finish("d1.0", Outcome.FINISHED, 60.0)
    assert admitted(scheduler, 60.0) == [("w0", "d1")], "it waits for the faster ones"
    scheduler.finish("d2.0", Outcome.FINISHED, 60.0)
    assert len(admitted(scheduler, 60.0)) == min(1, waiting - 1)


def test_nobody_is_admitted_while_all_workers_of_different_speeds_drain() -> None:
    scheduler = loaded("level_fit", [[100], [100]], each=1000, slowdowns=(1.0, 2.0))
    for name in ("d0", "d1"):
        scheduler.set_worker_state(name, WorkerState.DRAINING, 0.0)
    pool_all(scheduler, {"a": 100})
    assert admitted(scheduler) == []


def test_a_slower_worker_that_is_above_the_others_gets_small_requests_where_these_cost_nothing_beside_tokens() -> None:
    scheduler = loaded("level_fit", [[100] * 6, [100] * 6, [100] * 3], slowdowns=(1.0, 1.0, 2.0))
    pool_all(scheduler, {f"w{number}": 100 for number in range(5)})
    assert [worker for _, worker in admitted(scheduler, 60.0)] == ["d2"] * 3


def test_level_fit_serves_more_than_least_kv_where_a_worker_is_slow_and_requests_cost_more_than_prompts() -> None:
    trace = at_load(generate_trace("capped", rows=400, seed=3).with_lengths(1.0, 0.05), 1.2, ONE_SLOW)
    level_fit, least_kv = (
        Replay(trace, PolicySettings(policy=policy), ONE_SLOW).run().figures for policy in ("level_fit", "least_kv")
    )
    assert level_fit.throughput_tok_s > 1.1 * least_kv.throughput_tok_s
    assert level_fit.makespan_s < least_kv.makespan_s


def test_request_tokens_are_part_of_the_step_load() -> None:
    trace = generate_trace("capped", rows=4).with_lengths(0.01, 0.01)
    free = Replay(trace, PolicySettings(), Setting(n_workers=1, step_cost_s=0.001, step_overhead_s=1.0)).run()
    charged = Replay(
        trace, PolicySettings(), Setting(n_workers=1, step_cost_s=0.001, step_overhead_s=1.0, request_tokens=1000)
    ).run()
    assert charged.figures.step_time_mean_s >= free.figures.step_time_mean_s + 0.9
    assert charged.figures.load_spread_mean == 0

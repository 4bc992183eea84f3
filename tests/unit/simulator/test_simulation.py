"""The step simulator: by hand, against a plain implementation of its semantics, and option by option."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import balanceroute.simulator
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.errors import ConfigError, InputError
from balanceroute.prediction import Forecaster, build_predictor
from balanceroute.simulator import Failure, Figures, Outcome, Replay, Setting, Stopped
from balanceroute.simulator.groups import Group
from balanceroute.simulator.history import fitted
from balanceroute.simulator.oracle import Forecast, OracleForecast, PredictorForecast, TrueLengths
from balanceroute.simulator.simulation import Simulation
from balanceroute.traces import Trace, generate_trace

TIMED = {"decision_p50_us", "decision_p99_us"}  # wall clock: the only figures that differ between equal runs


EVERY_OPTION = Setting(
    n_workers=4,
    slots=8,
    pool=16,
    step_cost_s=1e-5,
    prefillers=2,
    transfer_steps=3,
    telemetry_lag_steps=2,
    kv_capacity_tokens=8000,
    slowdowns=(1.0, 1.0, 1.2, 1.0),
    failures=(Failure(0, 3.0, 6.0), Failure(2, 4.0)),
)


def a_trace(rows: list[tuple[float, int, int]]) -> Trace:
    arrival, prompt, output = zip(*rows, strict=True)
    return Trace(np.array(arrival, dtype=float), np.array(prompt), np.array(output), np.array([""] * len(rows)))


def a_setting(**changes: object) -> Setting:
    return replace(
        Setting(n_workers=2, slots=2, pool=8, step_cost_s=0.001, step_overhead_s=1.0),
        **changes,  # type: ignore[arg-type]
    )


def run(trace: Trace, setting: Setting, policy: str = "pool_fifo", **more: object) -> Outcome:
    knobs = PolicySettings(policy=policy, max_wait_s=math.inf)
    return Replay(trace, knobs, setting, with_loads=True, check_invariants=True, **more).run()  # type: ignore[arg-type]


def figures_of(outcome: Outcome) -> dict[str, float]:
    return {name: getattr(outcome.figures, name) for name in Figures.__dataclass_fields__ if name not in TIMED}


@pytest.mark.parametrize(
    ("rows", "steps"),
    [([(0.0, 100, 3), (0.0, 100, 2 * 10**9)], "2,000,000,000"), ([(0.0, 100, 10**7)] * 9, "22,500,000")],
    ids=["one long answer", "many for few slots"],
)
def test_answers_that_would_be_simulated_for_hours_are_refused(rows: list[tuple[float, int, int]], steps: str) -> None:
    with pytest.raises(InputError, match=f"take {steps} steps on this cluster at least; accepted are 20,000,000"):
        run(a_trace(rows), a_setting())


def test_two_requests_take_the_times_computed_by_hand() -> None:
    # step 0: both run, loads 100 and 50; step 1: 101 and 51; the second is done; step 2: 102 and 0
    outcome = run(a_trace([(0.0, 100, 3), (0.0, 50, 2)]), a_setting())
    assert outcome.loads.tolist() == [[100, 50], [101, 51], [102, 0]]
    durations = [1.1, 1.101, 1.102]
    assert outcome.step_start_s.tolist() == pytest.approx([0.0, 1.1, 2.201])
    assert outcome.figures.makespan_s == pytest.approx(sum(durations))
    assert outcome.tpot_s.tolist() == pytest.approx([sum(durations) / 3, sum(durations[:2]) / 2])
    # 30 % and the last but one are admitted on step 0, which alone is the window
    assert outcome.figures.load_spread_mean == 50
    assert outcome.figures.excess_mean == 25
    assert outcome.figures.imbalance_mean == 50
    assert outcome.figures.throughput_tok_s == pytest.approx(2 / 1.1)
    assert outcome.figures.balance == pytest.approx(2 / 1.1 * (0.001 * 75 + 1.0) / 4)


def test_a_request_that_arrives_during_a_step_is_ready_at_the_next_one() -> None:
    outcome = run(a_trace([(0.0, 10, 1), (0.5, 10, 1)]), a_setting())
    assert outcome.step_start_s.tolist() == pytest.approx([0.0, 1.01])
    assert outcome.wait_s.tolist() == [0.0, 0.0]


def test_time_jumps_to_the_next_arrival_when_nothing_runs() -> None:
    outcome = run(a_trace([(5.0, 10, 1), (100.0, 10, 1)]), a_setting())
    assert outcome.step_start_s.tolist() == [5.0, 100.0]


def test_a_slot_is_free_again_on_the_step_after_the_last_token() -> None:
    outcome = run(a_trace([(0.0, 10, 2)] * 3), a_setting(n_workers=1))
    assert outcome.loads[:, 0].tolist() == [20, 22, 10, 11]
    assert outcome.wait_s.tolist() == pytest.approx([0, 0, 1.020 + 1.022])


def test_no_more_than_the_pool_enter() -> None:
    # one slot and room for one to wait: each is ready one step after the one before took the slot
    outcome = run(a_trace([(0.0, 10, 2)] * 3), a_setting(n_workers=1, slots=1, pool=1))
    assert outcome.wait_s.tolist() == pytest.approx([0.0, 1.011, 1.011])


# -- against a plain implementation ---------------------------------------------------------------------------


def naive(trace: Trace, setting: Setting, policy: str) -> tuple[list[list[int]], list[float], list[float]]:
    """The semantics in the plainest way: loads of every step, waits, times per token."""
    rows = list(zip(trace.arrival_s, trace.prompt_tokens, trace.output_tokens, strict=True))
    n, n_workers = len(rows), setting.n_workers
    ready, admitted, finished = [0.0] * n, [0.0] * n, [0.0] * n
    active: list[list[list[int]]] = [[] for _ in range(n_workers)]  # [request, kv, left]
    queues: list[list[int]] = [[] for _ in range(n_workers)]
    pool: list[int] = []
    t, arrived, gone, turn, series = 0.0, 0, 0, 0, []

    def load(g: int) -> int:
        return sum(kv for _, kv, _ in active[g])

    while gone < n:
        while arrived < n and rows[arrived][0] <= t and len(pool) + sum(map(len, queues)) < setting.pool:
            ready[arrived] = t
            pool.append(arrived)
            arrived += 1
        if policy == "pool_fifo":
            while pool and any(len(worker) < setting.slots for worker in active):
                g = min((g for g in range(n_workers) if len(active[g]) < setting.slots), key=load)
                request = pool.pop(0)
                admitted[request] = t
                active[g].append([request, int(rows[request][1]), int(rows[request][2])])
        else:
            while pool:
                request = pool.pop(0)
                if policy == "round_robin":
                    g, turn = turn % n_workers, turn + 1
                else:
                    g = min(range(n_workers), key=lambda g: load(g) + sum(int(rows[r][1]) for r in queues[g]))
                queues[g].append(request)
            for g in range(n_workers):
                while queues[g] and len(active[g]) < setting.slots:
                    request = queues[g].pop(0)
                    admitted[request] = t
                    active[g].append([request, int(rows[request][1]), int(rows[request][2])])
        if not any(active):
            t = float(rows[arrived][0])
            continue
        loads = [load(g) for g in range(n_workers)]
        series.append(loads)
        t += setting.step_cost_s * max(loads) + setting.step_overhead_s
        for g in range(n_workers):
            for entry in active[g]:
                entry[1] += 1
                entry[2] -= 1
                if entry[2] == 0:
                    finished[entry[0]] = t
                    gone += 1
            active[g] = [entry for entry in active[g] if entry[2]]
    waits = [a - r for a, r in zip(admitted, ready, strict=True)]
    tpots = [(f - a) / int(row[2]) for f, a, row in zip(finished, admitted, rows, strict=True)]
    return series, waits, tpots


@pytest.mark.parametrize("policy", ["pool_fifo", "least_kv", "round_robin"])
@pytest.mark.parametrize("seed", range(4))
def test_the_simulator_agrees_with_the_plain_implementation(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 60
    trace = Trace(np.sort(rng.uniform(0, 120, n)), rng.integers(1, 400, n), rng.integers(1, 40, n), np.array([""] * n))
    setting = a_setting(n_workers=3, slots=2, pool=5)
    series, waits, tpots = naive(trace, setting, policy)
    outcome = run(trace, setting, policy)
    assert outcome.loads.tolist() == series
    assert outcome.wait_s.tolist() == pytest.approx(waits)
    assert outcome.tpot_s.tolist() == pytest.approx(tpots)


# -- options --------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_figures_and_loads() -> None:
    trace = generate_trace("heavy_tailed", rows=300)
    knobs = PolicySettings(policy="power_of_two", seed=7)
    one, other = (Replay(trace, knobs, with_loads=True).run() for _ in range(2))
    assert figures_of(one) == figures_of(other)
    assert one.loads.tobytes() == other.loads.tobytes()
    assert figures_of(one) != figures_of(Replay(trace, replace(knobs, seed=8)).run())


def test_a_kv_transfer_adds_no_load_until_it_is_over_and_the_request_waits_meanwhile() -> None:
    # one worker of two slots: the second request arrives while the first runs
    outcome = run(a_trace([(0.0, 100, 6), (1.0, 50, 1)]), a_setting(n_workers=1, transfer_steps=2))
    assert outcome.loads[:, 0].tolist() == [0, 0, 100, 101 + 50, 102, 103, 104, 105]
    assert outcome.wait_s.tolist() == pytest.approx([2.0, 2.1])


def test_a_kv_transfer_takes_as_long_as_its_prompt_is_large_if_so_set() -> None:
    setting = a_setting(n_workers=1, transfer_steps=2, transfers_by_size=True)
    outcome = run(a_trace([(0.0, 100, 6), (0.0, 300, 1)]), setting)  # 1 and 3 steps
    assert outcome.loads[:, 0].tolist() == [0, 100, 101, 102 + 300, 103, 104, 105]


def test_a_slower_worker_sets_the_pace_of_the_barrier() -> None:
    outcome = run(a_trace([(0.0, 100, 1), (0.0, 100, 1)]), a_setting(slowdowns=(1.0, 1.5)))
    assert outcome.figures.makespan_s == pytest.approx(1.0 + 0.001 * 150)


def test_a_prefill_tier_computes_one_prompt_at_a_time() -> None:
    outcome = run(a_trace([(0.0, 100, 1), (0.0, 100, 1)]), a_setting(prefillers=1, prefill_tokens_per_s=10.0))
    assert outcome.step_start_s.tolist() == [10.0, 20.0]
    assert outcome.wait_s.tolist() == [0.0, 0.0]


def test_what_arrives_while_the_pool_is_full_is_prefilled_from_when_there_is_room() -> None:
    setting = a_setting(n_workers=1, slots=1, pool=1, prefillers=1, prefill_tokens_per_s=10.0)
    outcome = run(a_trace([(0.0, 10, 5)] * 3), setting)
    second, third = outcome.step_start_s[5], outcome.step_start_s[10]  # when they begin to run
    assert outcome.wait_s[2] == pytest.approx(third - second - 1.0), "its prefill of 1 s begins as the second leaves"


def test_each_group_has_the_speeds_of_its_own_workers() -> None:
    setting = a_setting(barrier_groups=2, slowdowns=(1.0, 1.5))
    outcome = run(a_trace([(0.0, 100, 1), (0.0, 100, 1)]), setting)
    assert outcome.figures.makespan_s == pytest.approx(1.0 + 0.001 * 150)


def test_two_prefillers_work_side_by_side() -> None:
    setting = a_setting(prefillers=2, prefill_tokens_per_s=10.0)
    assert run(a_trace([(0.0, 100, 1)] * 2), setting).step_start_s.tolist() == [10.0]


def test_when_kv_memory_is_full_the_last_request_is_recomputed_and_still_gets_all_its_tokens() -> None:
    outcome = run(a_trace([(0.0, 10, 9), (0.0, 10, 9)]), a_setting(n_workers=1, kv_capacity_tokens=30))
    # 20, 22, 24, 26, 28 fit with their next tokens; then one is taken off and comes back behind the other
    assert outcome.loads[:5, 0].tolist() == [20, 22, 24, 26, 28]
    assert outcome.figures.recomputed == 1
    assert outcome.loads[5:, 0].tolist() == [15, 16, 17, 18, 15, 16, 17, 18]
    assert outcome.loads.max() <= 30


def test_a_capacity_that_a_single_request_exceeds_is_refused() -> None:
    with pytest.raises(InputError, match="the largest request needs 120"):
        run(a_trace([(0.0, 100, 20)]), a_setting(kv_capacity_tokens=110))


def test_requests_in_transfer_to_a_worker_take_memory_from_its_running_ones() -> None:
    setting = a_setting(n_workers=1, kv_capacity_tokens=100, transfer_steps=8)
    outcome = run(a_trace([(0.0, 50, 45), (10.0, 40, 5)]), setting)
    # the second one begins its transfer beside 51 tokens, and the first one is taken off when it has 59
    assert outcome.loads.max() + 2 <= 100
    assert outcome.figures.recomputed == 1
    assert outcome.wait_s[1] < 10 and np.isfinite(outcome.tpot_s).all()


@pytest.mark.parametrize("tokens", [1, 20])
def test_the_capacity_must_fit_all_draft_tokens_of_a_step(tokens: int) -> None:
    trace, setting = a_trace([(0.0, 100, tokens)]), a_setting(draft_tokens=3, kv_capacity_tokens=100 + tokens)
    with pytest.raises(InputError, match=f"the largest request needs {103 + tokens}"):
        run(trace, setting)
    outcome = run(trace, replace(setting, kv_capacity_tokens=103 + tokens))
    assert outcome.figures.recomputed == 0


def test_requests_of_a_lost_worker_finish_elsewhere_and_it_returns_empty() -> None:
    trace = a_trace([(0.0, 100, 20), (0.0, 100, 20), (60.0, 5, 1), (60.0, 5, 1)])
    outcome = run(trace, a_setting(failures=(Failure(1, 5.0, 50.0),)))
    assert outcome.figures.recomputed == 1
    assert outcome.loads[:6, 1].tolist() == [100, 101, 102, 103, 104, 0]
    assert outcome.loads[5, 0] == 105 + 105  # both on the survivor, with the tokens they had
    assert outcome.loads[-1].tolist() == [5, 5]
    assert (outcome.tpot_s > 0).all()


@pytest.mark.parametrize("policy", ["pool_fifo", "least_kv"])
def test_a_permanent_loss_of_every_worker_is_refused_with_that_reason(policy: str) -> None:
    setting = a_setting(failures=(Failure(0, 3.0, 4.0), Failure(0, 5.0), Failure(1, 2.0)))
    with pytest.raises(InputError, match=r"^failures: no worker is left, and none comes back: at .* 5 requests wait"):
        run(a_trace([(0.0, 100, 50)] * 5), setting, policy)


@pytest.mark.parametrize("policy", ["round_robin", "pool_fifo", "level_fit"])
def test_requests_that_arrive_while_no_decode_worker_is_up_enter_when_one_is_back(policy: str) -> None:
    setting = a_setting(n_workers=1, prefillers=1, failures=(Failure(0, 5.0, 30.0),))
    outcome = run(a_trace([(0.0, 100, 10), (12.0, 100, 3), (40.0, 100, 3)]), setting, policy)
    assert np.isfinite(outcome.tpot_s).all()
    with pytest.raises(InputError, match=r"^failures: no worker is left, and none comes back: at .* 3 requests wait"):
        run(a_trace([(0.0, 100, 10), (12.0, 100, 3), (40.0, 100, 3)]), replace(setting, failures=(Failure(0, 5.0),)))


@pytest.mark.parametrize("policy", ["join_shortest_queue", "least_kv", "pool_fifo", "br_0", "target_fit"])
@pytest.mark.parametrize("option", [{"kv_capacity_tokens": 10**9}, {"failures": (Failure(0, 1e9),)}])
def test_an_option_that_never_matters_changes_no_figure(policy: str, option: dict[str, object]) -> None:
    trace = generate_trace("capped", rows=400, seed=1).with_lengths(0.1, 0.1)
    setting = Setting(n_workers=2, slots=4, pool=8)
    assert figures_of(run(trace, replace(setting, **option), policy)) == figures_of(run(trace, setting, policy))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["join_shortest_queue", "pool_fifo"])
def test_no_more_requests_wait_than_the_pool_allows_prefilled_or_not(policy: str) -> None:
    trace = generate_trace("capped", rows=400, seed=1).with_lengths(0.1, 0.1)
    setting = Setting(n_workers=2, slots=4, pool=8, prefillers=2, prefill_tokens_per_s=1e5)
    most = 0

    class Watched(Simulation):
        def fill(self, group: Group) -> None:
            nonlocal most
            super().fill(group)
            most = max(most, self.arrivals.waiting)

    lengths = TrueLengths(trace)
    Watched(trace, setting, make_policy(PolicySettings(policy=policy)), lengths, Forecast()).run()
    assert most == 8


@pytest.mark.parametrize("spans", [((5.0, 12.0), (8.0, 20.0)), ((5.0, 12.0), (12.0, 20.0)), ((5.0, 20.0), (8.0, 12.0))])
def test_failures_of_one_worker_that_overlap_are_one(spans: tuple[tuple[float, float], ...]) -> None:
    trace = a_trace([(0.0, 100, 40)] * 4)
    apart = run(trace, a_setting(failures=tuple(Failure(1, start, end) for start, end in spans)))
    assert figures_of(apart) == figures_of(run(trace, a_setting(failures=(Failure(1, 5.0, 20.0),))))


def test_a_worker_is_back_in_time_whatever_fails_later() -> None:
    trace, one = a_trace([(0.0, 100, 40)] * 4), Failure(1, 5.0, 12.0)
    outcome = run(trace, a_setting(failures=(one, Failure(0, 1e6))))
    assert figures_of(outcome) == figures_of(run(trace, a_setting(failures=(one,))))


def test_a_worker_that_is_lost_is_no_part_of_the_figures() -> None:
    trace = a_trace([(1.0, 100, 40), (1.0, 300, 20), (2.0, 50, 9)])
    lost, alone = run(trace, a_setting(failures=(Failure(1, 0.0),))), run(trace, a_setting(n_workers=1))
    assert figures_of(lost) == figures_of(alone)


def test_loads_of_workers_of_different_speed_count_in_time() -> None:
    # the fast worker holds 200 tokens, the slow one 100: both take as long, and no router could do better
    outcome = run(a_trace([(0.0, 200, 3), (0.0, 100, 3)]), a_setting(slots=1, slowdowns=(0.5, 1.0)), "target_fit")
    assert outcome.loads[0].tolist() == [200, 100]
    assert outcome.figures.load_spread_mean == outcome.figures.excess_mean == 0
    assert outcome.figures.balance == pytest.approx(1.0)


def test_a_telemetry_lag_frees_slots_late() -> None:
    trace = a_trace([(0.0, 10, 2)] * 2)
    prompt = run(trace, a_setting(n_workers=1, slots=1))
    late = run(trace, a_setting(n_workers=1, slots=1, telemetry_lag_steps=3))
    assert prompt.figures.steps == late.figures.steps == 4
    # nothing runs between the two requests, so the router catches up at once; with work beside it, it does not
    beside = a_trace([(0.0, 10, 9), (0.0, 10, 2), (0.0, 10, 2)])
    waits = [run(beside, a_setting(n_workers=1, telemetry_lag_steps=lag)).wait_s[2] for lag in (0, 3)]
    assert waits[1] - waits[0] == pytest.approx(3 * 1.01, abs=0.05)


@pytest.mark.parametrize("policy", ["br_0", "br_h"])
@pytest.mark.parametrize("predictor", ["none", "oracle", "survival", "exact_match"])
def test_every_request_is_served_with_every_option_at_once(policy: str, predictor: str) -> None:
    trace = generate_trace("heavy_tailed", rows=150, seed=2).with_lengths(0.05, 0.05)
    outcome = Replay(
        trace, PolicySettings(policy=policy), EVERY_OPTION, predictor, train=trace, check_invariants=True
    ).run()
    assert outcome.figures.admitted == 150
    assert np.isfinite(outcome.tpot_s).all()
    assert (outcome.wait_s >= 0.0).all(), "from when it was ready first, whatever is recomputed later"


@pytest.mark.parametrize(
    ("predictor", "reason"),
    [("learned", "needs a trace of the past"), ("crystal", "'crystal' is unknown; accepted are none, oracle")],
)
def test_a_predictor_that_cannot_work_is_refused(predictor: str, reason: str) -> None:
    with pytest.raises((InputError, ConfigError), match=reason):
        run(a_trace([(0.0, 1, 1)]), a_setting(), predictor=predictor)


@pytest.mark.parametrize("kind", ["survival", "exact_match"])
def test_a_predictor_without_a_history_learns_from_finished_and_recomputed_requests(kind: str) -> None:
    trace = a_trace([(0.1 * n, 100, 30) for n in range(60)])
    setting = a_setting(n_workers=2, slots=4, pool=8, kv_capacity_tokens=500, failures=(Failure(0, 1.0, 2.0),))
    lengths, horizon = TrueLengths(trace), 20
    forecaster = Forecaster(build_predictor(kind, horizon), horizon)
    assert forecaster.initial(100) == 20.0  # an anchor: nothing is known
    policy = make_policy(PolicySettings(policy="br_h", horizon_steps=horizon))

    outcome = Simulation(trace, setting, policy, lengths, PredictorForecast(forecaster, learns=True)).run()

    assert outcome.figures.recomputed > 0
    seen = forecaster.predictor.ring.take()  # type: ignore[attr-defined]
    assert set(zip(seen.prompt_tokens.tolist(), seen.output_tokens.tolist(), strict=True)) == {(100, 30)}
    assert len(seen) == 60
    assert forecaster.initial(100, age_tokens=15) == 14.0  # 15 steps to go, the last of them 14 ahead


class Looking(Simulation):
    """Compares, as every step begins, the loads that the router projects with those that there will be."""

    def __init__(self, trace: Trace, setting: Setting, horizon: int, forecast: Forecast) -> None:
        policy = make_policy(PolicySettings(policy="br_h", horizon_steps=horizon))
        super().__init__(trace, setting, policy, TrueLengths(trace), forecast, check_invariants=True)
        self.steps_ahead = np.arange(horizon + 1)
        self.looks = 0

    def deliver_idle(self) -> None:
        super().deliver_idle()
        expected = np.zeros((len(self.scheduler.snapshot.workers), len(self.steps_ahead)), dtype=int)
        for worker in self.scheduler.snapshot.workers:
            for tracker in worker.active.values():
                # one that has no room on its worker yet counts as if it had
                to_go = self.lengths.tokens[int(tracker.id)] - tracker.age_tokens
                expected[worker.index] += np.where(self.steps_ahead < to_go, tracker.kv_tokens + self.steps_ahead, 0)
        assert self.scheduler.snapshot.projection.loads().tolist() == expected.tolist()
        self.looks += 1


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("horizon", [1, 2, 3, 20])
def test_an_oracle_projects_the_true_future_loads_at_every_step(horizon: int, lag: int) -> None:
    rng = np.random.default_rng(3)
    trace = a_trace([(0.3 * n, 100 + n, int(o)) for n, o in enumerate(rng.integers(1, 50, 60))])
    setting = a_setting(n_workers=2, slots=4, pool=8, kv_capacity_tokens=450, failures=(Failure(0, 9.0, 12.0),))
    setting = replace(setting, telemetry_lag_steps=lag)
    looking = Looking(trace, setting, horizon, OracleForecast(TrueLengths(trace), horizon))

    assert looking.run().figures.recomputed > 0
    assert looking.looks > 100


@pytest.mark.parametrize("horizon", [1, 20])
def test_an_oracle_projects_the_true_future_loads_of_requests_that_the_engine_pauses(horizon: int) -> None:
    trace = generate_trace("heavy_tailed", rows=60, seed=4).with_lengths(1.0, 0.05)
    setting = Setting(n_workers=3, slots=6, pool=24, engine_balancer_blocks=5.0)
    looking = Looking(trace, setting, horizon, OracleForecast(TrueLengths(trace), horizon))

    assert looking.run().figures.pauses > 5
    assert looking.looks > 100


@pytest.mark.parametrize("kind", ["survival", "exact_match"])
@pytest.mark.parametrize("tokens", [1, 5, 20, 30])
def test_a_predictor_projects_the_true_loads_when_all_outputs_are_equal(kind: str, tokens: int) -> None:
    """H = 20; where outputs are longer a request is anchored up to its refresh at age 10, when 20 steps are to go."""
    trace, horizon = a_trace([(0.3 * n, 100 + n, tokens) for n in range(60)]), 20
    forecast = PredictorForecast(Forecaster(fitted(kind, trace, horizon), horizon))
    looking = Looking(trace, a_setting(n_workers=2, slots=4, pool=8), horizon, forecast)

    looking.run()
    assert looking.looks > 10


@pytest.mark.parametrize("kind", ["survival", "exact_match"])
@pytest.mark.parametrize("horizon", [0, 1, 4, 20])
def test_oracle_and_predictor_agree_when_all_outputs_are_equal(kind: str, horizon: int) -> None:
    trace = a_trace([(0.0, 100, 5)] * 30)
    predictor = PredictorForecast(Forecaster(fitted(kind, trace, horizon), horizon))
    oracle = OracleForecast(TrueLengths(trace), horizon)

    forecasts = [predictor.initial(0, 100, trace.prompt_key[0], age) for age in range(5)]
    assert forecasts == [oracle.initial(0, 100, trace.prompt_key[0], age) for age in range(5)]
    assert forecasts == [min(4 - age, horizon) for age in range(5)]


def test_a_stopped_replay_reports_its_progress() -> None:
    trace = generate_trace("capped", rows=100, seed=1)
    progress: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        progress.append((done, total))
        if done >= 25:
            raise Stopped

    whole = Replay(trace, PolicySettings(policy="least_kv"), a_setting())
    part, full = whole.run(tell), whole.run()
    assert 25 <= part.finished == progress[-1][0] < 100 == full.finished
    assert np.array_equal(part.step_start_s, full.step_start_s[: part.figures.steps])
    ended = ~np.isnan(part.tpot_s)
    assert np.array_equal(part.tpot_s[ended], full.tpot_s[ended])
    assert not any(math.isnan(value) for value in asdict(part.figures).values())


class AsksForEver(AdmissionPolicy):
    """Admits nobody, and wants to be asked again at once."""

    name = "asks_for_ever"

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        return iter(())

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        return now


@pytest.mark.filterwarnings("error")
def test_a_replay_can_be_stopped_while_nothing_runs() -> None:
    trace = generate_trace("capped", rows=5)

    def tell(done: int, total: int) -> None:
        raise Stopped

    stopped = Replay(trace, PolicySettings(), own_policy=AsksForEver()).run(tell)
    assert (stopped.finished, stopped.figures.steps, stopped.figures.admitted) == (0, 0, 0)
    assert math.isnan(stopped.figures.load_spread_mean) and math.isnan(stopped.figures.throughput_tok_s)


def test_a_policy_that_admits_nobody_and_asks_for_ever_ends_the_replay() -> None:
    job = Replay(a_trace([(0.0, 10, 3), (100.0, 10, 3)]), PolicySettings(), a_setting(), own_policy=AsksForEver())
    with pytest.raises(ConfigError, match=r"nothing runs and 2 requests wait for ever: .* asked 10,000 times"):
        job.run()


class WaitsFiveSeconds(AdmissionPolicy):
    """Admits in waiting order, five seconds after the prefill."""

    name = "waits_five_seconds"

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        while len(snapshot.pool) and self.recheck_s(snapshot, now) <= now:
            yield Choice(snapshot.pool.front[0], snapshot.open_workers()[0], 1, 0.0)

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        return snapshot.pool.front[0].ready_s + 5.0 if len(snapshot.pool) else math.inf


def test_a_policy_that_holds_back_on_an_idle_cluster_is_asked_again_before_the_next_arrival() -> None:
    trace = a_trace([(0.0, 10, 3), (100.0, 10, 3)])
    outcome = Replay(trace, PolicySettings(), a_setting(), own_policy=WaitsFiveSeconds()).run()
    assert outcome.wait_s.tolist() == [5.0, 5.0]


def test_only_the_oracle_reads_output_lengths() -> None:
    """INV-7; `history.py` reads past traces, which are never the one replayed."""
    folder = Path(balanceroute.simulator.__file__).parent
    readers = {path.name for path in folder.glob("*.py") if "output_tokens" in path.read_text()}
    assert readers <= {"oracle.py", "history.py"}


def test_the_window_excludes_filling_and_draining() -> None:
    # one slot, ten requests of three tokens: the third is admitted on step 6, the ninth on step 24
    outcome = run(a_trace([(0.0, 10, 3)] * 10), a_setting(n_workers=1, slots=1, pool=10))
    assert (outcome.window.start, outcome.window.stop) == (6, 24)


def test_paused_requests_stand_still_and_still_get_all_their_tokens() -> None:
    trace = generate_trace("heavy_tailed", rows=120, seed=4).with_lengths(1.0, 0.05)
    setting = Setting(n_workers=3, slots=6, pool=24, engine_balancer_blocks=5.0)
    for policy in ("join_shortest_queue", "level_fit"):
        outcome = Replay(trace, PolicySettings(policy=policy), setting, check_invariants=True).run()
        assert outcome.figures.admitted == 120
        assert np.isfinite(outcome.tpot_s).all()
        assert outcome.figures.pauses > 0
        assert 0 < outcome.figures.pause_p99_s <= outcome.figures.pause_max_s


def test_an_idle_engine_balancer_delays_a_request_by_one_step() -> None:
    trace = a_trace([(0.0, 10, 5), (0.0, 10, 5), (2.0, 10, 5)])
    setting = a_setting(n_workers=2, slots=4)
    plain = run(trace, setting)
    planned = run(trace, replace(setting, engine_balancer_blocks=1000.0))
    assert planned.figures.pauses == 0
    assert (planned.wait_s - plain.wait_s).tolist() == pytest.approx([0.0, 0.0, 1.03], abs=0.1)


def test_what_an_engine_balancer_starts_while_nothing_runs_fits_the_slots() -> None:
    setting = a_setting(n_workers=1, slots=1, engine_balancer_blocks=1000.0)
    outcome = run(a_trace([(0.0, 100, 2)] * 3), setting, "join_shortest_queue")  # which sends all of them at once
    assert max(outcome.loads[:, 0]) == 101

"""Workers that do not share one barrier, and steps of several tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest

from balanceroute.core.knobs import PolicySettings
from balanceroute.errors import InputError
from balanceroute.simulator import Failure, Replay, Setting
from balanceroute.simulator.groups import ranks_by_barrier
from balanceroute.simulator.ranks import DraftingRanks, Ranks
from balanceroute.traces import generate_trace
from tests.unit.simulator.test_simulation import EVERY_OPTION, a_setting, a_trace, figures_of, run


def step_times_s(prompt: int, tokens: int, setting: Setting) -> float:
    """Seconds that a request takes which runs alone."""
    return sum(setting.step_cost_s * (prompt + done) + setting.step_overhead_s for done in range(tokens))


def test_each_barrier_group_steps_independently() -> None:
    trace = a_trace([(0.0, 1000, 3), (0.0, 10, 2)])
    setting = a_setting(n_workers=2, barrier_groups=2)
    outcome = run(trace, setting, "round_robin")
    expected = [step_times_s(1000, 3, setting) / 3, step_times_s(10, 2, setting) / 2]
    assert outcome.tpot_s == pytest.approx(expected)
    assert outcome.figures.steps == 5 and outcome.figures.load_spread_mean == 0


@pytest.mark.parametrize("prefillers", [0, 1])
def test_an_idle_group_is_given_what_waits_outside_a_full_pool_before_another_group_ends_its_step(
    prefillers: int,
) -> None:
    """The pool holds one request, so the second one enters when the first has gone to its worker."""
    trace = a_trace([(0.0, 100, 5), (0.0, 100, 5)])
    setting = Setting(n_workers=2, slots=1, pool=1, barrier_groups=2, step_overhead_s=1.0, prefillers=prefillers)
    outcome = run(trace, setting, "level_fit")
    assert outcome.figures.makespan_s < 5.1


@pytest.mark.parametrize("workers", [2, 5])
def test_independent_workers_behave_like_separate_clusters(workers: int) -> None:
    drawn = generate_trace("heavy_tailed", rows=60, seed=1).with_lengths(0.05, 0.05)
    rows = [(0.0, prompt, output) for prompt, output in zip(drawn.prompt_tokens, drawn.output_tokens, strict=True)]
    trace = a_trace(rows)  # all at once: each goes where its number says
    setting = Setting(n_workers=workers, barrier_groups=workers, slots=3, pool=60, step_cost_s=1e-5)
    outcome = run(trace, setting, "round_robin")
    for worker in range(workers):
        mine = a_trace(rows[worker::workers])
        alone = run(mine, Setting(n_workers=1, slots=3, pool=60, step_cost_s=1e-5), "round_robin")
        assert outcome.tpot_s[worker::workers] == pytest.approx(alone.tpot_s)
        assert outcome.wait_s[worker::workers] == pytest.approx(alone.wait_s)


def test_a_request_that_arrives_during_another_groups_step_does_not_wait_for_it() -> None:
    trace = a_trace([(0.0, 10, 5), (0.5, 10, 1)])
    outcome = run(trace, a_setting(n_workers=2, barrier_groups=2), "round_robin")
    assert outcome.wait_s[1] == 0.0


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_tokens_per_second_are_those_of_the_time_that_passes(groups: int) -> None:
    trace = generate_trace("capped", rows=600, seed=0).with_lengths(0.1, 0.1)
    setting = Setting(n_workers=4, slots=8, pool=64, barrier_groups=groups)
    outcome = Replay(trace.at_rate(1e9), PolicySettings(policy="level_fit"), setting).run()
    assert outcome.figures.throughput_tok_s == pytest.approx(
        trace.output_tokens.sum() / outcome.figures.makespan_s, rel=0.1
    )
    assert 0.9 < outcome.figures.balance < 1.02


@pytest.mark.parametrize("groups", [1, 2])
def test_time_in_which_nothing_runs_is_part_of_the_seconds_of_tokens_per_second(groups: int) -> None:
    trace = a_trace([(10.0 * index, 100, 20) for index in range(100)])
    figures = run(trace, Setting(n_workers=2, slots=4, barrier_groups=groups), "least_kv").figures
    assert figures.throughput_tok_s == pytest.approx(20 / 10.0, rel=0.05)
    assert figures.balance == pytest.approx(figures.throughput_tok_s * 0.025 / 8, rel=0.01)


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_slots_of_lost_workers_do_not_count_against_the_balance_whatever_their_barrier(
    groups: int, lost: int
) -> None:
    trace = generate_trace("capped", rows=600, seed=0).with_lengths(0.1, 0.1).at_rate(1e9)
    failures = tuple(Failure(worker, 0.0) for worker in range(lost))
    setting = Setting(n_workers=4, slots=8, pool=64, barrier_groups=groups, failures=failures)
    outcome = Replay(trace, PolicySettings(policy="level_fit"), setting).run()
    assert 0.9 < outcome.figures.balance < 1.02


@pytest.mark.parametrize("policy", ["level_fit", "br_h", "join_shortest_queue"])
def test_draft_tokens_that_are_never_accepted_change_nothing(policy: str) -> None:
    trace = generate_trace("heavy_tailed", rows=200, seed=3).with_lengths(0.05, 0.05)
    setting = {"n_workers": 3, "slots": 6, "pool": 24, "step_cost_s": 1e-5}
    plain = run(trace, Setting(**setting), policy)
    drafting = run(trace, Setting(**setting, draft_tokens=4, draft_acceptance=0.0), policy)
    assert figures_of(drafting) == pytest.approx(figures_of(plain))


@pytest.mark.parametrize("tokens", [1, 4, 5, 9])
def test_draft_tokens_that_are_always_accepted_arrive_together_up_to_the_end(tokens: int) -> None:
    setting = a_setting(n_workers=1, draft_tokens=3, draft_acceptance=1.0)
    outcome = run(a_trace([(0.0, 10, tokens)]), setting)
    assert outcome.figures.steps == math.ceil(tokens / 4)
    assert outcome.tpot_s[0] * tokens == pytest.approx(outcome.figures.makespan_s)


def test_a_step_yields_as_many_tokens_as_the_setting_says_on_average() -> None:
    trace = a_trace([(0.0, 10, 4000)] * 4)
    setting = a_setting(n_workers=1, slots=4, draft_tokens=3, draft_acceptance=0.6)
    outcome = run(trace, setting)
    assert setting.tokens_per_step == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    assert 4000 / outcome.figures.steps == pytest.approx(setting.tokens_per_step, rel=0.03)


def test_a_requests_draft_acceptance_does_not_depend_on_its_worker() -> None:
    trace = a_trace([(0.0, 10, 500), (0.0, 20, 400), (0.0, 30, 300)])
    alone, together = (
        run(trace, a_setting(n_workers=1, slots=slots, draft_tokens=3, step_cost_s=0.0)) for slots in (1, 3)
    )
    assert together.tpot_s == pytest.approx(alone.tpot_s)
    assert len(set(together.tpot_s)) == 3


def test_a_requeued_request_keeps_its_draft_acceptance_behind_another_barrier() -> None:
    setting = Setting(n_workers=2, slots=1, barrier_groups=2, draft_tokens=3)
    (_, first), (_, second) = ranks_by_barrier(setting, [10], [1_000])

    def tokens_of(steps: int, ranks: Ranks) -> list[int]:
        ranks.bind(0, 0)
        ranks.fill(0)
        found = []
        for _ in range(steps):
            found.append(ranks.step_tokens())
            ranks.grow()
        ranks.fail(0, steps)
        return found

    (_, undisturbed), _ = ranks_by_barrier(setting, [10], [1_000])
    assert tokens_of(20, first) + tokens_of(20, second) == tokens_of(40, undisturbed)


@pytest.mark.parametrize("policy", ["level_fit", "br_h", "join_shortest_queue"])
@pytest.mark.parametrize(
    "options",
    [{"barrier_groups": 2}, {"barrier_groups": 4}, {"draft_tokens": 3}, {"barrier_groups": 2, "draft_tokens": 2}],
)
def test_every_request_is_served_with_every_other_option_at_once(policy: str, options: dict[str, int]) -> None:
    trace = generate_trace("heavy_tailed", rows=150, seed=2).with_lengths(0.05, 0.05)
    setting = replace(EVERY_OPTION, overlap_requests=None if policy == "level_fit" else 0, **options)
    replay = Replay(trace, PolicySettings(policy=policy), setting, check_invariants=True, with_loads=True)
    outcome = replay.run()
    assert outcome.figures.admitted == 150 and np.isfinite(outcome.tpot_s).all()
    assert outcome.loads.min() >= 0 and outcome.loads.max() <= 8000
    assert np.array_equal(replay.run().loads, outcome.loads)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"barrier_groups": 9}, "barrier groups 9: there are 8 workers"),
        ({"barrier_groups": 0}, "barrier groups 0: accepted is a number from 1"),
        ({"draft_acceptance": 1.5}, "draft acceptance 1.5: accepted is a number from 0 to 1"),
        ({"draft_tokens": 2, "engine_balancer_blocks": 5.0}, "not modelled together with barrier groups or draft"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, float], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        Setting(**options).checked()


def test_the_oracle_counts_steps_and_is_refused() -> None:
    trace = generate_trace("capped", rows=10, seed=0)
    with pytest.raises(InputError, match="oracle: it is not modelled together with"):
        Replay(trace, PolicySettings(policy="br_h"), Setting(draft_tokens=2), "oracle").run()


def test_the_sums_of_running_requests_are_right_after_every_step() -> None:
    ranks = DraftingRanks(Setting(n_workers=2, slots=4, draft_tokens=3), 2, [10] * 8, [5, 9, 1, 30, 2, 7, 11, 4], {})
    for request in range(8):
        ranks.bind(request, request % 2)
    done: list[int] = []
    for step in range(40):
        ranks.fill(step)
        coming = ranks.step_tokens()
        assert coming == sum(tokens for _, tokens in ranks.gains())
        ranks.grow()
        done += ranks.finished(step + 1)
        held = [sum(10 + ranks.done[request] for request in rank.running) for rank in ranks.ranks]
        assert ranks.loads == held and ranks.counts == [len(rank.running) for rank in ranks.ranks]
    assert sorted(done) == list(range(8)) and not ranks.draws


@pytest.mark.parametrize("lag_steps", [1, 3])
def test_the_router_learns_of_a_finished_worker_while_other_groups_step(lag_steps: int) -> None:
    trace = a_trace([(0.0, 10, 500), (0.0, 10, 2), (0.0, 10, 2)])
    setting = a_setting(n_workers=2, barrier_groups=2, slots=1, telemetry_lag_steps=lag_steps)
    outcome = run(trace, setting, "pool_fifo")
    first_ends_s = step_times_s(10, 2, setting)
    assert outcome.wait_s[2] == pytest.approx(first_ends_s + lag_steps * setting.step_overhead_s)

"""Requests sent ahead of their slots, on random traces and clusters (INV-2)."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute import simulate
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.simulator import Setting
from balanceroute.simulator.oracle import Forecast, TrueLengths
from balanceroute.simulator.simulation import Simulation
from balanceroute.traces import generate_trace

POLICIES = st.sampled_from(["level_fit", "target_fit", "br_0", "br_h", "pool_fifo", "join_shortest_queue"])


Bound = tuple[int, int]  # request, worker


class Watched(Simulation):
    """A simulation that keeps every admission, and calls `look` on itself before every step."""

    look: Callable[["Watched"], None] | None = None
    admissions: list[Bound]

    def decide(self) -> None:
        ranks = self.groups[0].ranks
        before = ranks.home.copy()
        super().decide()
        bound = enumerate(zip(before, ranks.home, strict=True))
        self.admissions += [(request, worker) for request, (earlier, worker) in bound if worker != earlier]

    def end_step(self) -> bool:
        if self.look is not None:
            self.look(self)
        return super().end_step()


def a_setting(n_workers: int, slots: int, overlap: int | None, pool: int = 16, **transfers: Any) -> Setting:
    return Setting(n_workers=n_workers, slots=slots, pool=pool, overlap_requests=overlap, **transfers)


def a_simulation(setting: Setting, policy: str, seed: int, rows: int = 120) -> tuple[Watched, list[Bound]]:
    """A heavy-tailed trace, shrunk, that arrives faster than it can be served; and where admissions will stand."""
    trace = generate_trace("heavy_tailed", rows=rows, seed=seed).with_lengths(0.05, 0.02).at_rate(50.0)
    made = make_policy(PolicySettings(policy=policy, seed=seed))
    simulation = Watched(trace, setting, made, TrueLengths(trace), Forecast(), check_invariants=True)
    simulation.admissions = []
    return simulation, simulation.admissions


@settings(max_examples=20, deadline=None)
@given(
    policy=POLICIES,
    overlap=st.one_of(st.none(), st.integers(0, 20)),
    transfer_steps=st.integers(0, 12),
    beside_full=st.booleans(),
    slots=st.integers(1, 6),
    seed=st.integers(0, 50),
)
def test_no_more_requests_run_than_slots_nor_are_sent_ahead_than_allowed(
    policy: str, overlap: int | None, transfer_steps: int, beside_full: bool, slots: int, seed: int
) -> None:
    setting = a_setting(3, slots, overlap, transfer_steps=transfer_steps, transfers_beside_full=beside_full)
    pool_share = setting.pool // setting.n_workers
    most = max(2 * slots, pool_share) if overlap is None else slots + min(overlap, slots)

    def look(simulation: Watched) -> None:
        assert all(len(rank.running) <= slots for rank in simulation.groups[0].ranks.ranks)
        if simulation.policy.waits_for_slots:
            assert all(rank.held + len(rank.queue) <= most for rank in simulation.groups[0].ranks.ranks)
            assert all(len(worker.active) <= most for worker in simulation.scheduler.snapshot.workers)

    simulation, admissions = a_simulation(setting, policy, seed)
    simulation.look = look
    simulation.run()
    assert simulation.finished == len(admissions) == 120


@settings(max_examples=12, deadline=None)
@given(policy=POLICIES, seed=st.integers(0, 50), slots=st.integers(1, 6))
def test_an_automatic_overlap_decides_like_no_overlap_where_transfers_take_no_time(
    policy: str, seed: int, slots: int
) -> None:
    decisions = []
    for overlap in (0, None):
        setting = a_setting(3, slots, overlap)
        simulation, admissions = a_simulation(setting, policy, seed)
        simulation.run()
        decisions.append((admissions, simulation.t))
    assert decisions[0] == decisions[1]


@pytest.mark.parametrize("transfer_steps", [0, 6, 40])
@pytest.mark.parametrize("beside_full", [False, True])
def test_the_overlap_is_what_a_transfer_takes_times_what_leaves_per_step(
    transfer_steps: int, beside_full: bool
) -> None:
    """m = d B / o (`core.overlap`), with the mean answer of the trace for o."""
    slots = 16
    setting = a_setting(2, slots, None, pool=32, transfer_steps=transfer_steps, transfers_beside_full=beside_full)
    sized: list[int] = []

    def look(simulation: Watched) -> None:
        if simulation.finished > 300:
            sized.append(simulation.scheduler.snapshot.workers[0].ahead)

    simulation, _ = a_simulation(setting, "level_fit", 1, rows=600)
    simulation.look = look
    simulation.run()
    expected = transfer_steps * slots / (sum(simulation.lengths.tokens) / len(simulation.lengths.tokens))
    assert sum(sized) / len(sized) == pytest.approx(min(slots, expected), rel=0.3, abs=0.5)


@pytest.mark.parametrize("beside_full", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_short_answers_behind_long_transfers_are_served_as_fast_as_by_policies_that_wait_for_no_slot(
    seed: int, beside_full: bool
) -> None:
    """Transfers twice as long as the mean answer, to few slots, which a deep pool could fill."""
    trace = generate_trace("heavy_tailed", rows=2000, seed=seed).with_lengths(0.64, 0.008)
    served = {}
    for policy, overlap in (("join_shortest_queue", 0), ("level_fit", None)):
        setting = a_setting(4, 16, overlap, 512, transfer_steps=20, transfers_beside_full=beside_full)
        served[policy] = simulate(trace, policy, setting=setting, load=1.1, seed=seed).figures.throughput_tok_s
    assert served["level_fit"] > 0.95 * served["join_shortest_queue"]

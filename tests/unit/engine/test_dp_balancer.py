"""The balancer inside a decode group: its plans by hand, and as invariants on random ranks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.engine import DpBalancer, Held, RankBatch, StepTimeModel, blocks_of

STEP = StepTimeModel(per_token_s=1e-8, overhead_s=0.001)


def ranks(*sizes: tuple[list[int], list[int]]) -> list[RankBatch]:
    """(running, waiting) of each rank, in blocks; requests are numbered through."""
    number = iter(range(10_000))
    return [
        RankBatch([Held(b, next(number)) for b in running], [Held(b, next(number)) for b in waiting])
        for running, waiting in sizes
    ]


def planned_blocks(balancer: DpBalancer, batches: list[RankBatch]) -> list[list[int]]:
    """What each rank is to run, in blocks."""
    sizes = {held.request: held.blocks for batch in batches for held in (*batch.running, *batch.waiting)}
    return [sorted(sizes[request] for request in plan) for plan in balancer.plan(batches)]


def test_level_ranks_are_left_alone_and_free_slots_filled_in_order() -> None:
    balancer = DpBalancer(3, STEP)
    assert planned_blocks(balancer, ranks(([10, 10], [4, 90]), ([10, 10], [5]))) == [[4, 10, 10], [5, 10, 10]]


def test_the_fullest_rank_exchanges_for_a_smaller_request_and_the_lightest_for_a_larger_one() -> None:
    balancer = DpBalancer(2, STEP)
    assert planned_blocks(balancer, ranks(([100, 20], [40]), ([20, 20], []))) == [[20, 40], [20, 20]]
    assert planned_blocks(balancer, ranks(([60, 60], []), ([20, 60], [60]))) == [[60, 60], [60, 60]]


def test_a_request_pauses_where_the_others_gain_more_than_it_loses() -> None:
    balancer = DpBalancer(2, StepTimeModel(per_token_s=1e-6, overhead_s=0.001), threshold_blocks=15)
    assert planned_blocks(balancer, ranks(([500, 20], []), ([20, 20], []))) == [[20], [20, 20]]
    patient = DpBalancer(2, StepTimeModel(per_token_s=1e-9, overhead_s=1.0))
    assert planned_blocks(patient, ranks(([500, 20], []), ([20, 20], []))) == [[20, 500], [20, 20]]


def test_kv_blocks_are_rounded_up_from_tokens() -> None:
    assert [blocks_of(tokens) for tokens in (1, 128, 129)] == [1, 1, 2]


sizes = st.lists(st.integers(1, 400), max_size=5)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4), st.integers(5, 8))
def test_every_rank_runs_only_its_own_and_never_more_than_its_slots(
    layout: list[tuple[list[int], list[int]]], slots: int
) -> None:
    batches = ranks(*layout)
    own = [{held.request for held in (*batch.running, *batch.waiting)} for batch in batches]
    plans = DpBalancer(slots, STEP).plan(batches)
    assert all(plan <= mine and len(plan) <= slots for plan, mine in zip(plans, own, strict=True))
    assert any(plans) == any(own), "somebody runs wherever somebody is"

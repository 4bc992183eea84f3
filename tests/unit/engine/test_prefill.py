"""Prefillers: lanes, pinned KV, leases, and what a full memory does to the queue."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.engine import KvBlocks, Prefiller, PrefillJob
from balanceroute.errors import ConfigError


def a_prefiller(*, blocks: int = 100, lanes: int = 1, lease_s: float = 30.0) -> Prefiller[PrefillJob]:
    return Prefiller(KvBlocks(blocks, 10), tokens_per_s=100.0, overhead_s=0.5, lanes=lanes, lease_s=lease_s)


def names(jobs: list[PrefillJob]) -> list[str]:
    return [job.id for job in jobs]


def test_a_prompt_takes_its_overhead_and_its_tokens() -> None:
    prefiller = a_prefiller()
    prefiller.submit(PrefillJob("a", 100), 1.0)
    assert prefiller.next_event_s() == 2.5
    assert (names(prefiller.advance(2.4)), names(prefiller.advance(2.5))) == ([], ["a"])


def test_one_lane_computes_prompts_one_after_the_other() -> None:
    prefiller = a_prefiller()
    prefiller.submit(PrefillJob("a", 100), 0.0)
    prefiller.submit(PrefillJob("b", 100), 0.0)
    assert names(prefiller.advance(1.5)) == ["a"]
    assert prefiller.running["b"].done_s == 3.0


def test_two_lanes_compute_two_prompts_at_a_time() -> None:
    prefiller = a_prefiller(lanes=2)
    for name in "abc":
        prefiller.submit(PrefillJob(name, 100), 0.0)
    assert names(prefiller.advance(1.5)) == ["a", "b"]


def test_pinned_blocks_stay_until_they_are_pulled_and_only_once() -> None:
    prefiller = a_prefiller()
    prefiller.submit(PrefillJob("a", 95), 0.0)
    prefiller.advance(5.0)
    assert (prefiller.pinned_blocks, prefiller.kv.used) == (10, 10)
    assert (prefiller.pull("a", 6.0), prefiller.pull("a", 6.0)) == (True, False)
    assert prefiller.kv.used == 0


def test_a_prompt_that_nobody_asked_to_pin_is_freed_when_done() -> None:
    prefiller = a_prefiller()
    prefiller.submit(PrefillJob("a", 95, pin=False), 0.0)
    assert names(prefiller.advance(5.0)) == ["a"]
    assert prefiller.kv.used == 0


def test_pins_end_with_their_lease() -> None:
    prefiller = a_prefiller(lease_s=30.0)
    prefiller.submit(PrefillJob("a", 100), 0.0)
    prefiller.advance(1.5)
    assert prefiller.next_event_s() == 31.5
    prefiller.advance(31.5)
    assert (prefiller.expired, prefiller.kv.used, prefiller.next_event_s()) == (1, 0, math.inf)


def test_a_lease_starts_when_the_end_of_the_prompt_is_noticed() -> None:
    prefiller = a_prefiller(lease_s=30.0)
    prefiller.submit(PrefillJob("a", 100), 0.0)
    assert [job.id for job in prefiller.advance(100.0)] == ["a"]
    assert list(prefiller.pinned) == ["a"] and prefiller.next_event_s() == 130.0


def test_a_decoders_heartbeat_moves_the_end_of_the_lease() -> None:
    prefiller = a_prefiller(lease_s=30.0)
    prefiller.submit(PrefillJob("a", 100), 0.0)
    prefiller.advance(1.5)
    prefiller.set_expiry("a", 50.0)
    prefiller.advance(40.0)
    assert prefiller.pinned


def test_a_prefiller_full_of_pins_computes_nothing_until_one_is_pulled() -> None:
    prefiller = a_prefiller(blocks=10)
    prefiller.submit(PrefillJob("a", 100), 0.0)
    prefiller.advance(1.5)
    prefiller.submit(PrefillJob("b", 100), 2.0)
    assert list(prefiller.queued) == ["b"]
    prefiller.pull("a", 3.0)
    assert prefiller.running["b"].done_s == 4.5


def test_an_aborted_prompt_frees_its_lane_but_a_pinned_one_stays() -> None:
    prefiller = a_prefiller()
    for name in "abc":
        prefiller.submit(PrefillJob(name, 100), 0.0)
    assert prefiller.abort("a", 0.5) and prefiller.abort("c", 0.5)
    assert names(prefiller.advance(2.0)) == ["b"]
    assert not prefiller.abort("b", 2.0)
    assert list(prefiller.pinned) == ["b"]


def test_a_prompt_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="more KV blocks"):
        a_prefiller(blocks=5).submit(PrefillJob("a", 100), 0.0)


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=15), st.integers(1, 3))
def test_every_prompt_is_done_in_order_and_every_block_comes_back(prompts: list[tuple[int, bool]], lanes: int) -> None:
    prefiller = a_prefiller(blocks=10, lanes=lanes, lease_s=5.0)
    for index, (tokens, pin) in enumerate(prompts):
        prefiller.submit(PrefillJob(str(index), tokens, pin=pin), 0.0)
    starts: dict[str, float] = {}
    done = 0
    while not math.isinf(now := prefiller.next_event_s()):
        finished = prefiller.advance(now)
        done += len(finished)
        starts |= {job.id: job.start_s for job in finished}
        prefiller.kv.check_invariants()
    ordered = [starts[str(index)] for index in range(len(prompts))]
    assert done == len(prompts) and ordered == sorted(ordered)
    assert prefiller.kv.used == 0

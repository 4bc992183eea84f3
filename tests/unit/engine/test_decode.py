"""Decode ranks: slots, queue, KV blocks, preemption, and the barrier of a group."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.engine import DecodeGroup, DecodeRank, EngineRequest, KvBlocks, Place, Preemption, StepTimeModel
from balanceroute.errors import ConfigError, InvariantError

Rank = DecodeRank[EngineRequest]


def a_request(name: str = "r", *, prompt: int = 100, output: int = 5, transfer_s: float = 0.0) -> EngineRequest:
    return EngineRequest(name, prompt, output, transfer_s=transfer_s)


def roomy() -> KvBlocks:
    return KvBlocks(1000, 100)


def step(rank: Rank, now: float = 0.0) -> list[str]:
    rank.begin_step(now)
    outcome = rank.end_step()
    rank.check_invariants()
    return [request.id for request in outcome.stepped]


def test_a_request_gets_one_token_per_step_and_leaves_with_its_last() -> None:
    rank = Rank(slots=2, kv=roomy())
    request = a_request(output=3)
    rank.submit(request)
    assert [step(rank) for _ in range(4)] == [["r"], ["r"], ["r"], []]
    assert (request.generated, request.place, rank.load) == (3, Place.GONE, 0)


def test_load_is_prompt_plus_generated_of_the_running_requests() -> None:
    rank = Rank(slots=2, kv=roomy())
    rank.submit(a_request("a", prompt=100))
    rank.submit(a_request("b", prompt=50))
    step(rank)
    step(rank)
    assert rank.load == 154


def test_waiting_requests_get_slots_first_come_first_served() -> None:
    rank = Rank(slots=1, kv=roomy())
    for name in "abc":
        rank.submit(a_request(name, output=1))
    assert [step(rank) for _ in range(3)] == [["a"], ["b"], ["c"]]


def test_a_request_holds_no_slot_while_its_kv_is_on_the_way() -> None:
    rank = Rank(slots=1, kv=roomy())
    rank.submit(a_request("a", output=1, transfer_s=1.0))
    rank.submit(a_request("b", output=1))
    assert [step(rank, now) for now in (0.0, 0.5, 1.0, 1.5)] == [["b"], [], ["a"], []]


@pytest.mark.parametrize(("beside_full", "after"), [(False, [[], ["next"]]), (True, [["next"], []])])
def test_a_transfer_begins_beside_a_full_batch_only_on_an_engine_that_does_so(
    beside_full: bool, after: list[list[str]]
) -> None:
    rank = Rank(slots=1, kv=roomy(), transfers_beside_full=beside_full)
    rank.submit(a_request("first", output=2))
    assert step(rank, 0.0) == ["first"]
    rank.submit(a_request("next", output=1, transfer_s=1.0))
    assert step(rank, 1.0) == ["first"]
    assert [step(rank, now) for now in (2.0, 3.0)] == after


def test_a_step_with_a_free_slot_begins_every_transfer_and_later_ones_do_not_wait_for_it() -> None:
    rank = Rank(slots=2, kv=roomy())
    for name in ("old", "older"):
        rank.submit(a_request(name, output=2 if name == "older" else 3))
    step(rank, 0.0)
    for name in ("a", "b"):
        rank.submit(a_request(name, output=5, transfer_s=1.0))
    assert [step(rank, now) for now in (1.0, 2.0)] == [["old", "older"], ["old"]]
    assert step(rank, 3.0) == ["a", "b"]  # b has no transfer to wait for any more


def test_a_locally_computed_prompt_holds_a_slot_meanwhile() -> None:
    rank = Rank(slots=1, kv=roomy())
    local = a_request("local", output=1, transfer_s=1.0)
    local.local = True
    rank.submit(local)
    rank.submit(a_request("b", output=1))
    assert [step(rank, now) for now in (0.0, 0.5, 1.0, 1.5)] == [[], [], ["local"], ["b"]]


def test_kv_that_never_comes_is_started_by_its_arrival() -> None:
    rank = Rank(slots=1, kv=roomy())
    rank.submit(a_request("a", transfer_s=math.inf))
    assert step(rank, 1e9) == []
    rank.kv_arrived("a", 2e9)
    assert step(rank, 2e9) == ["a"]


def test_the_head_of_the_queue_waits_for_blocks_and_is_not_overtaken() -> None:
    rank = Rank(slots=4, kv=KvBlocks(10, 10))
    rank.submit(a_request("small", prompt=45, output=3))
    rank.submit(a_request("large", prompt=90, output=1))
    rank.submit(a_request("tiny", prompt=5, output=1))
    assert [step(rank) for _ in range(5)] == [["small"]] * 3 + [["large"], ["tiny"]]


def test_running_out_of_blocks_pops_the_last_running_request() -> None:
    rank = Rank(slots=2, kv=KvBlocks(4, 10), preemption=Preemption.POP_LAST)
    rank.submit(a_request("old", prompt=18, output=50))
    rank.submit(a_request("young", prompt=18, output=50))
    assert step(rank) == ["old", "young"]
    assert step(rank) == ["old", "young"]
    rank.make_room()
    outcome = rank.end_step()
    assert [request.id for request in outcome.recomputed] == ["young"]
    assert [request.id for request in outcome.stepped] == ["old"]
    rank.check_invariants()


def test_running_out_of_blocks_sends_the_last_request_back_to_recompute_locally() -> None:
    rank = Rank(slots=2, kv=KvBlocks(4, 10), recompute_s_per_token=0.1)
    rank.submit(a_request("old", prompt=18, output=4))
    young = a_request("young", prompt=18, output=4)
    rank.submit(young)
    assert [step(rank, 0.0) for _ in range(4)] == [["old", "young"], ["old", "young"], ["old"], ["old"]]
    assert (young.place, rank.preemptions, young.generated) == (Place.WAITING, 1, 2)
    assert step(rank, 10.0) == []
    assert young.ready_s == 10.0 + 0.1 * 20
    assert step(rank, 12.0) == ["young"]


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 11 KV blocks"):
        Rank(slots=1, kv=KvBlocks(10, 10)).submit(a_request(prompt=100))


def test_removing_a_request_twice_is_an_error() -> None:
    rank = Rank(slots=1, kv=roomy())
    rank.submit(a_request())
    rank.remove("r")
    with pytest.raises(InvariantError):
        rank.remove("r")


def test_a_failed_rank_holds_no_requests() -> None:
    rank = Rank(slots=1, kv=KvBlocks(10, 100))
    for name in "ab":
        rank.submit(a_request(name))
    step(rank)
    assert {request.id for request in rank.fail()} == {"a", "b"}
    assert (rank.load, rank.busy, rank.kv and rank.kv.used) == (0, False, 0)


def test_the_step_of_a_group_costs_what_its_fullest_rank_costs() -> None:
    ranks = [Rank(slots=4, kv=roomy()), Rank(slots=4, kv=roomy()), Rank(slots=4, kv=roomy())]
    group = DecodeGroup(ranks, StepTimeModel(per_token_s=0.001, overhead_s=0.5))
    ranks[0].submit(a_request("a", prompt=1000))
    ranks[1].submit(a_request("b", prompt=3000))
    plan = group.begin_step(0.0)
    assert plan.duration_s == pytest.approx(3.5)
    assert [len(outcome.stepped) for outcome in group.end_step()] == [1, 1, 0]


def test_a_stalled_rank_keeps_its_requests_and_gives_no_tokens() -> None:
    rank = Rank(slots=1, kv=roomy())
    group = DecodeGroup([rank], StepTimeModel())
    rank.submit(a_request())
    group.begin_step(0.0)
    rank.stalled = True
    assert (group.end_step()[0].stepped, list(rank.running), group.running) == ([], ["r"], False)


def test_a_request_is_preempted_for_blocks_of_a_transfer_and_resumes() -> None:
    rank = Rank(2, KvBlocks(6, 10), preemption=Preemption.RECOMPUTE_LOCALLY)
    rank.submit(a_request("growing", prompt=26, output=9))
    rank.submit(a_request("arriving", prompt=20, output=1, transfer_s=20.0))
    ended = []
    for now in range(40):
        rank.begin_step(now)
        ended += [request.id for request in rank.end_step().stepped if request.finished]
        rank.check_invariants()
    assert sorted(ended) == ["arriving", "growing"]


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    blocks=st.integers(6, 14),
    policy=st.sampled_from(list(Preemption)),
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 15), st.sampled_from([0.0, 2.0])), max_size=12),
    aborts=st.sets(st.integers(0, 11)),
    beside_full=st.booleans(),
)
def test_blocks_are_conserved_slots_respected_and_every_request_ends_once(
    slots: int,
    blocks: int,
    policy: Preemption,
    sizes: list[tuple[int, int, float]],
    aborts: set[int],
    beside_full: bool,
) -> None:
    rank = Rank(slots, KvBlocks(blocks, 10), preemption=policy, transfers_beside_full=beside_full)
    requests = [a_request(str(i), prompt=p, output=o, transfer_s=t) for i, (p, o, t) in enumerate(sizes)]
    for request in requests:
        rank.submit(request)
    ended: list[str] = []
    first_slot: list[str] = []
    for now in range(400):
        first_slot += [request.id for request in rank.begin_step(now)[0] if not request.preemptions]
        outcome = rank.end_step()
        rank.check_invariants()
        assert len(outcome.stepped) <= slots
        ended += [request.id for request in outcome.stepped if request.finished]
        ended += [request.id for request in outcome.recomputed]
        victim = str(now)
        if now in aborts and rank.find(victim):
            rank.remove(victim)
            ended.append(victim)
    assert sorted(ended) == sorted(request.id for request in requests)
    assert first_slot == sorted(first_slot, key=int)
    assert rank.kv is not None and rank.kv.free == blocks


def test_a_paused_request_keeps_slot_and_blocks_and_gets_no_token_until_it_goes_on() -> None:
    rank = Rank(slots=2, kv=KvBlocks(10, 16))
    for name in ("a", "b"):
        rank.submit(EngineRequest(name, 10, 5))
    rank.admit(0.0)
    rank.start_ready(0.0)
    rank.pause("a")
    rank.check_invariants()
    assert (rank.free_slots, rank.load, rank.busy) == (0, 10, True)
    assert [request.id for request in rank.end_step().stepped] == ["b"]
    held = rank.find("a")
    assert held is not None and held.generated == 0 and rank.kv is not None and rank.kv.holds("a")
    rank.resume()
    rank.check_invariants()
    assert [request.id for request in rank.end_step().stepped] == ["b", "a"]
    rank.pause("a")
    assert rank.remove("a").place is Place.GONE
    rank.check_invariants()

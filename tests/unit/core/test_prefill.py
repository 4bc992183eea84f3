"""Which prefiller takes the next probe."""

import pytest

from balanceroute.core.prefill import LONE_WEIGHT, PREFILL_POLICIES, cheapest, ready_prefillers
from balanceroute.core.tracker import PrefillerBudget, RequestTracker
from balanceroute.core.types import Role, WorkerSpec, WorkerState


def a_prefiller(name: str, **values: object) -> PrefillerBudget:
    return PrefillerBudget(WorkerSpec(name, Role.PREFILL), **values)  # type: ignore[arg-type]


def chosen(
    *prefillers: PrefillerBudget,
    kv_usage_limit: float = 0.9,
    max_inflight: int | None = None,
    policy: str = "least_tokens",
    request: RequestTracker | None = None,
) -> str | None:
    ready = ready_prefillers(prefillers, kv_usage_limit, max_inflight)
    costs = PREFILL_POLICIES[policy](ready, request or RequestTracker("r", 100, 0))
    return cheapest(ready, costs).spec.id if ready else None


def test_the_prefiller_with_the_fewest_prompt_tokens_in_flight_is_chosen() -> None:
    assert (
        chosen(a_prefiller("a", inflight_tokens=5, inflight=1), a_prefiller("b", inflight_tokens=4, inflight=9)) == "b"
    )


def test_among_equal_prefillers_the_least_recently_used_is_chosen() -> None:
    assert chosen(a_prefiller("a", last_used=7), a_prefiller("b", last_used=3), a_prefiller("c", last_used=9)) == "b"


@pytest.mark.parametrize(("inflight", "expected"), [(1, "a"), (2, None), (3, None)])
def test_a_prefiller_gets_no_more_probes_than_max_inflight(inflight: int, expected: str | None) -> None:
    assert chosen(a_prefiller("a", inflight=inflight), max_inflight=2) == expected


@pytest.mark.parametrize(("kv_usage", "expected"), [(0.9, "a"), (0.9001, None)])
def test_a_prefiller_above_its_kv_limit_gets_no_request(kv_usage: float, expected: str | None) -> None:
    assert chosen(a_prefiller("a", kv_usage=kv_usage), kv_usage_limit=0.9) == expected


@pytest.mark.parametrize("state", [WorkerState.DRAINING, WorkerState.DOWN])
def test_a_prefiller_that_is_not_up_gets_no_request(state: WorkerState) -> None:
    assert chosen(a_prefiller("a", state=state), a_prefiller("b", inflight_tokens=1000)) == "b"


def a_prompt(prefix: tuple[int, ...], prompt_tokens: int = 1000, block_tokens: int = 100) -> RequestTracker:
    return RequestTracker("r", prompt_tokens, 0, prefix=prefix, block_tokens=block_tokens)


@pytest.mark.parametrize(("hits_are_known", "shared_blocks", "worth_tokens"),
                         [(True, 0, LONE_WEIGHT * 300), (True, 2, 200 + LONE_WEIGHT * 100), (True, 4, 300),
                          (False, 0, 300)],
                         ids=["own", "partly-shared", "shared", "no-hit-known"])  # fmt: skip
@pytest.mark.parametrize(("more", "expected"), [(-1, "a"), (0, "b"), (1, "b")])
def test_affinity_waits_longer_for_a_prefix_of_one_conversation_where_hits_are_measured(
    hits_are_known: bool, shared_blocks: int, worth_tokens: int, more: int, expected: str
) -> None:
    holder = a_prefiller("a", inflight_uncached_tokens=worth_tokens + more, last_used=2)
    holder.cache.use((1, 2, 3), 100)
    if hits_are_known:
        holder.hits.answered(100, 100, 100)
    request = a_prompt((1, 2, 3, 4))
    request.shared_blocks = shared_blocks
    assert chosen(holder, a_prefiller("b", last_used=1), policy="prefix_affinity", request=request) == expected


def test_affinity_avoids_a_prefiller_whose_kv_is_full() -> None:
    holder = a_prefiller("a", kv_usage=0.95)
    holder.cache.use((1, 2, 3), 100)
    assert chosen(holder, a_prefiller("b"), policy="prefix_affinity", request=a_prompt((1, 2, 3))) == "b"


def test_a_fully_cached_prompt_still_costs_one_token() -> None:
    holder = a_prefiller("a")
    holder.cache.use((1, 2), 100)
    assert a_prompt((1, 2), prompt_tokens=200).uncached_on(holder) == 1


def test_round_robin_chooses_the_least_recently_used_prefiller_whatever_is_in_flight() -> None:
    busy, idle = a_prefiller("a", inflight_tokens=900, last_used=1), a_prefiller("b", last_used=2)
    assert chosen(busy, idle, policy="round_robin") == "a"

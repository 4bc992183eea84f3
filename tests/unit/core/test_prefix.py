"""What the router believes of prefix caches: the index against a plain LRU, and the policy that uses it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.prefix import PrefixIndex, SharedPrefixes, leading
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec, WorkerState
from tests.examples import examples
from tests.unit.core.builders import a_scheduler

BLOCK = 100


def chained(blocks: list[int]) -> tuple[int, ...]:
    """A hash for each block that stands for all blocks up to it."""
    return tuple(hash(tuple(blocks[: index + 1])) for index in range(len(blocks)))


prompts = st.lists(st.integers(0, 2), max_size=6).map(chained)


class PlainLru:
    """A list, the block used longest ago first; what does not fit goes from its head."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.held = blocks, list[int]()

    def use(self, prompt: tuple[int, ...]) -> int:
        matched = self.matched(prompt)
        self.held = [block for block in self.held if block not in prompt] + list(reversed(prompt))
        self.held = self.held[max(0, len(self.held) - self.blocks) :]
        return matched

    def matched(self, prompt: tuple[int, ...]) -> int:
        for count, block in enumerate(prompt):
            if block not in self.held:
                return count
        return len(prompt)


@given(st.integers(0, 12), st.lists(prompts, max_size=40))
def test_the_index_equals_an_lru_cache_of_its_size(size: int, sent: list[tuple[int, ...]]) -> None:
    index, plain = PrefixIndex(size * BLOCK), PlainLru(size)
    for prompt in sent:
        assert index.matched(prompt) == plain.matched(prompt)
        assert index.use(prompt, BLOCK).matched == plain.use(prompt)
        assert (len(index), index.tokens) == (len(plain.held), len(plain.held) * BLOCK)


def held_by(index: PrefixIndex, prompt: tuple[int, ...]) -> list[bool]:
    return [index.matched((block,)) == 1 for block in prompt]


steps = st.tuples(st.sampled_from(["use", "fail", "correct", "shrink", "clear"]), prompts, st.integers(0, 6))


@given(st.lists(steps, max_size=30))
def test_whatever_happens_the_held_blocks_of_a_prompt_are_its_first_ones(happened: list[tuple]) -> None:  # type: ignore[type-arg]
    index, sent = PrefixIndex(10 * BLOCK), set[tuple[int, ...]]()
    pending = []
    for what, prompt, number in happened:
        sent.add(prompt)
        if what == "use":
            pending.append((prompt, index.use(prompt, BLOCK)))
        elif what == "fail" and pending:
            index.withdraw(*pending.pop(number % len(pending)))
        elif what == "correct" and pending:
            index.correct(pending.pop(number % len(pending))[1], number)
        elif what == "shrink":
            index.resize(number * BLOCK)
        elif what == "clear":
            index.clear()
        for seen in sent:
            held = held_by(index, seen)
            assert held == sorted(held, reverse=True)
            assert index.matched(seen) == sum(held)
        assert index.tokens == len(index) * BLOCK


def test_a_failed_prefill_is_withdrawn_from_the_index_except_blocks_used_since() -> None:
    index = PrefixIndex()
    index.use((1, 2), BLOCK)
    failed = index.use((1, 2, 3, 4), BLOCK)
    index.use((1, 2, 3, 5), BLOCK)
    index.withdraw((1, 2, 3, 4), failed)
    assert index.matched((1, 2, 3, 5)) == 4
    assert index.matched((1, 2, 3, 4)) == 3


def test_a_block_missing_in_the_engine_also_removes_everything_used_before_it() -> None:
    index = PrefixIndex()
    for prompt in ((1,), (2, 3), (4,)):
        index.use(prompt, BLOCK)
    index.correct(index.use((2, 3), BLOCK), 0)
    assert [index.matched(prompt) for prompt in ((1,), (2, 3), (4,))] == [0, 2, 1]


def test_one_missing_block_is_taken_for_rounding() -> None:
    index = PrefixIndex()
    index.use((9,), BLOCK)
    index.use((1, 2, 3), BLOCK)
    index.correct(index.use((1, 2, 3), BLOCK), 2)
    assert index.matched((9,)) == 1


def test_the_index_is_bounded_when_the_engines_cache_size_is_unknown() -> None:
    index = PrefixIndex(max_blocks=5)
    for block in range(20):
        index.use((block,), BLOCK)
    assert (len(index), index.tokens) == (5, 5 * BLOCK)
    assert index.matched((19,)) == 1


# -- what many conversations begin with


class PlainConversations:
    """A list of conversations, each as far as it is known, and whether its next turn would be told from another."""

    def __init__(self) -> None:
        self.known: list[tuple[tuple[int, ...], bool]] = []

    def use(self, prompt: tuple[int, ...]) -> None:
        blocks = leading(prompt, {block for conversation, _ in self.known for block in conversation})
        turn_before = (prompt[:blocks], True)
        if 0 < blocks < len(prompt) and turn_before in self.known:
            self.known.remove(turn_before)
        self.known.append((prompt, blocks < len(prompt)))

    def shared(self, prompt: tuple[int, ...], least: int) -> int:
        counts = [sum(block in conversation for conversation, _ in self.known) for block in prompt]
        return sum(count >= least for count in counts)


@given(st.lists(prompts, max_size=40), prompts, st.integers(1, 8))
def test_a_longer_prompt_is_the_next_turn_and_a_different_one_a_new_conversation(
    sent: list[tuple[int, ...]], asked: tuple[int, ...], least: int
) -> None:
    shared, plain = SharedPrefixes(), PlainConversations()
    for prompt in sent:
        shared.use(prompt)
        plain.use(prompt)
        assert shared.shared(asked, least) == plain.shared(asked, least)
    shared.clear()
    assert shared.shared(asked, least) == 0


@given(st.lists(prompts, max_size=40), st.integers(1, 5))
def test_bounded_conversation_counts_still_decrease_along_every_prompt(sent: list[tuple[int, ...]], most: int) -> None:
    shared = SharedPrefixes(most)
    for prompt in sent:
        shared.use(prompt)
        assert len(shared.conversations) <= most
        for seen in sent:
            counts = [shared.conversations.get(block, 0) for block in seen]
            assert counts == sorted(counts, reverse=True)


def test_a_system_prompt_is_shared_and_the_turns_of_a_conversation_are_not() -> None:
    shared = SharedPrefixes()
    for conversation in range(16):
        for turn in range(1, 5):
            shared.use(chained([0, 0, *[100 + conversation] * turn]))
    assert shared.shared(chained([0, 0, 100, 100]), 16) == 2


# -- the policy, through the scheduler


def with_policy(policy: str, prefillers: int = 4, **bounds: object) -> Scheduler:
    return a_scheduler(prefillers=prefillers, config=replace(SchedulerConfig(prefill_policy=policy), **bounds))  # type: ignore[arg-type]


def a_prompt(name: str, prefix: tuple[int, ...], prompt_tokens: int) -> RequestSpec:
    return RequestSpec(name, prompt_tokens, prefix=prefix, block_tokens=BLOCK)


arrivals = st.lists(st.tuples(st.integers(1, 2000), st.booleans()), max_size=40)


@settings(max_examples=examples(50))
@given(arrivals, st.sampled_from([None, 2]))
def test_affinity_decides_like_least_tokens_when_no_prefix_is_shared(
    sizes: list[tuple[int, bool]], max_inflight: int | None
) -> None:
    decisions = []
    for policy in ("least_tokens", "prefix_affinity"):
        scheduler = with_policy(policy, max_prefill_inflight=max_inflight)
        for hit_tokens in (0, 1):  # caches are known to hit
            scheduler.report_prefix_hits("p0", 1000, hit_tokens, 0.0)
        taken, busy = [], list[str]()
        for number, (tokens, one_ends) in enumerate(sizes):
            own = tuple(10_000 * (number + 1) + block for block in range(tokens // BLOCK))
            scheduler.submit(a_prompt(f"r{number}", own, tokens), 0.0)
            if one_ends and busy:
                scheduler.finish(busy.pop(0), Outcome.CANCELLED, 0.0)
            prefills = scheduler.dispatch(0.0)
            busy += [prefill.request for prefill in prefills]
            taken.append([(prefill.request, prefill.worker) for prefill in prefills])
            scheduler.snapshot.check_invariants()
        decisions.append(taken)
    assert decisions[0] == decisions[1]


def test_a_system_prompt_shared_by_all_does_not_concentrate_on_one_prefiller() -> None:
    scheduler, rng = with_policy("prefix_affinity", prefillers=8), random.Random(7)
    system = chained(list(range(80)))  # 8,000 tokens
    work, busy = dict.fromkeys((f"p{index}" for index in range(8)), 0), list[tuple[str, int, int]]()
    for number in range(2000):
        own = rng.randint(200, 2000)
        scheduler.submit(a_prompt(f"r{number}", system, 8000 + own), 0.0)
        (prefill,) = scheduler.dispatch(0.0)
        tracker = scheduler.snapshot.requests[prefill.request]
        work[prefill.worker] += tracker.uncached_tokens
        busy.append((prefill.request, tracker.prompt_tokens, tracker.prompt_tokens - tracker.uncached_tokens))
        if len(busy) == 24:
            name, tokens, cached = busy.pop(0)
            scheduler.prefilled(name, tokens, 0.0, None, cached)
            scheduler.finish(name, Outcome.FINISHED, 0.0)
    assert max(work.values()) < 1.1 * min(work.values())


conversations = st.lists(
    st.tuples(prompts, st.sampled_from(["answered", "failed", "cancelled"]), st.integers(0, 600)), max_size=30
)


@given(conversations, st.sampled_from(["least_tokens", "prefix_affinity", "round_robin"]))
def test_budgets_stay_exact_and_return_to_zero_however_probes_end(
    requests: list[tuple[tuple[int, ...], str, int]], policy: str
) -> None:
    scheduler = with_policy(policy, prefillers=2)
    for number, (prefix, end, cached) in enumerate(requests):
        name = f"r{number}"
        scheduler.submit(a_prompt(name, prefix, len(prefix) * BLOCK + 1), 0.0)
        scheduler.dispatch(0.0)
        scheduler.snapshot.check_invariants()
        if end == "failed":
            scheduler.prefill_failed(name, 0.0)
        elif end == "answered":
            scheduler.prefilled(name, len(prefix) * BLOCK + 1, 0.0, None, cached)
        scheduler.snapshot.check_invariants()
        if end != "answered":
            scheduler.finish(name, Outcome.CANCELLED, 0.0)
    for name in list(scheduler.snapshot.requests):
        scheduler.finish(name, Outcome.CANCELLED, 0.0)
    scheduler.snapshot.check_invariants()
    assert [p.inflight_uncached_tokens for p in scheduler.snapshot.prefillers] == [0, 0]


def test_a_conversation_returns_to_its_prefiller_until_that_one_was_down() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=2)

    def turn(name: str, blocks: int) -> str:
        scheduler.submit(a_prompt(name, chained(list(range(blocks))), blocks * BLOCK + 1), 0.0)
        (prefill,) = scheduler.dispatch(0.0)
        scheduler.finish(name, Outcome.FINISHED, 0.0)
        return prefill.worker

    assert [turn("a", 2), turn("b", 4), turn("c", 6)] == ["p0", "p0", "p0"]
    scheduler.set_worker_state("p0", WorkerState.DOWN, 0.0)
    scheduler.set_worker_state("p0", WorkerState.UP, 0.0)
    assert turn("d", 8) == "p1"  # nobody has it: the one used longest ago


def test_a_prefiller_without_a_cache_attracts_no_conversation() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=2)
    scheduler.report_prefix_cache("p0", 0, 0.0)
    workers = []
    for name in ("a", "b"):
        scheduler.submit(a_prompt(name, (1, 2), 2 * BLOCK), 0.0)
        workers += [prefill.worker for prefill in scheduler.dispatch(0.0)]
        scheduler.finish(name, Outcome.FINISHED, 0.0)
    assert workers == ["p0", "p1"]


# -- corrected by the truth


def converse(scheduler: Scheduler, turns: int, tell: int | None = None, first: int = 0) -> None:
    """One conversation on one prefiller, 1,000 tokens more each turn; `tell`: what each answer says was cached."""
    for turn in range(first, first + turns):
        blocks = 10 * (turn + 1)
        scheduler.submit(a_prompt(f"t{turn}", chained(list(range(blocks))), blocks * BLOCK), 0.0)
        scheduler.dispatch(0.0)
        scheduler.prefilled(f"t{turn}", blocks * BLOCK, 0.0, None, tell)
        scheduler.finish(f"t{turn}", Outcome.FINISHED, 0.0)


def test_counters_that_confirm_the_predictions_do_not_change_the_index() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=1)
    prefiller = scheduler.snapshot.prefillers[0]
    scheduler.report_prefix_hits("p0", 0, 0, 0.0)
    converse(scheduler, 10)
    scheduler.report_prefix_hits("p0", 55_000, 45_000, 0.0)
    assert prefiller.hits.predicted_tokens == prefiller.hits.real_tokens == 45_000
    assert prefiller.hits.missed_tokens == 0
    assert prefiller.cache.tokens == 10_000


def test_counters_with_far_fewer_hits_shrink_the_index_until_hits_return() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=1)
    cache = scheduler.snapshot.prefillers[0].cache
    scheduler.report_prefix_hits("p0", 0, 0, 0.0)
    converse(scheduler, 10)
    scheduler.report_prefix_hits("p0", 55_000, 22_500, 0.0)
    assert cache.tokens == 5_000
    converse(scheduler, 1, first=10)
    assert cache.tokens == 5_000
    for found in range(1, 9):
        scheduler.report_prefix_hits("p0", 55_000 + 40_000 * found, 22_500 + 40_000 * found, 0.0)
    converse(scheduler, 1, first=11)
    assert cache.tokens == 12_000


def test_predicted_hits_that_did_not_occur_are_counted_as_missed_and_unknown_ones_are_not() -> None:
    reporting, silent = with_policy("prefix_affinity", prefillers=1), with_policy("prefix_affinity", prefillers=1)
    reporting.report_prefix_hits("p0", 0, 0, 0.0)
    for scheduler in (reporting, silent):
        converse(scheduler, 10)
    reporting.report_prefix_hits("p0", 55_000, 0, 0.0)
    assert reporting.snapshot.prefillers[0].hits.missed_tokens == 45_000
    assert silent.snapshot.prefillers[0].hits.missed_tokens == 0
    assert silent.snapshot.prefillers[0].hits.real_tokens is None
    reporting.report_prefix_hits("p0", 60_000, 1, 0.0)
    assert reporting.snapshot.prefillers[0].hits.missed_tokens == 0


def test_a_hit_that_did_not_occur_counts_once_if_both_answers_and_counters_show_it() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=1)
    scheduler.report_prefix_hits("p0", 0, 0, 0.0)
    converse(scheduler, 2, tell=0)
    scheduler.report_prefix_hits("p0", 3_000, 0, 0.0)
    assert scheduler.snapshot.prefillers[0].hits.missed_tokens == 1_000


def test_hits_that_counters_have_before_the_answer_are_not_missed_after_it() -> None:
    """An engine counts when a prefill begins. One of a long prompt lasts over several polls."""
    scheduler = with_policy("prefix_affinity", prefillers=1)
    hits = scheduler.snapshot.prefillers[0].hits
    scheduler.report_prefix_hits("p0", 0, 0, 0.0)
    converse(scheduler, 2)
    scheduler.report_prefix_hits("p0", 3_000, 1_000, 0.0)
    scheduler.submit(a_prompt("long", chained(list(range(40))), 40 * BLOCK), 0.0)
    scheduler.dispatch(0.0)
    for _ in range(3):
        scheduler.report_prefix_hits("p0", 7_000, 3_000, 0.0)
    scheduler.prefilled("long", 40 * BLOCK, 0.0)
    for _ in range(3):
        scheduler.report_prefix_hits("p0", 7_000, 3_000, 0.0)
    assert hits.predicted_tokens == hits.real_tokens == 3_000 and hits.missed_tokens == 0
    scheduler.finish("long", Outcome.FINISHED, 0.0)
    converse(scheduler, 1)
    scheduler.report_prefix_hits("p0", 8_000, 3_000, 0.0)
    assert hits.missed_tokens == 999, "an engine computes one token at least"


def test_reset_counters_mean_an_engine_with_an_empty_cache() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=1)
    scheduler.report_prefix_hits("p0", 900_000, 800_000, 0.0)
    converse(scheduler, 3)
    scheduler.report_prefix_hits("p0", 10, 0, 0.0)
    assert len(scheduler.snapshot.prefillers[0].cache) == 0
    assert scheduler.snapshot.prefillers[0].hits.counted_tokens == 0


def test_hits_reported_in_answers_before_the_first_counters_are_kept() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=1)
    hits = scheduler.snapshot.prefillers[0].hits
    converse(scheduler, 3, tell=500)
    scheduler.report_prefix_hits("p0", 6_000, 1_500, 0.0)
    assert hits.real_tokens == 1_500
    scheduler.report_prefix_hits("p0", 9_000, 2_500, 0.0)
    assert hits.real_tokens == 2_500


def test_absurd_hit_counters_stay_a_representable_number() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=1)
    for _ in range(40):
        scheduler.report_prefix_hits("p0", 0, 0, 0.0)
        scheduler.report_prefix_hits("p0", 1e18, 1e18, 0.0)
    assert scheduler.snapshot.prefillers[0].hits.counted_tokens == 2**53


def test_an_answer_that_reports_zero_cached_tokens_empties_the_index() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=1)
    converse(scheduler, 2)
    assert scheduler.snapshot.prefillers[0].cache.tokens == 2_000
    other = tuple(range(900, 905))
    scheduler.submit(a_prompt("other", other, 500), 0.0)
    scheduler.dispatch(0.0)
    scheduler.prefilled("other", 500, 0.0, None, 0)
    converse(scheduler, 1, tell=0, first=2)  # of its 3,000 tokens 2,000 were thought cached
    assert scheduler.snapshot.prefillers[0].cache.matched(other) == 5  # used later than what is gone
    assert scheduler.snapshot.prefillers[0].hits.missed_tokens == 2_000


def test_zero_hits_below_one_engine_block_change_nothing() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=1)
    scheduler.report_prefix_cache("p0", 100_000, 0.0, engine_block_tokens=512)
    scheduler.submit(a_prompt("old", (7,), BLOCK), 0.0)
    scheduler.dispatch(0.0)
    for name in ("a", "b"):
        scheduler.submit(a_prompt(name, (1, 2), 2 * BLOCK), 0.0)
        scheduler.dispatch(0.0)
        scheduler.prefilled(name, 2 * BLOCK, 0.0, None, 0)
    assert scheduler.snapshot.prefillers[0].cache.matched((7,)) == 1


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("decode_first", [False, True])
def test_a_prompt_whose_prefill_failed_is_not_counted_as_cached(decode_first: bool, last: bool) -> None:
    """Else prompts that a prefiller refuses would push those that it has out of the index."""
    config = SchedulerConfig(prefill_policy="prefix_affinity", decode_first=decode_first)
    scheduler = a_scheduler(config=config)
    scheduler.submit(RequestSpec("r", 3 * BLOCK, prefix=chained([1, 2, 3]), block_tokens=BLOCK), 0.0)
    if decode_first:
        scheduler.admit(0.0)
        scheduler.request_prefill("r", 0.0)
    scheduler.dispatch(0.0)
    (prefiller,) = scheduler.snapshot.prefillers
    assert len(prefiller.cache) == 3
    if last:
        scheduler.finish("r", Outcome.FAILED, 1.0)
    else:
        (scheduler.push_failed if decode_first else scheduler.prefill_failed)("r", 1.0)
    assert len(prefiller.cache) == 0


def test_a_change_of_policy_clears_the_indexes() -> None:
    scheduler = with_policy("prefix_affinity", prefillers=1)
    converse(scheduler, 2)
    for policy in ("least_tokens", "prefix_affinity"):
        scheduler.configure(replace(scheduler.config, prefill_policy=policy), 0.0)
    assert len(scheduler.snapshot.prefillers[0].cache) == len(scheduler.snapshot.shared_prefixes.conversations) == 0

"""The simulated decode workers against a recount after every step, as requests come, fail and are recomputed."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.simulator.ranks import DraftingRanks, Ranks
from balanceroute.simulator.setting import Setting

WORKERS = 2
requests = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=12)
options = st.builds(
    Setting,
    n_workers=st.just(WORKERS),
    slots=st.integers(1, 3),
    transfer_steps=st.integers(0, 3),
    transfers_by_size=st.booleans(),
    transfers_beside_full=st.booleans(),
    barrier_groups=st.sampled_from([1, 2]),
    kv_capacity_tokens=st.none() | st.just(50),
    draft_tokens=st.sampled_from([0, 0, 2]),
    draft_acceptance=st.just(0.6),
)


class Cluster:
    """Drives the workers as the simulation does; `got` are the tokens that each request has been given."""

    def __init__(self, setting: Setting, asked: list[tuple[int, int]]) -> None:
        kv, left = [prompt for prompt, _ in asked], [tokens for _, tokens in asked]
        make = DraftingRanks if setting.draft_tokens else Ranks
        self.ranks = make(setting, WORKERS, kv, left, *([{}] if setting.draft_tokens else []))  # type: ignore[arg-type]
        self.setting, self.asked = setting, asked
        self.got = [0] * len(asked)
        self.sent_on = dict.fromkeys(range(len(asked)), 0)  # by request that is not done: the step
        self.step = 0

    def send(self, request: int, rank: int) -> None:
        self.sent_on[request] = self.step
        self.ranks.bind(request, rank)

    def transfer_steps(self, request: int) -> int:
        """In proportion to its KV, if so set; the mean prompt takes what is set."""
        steps = self.setting.transfer_steps
        if not (steps and self.setting.transfers_by_size):
            return steps
        mean_prompt = sum(prompt for prompt, _ in self.asked) / len(self.asked)
        return max(1, round(steps * self.ranks.kv[request] / mean_prompt))

    def play(self, chance: random.Random) -> None:
        """One step; what is taken off or lost is sent again."""
        ranks = self.ranks
        running = [list(rank.running) for rank in ranks.ranks]
        for request in ranks.preempt_overflow(self.step):
            self.send(request, chance.randrange(WORKERS))
        for rank, before in zip(ranks.ranks, running, strict=True):
            assert list(rank.running) == before[: len(rank.running)], "the newest are taken off"
        for request in ranks.fill(self.step):
            assert self.step >= self.sent_on[request] + self.transfer_steps(request)
        self.recount()
        before = ranks.step_tokens()
        gains = ranks.gains()
        assert before == sum(tokens for _, tokens in gains)
        for request, tokens in gains:
            self.got[request] += tokens
        ranks.grow()
        self.step += 1
        done = ranks.finished(self.step)
        assert sorted(done) == sorted(each for each, _ in gains if self.got[each] == self.asked[each][1])
        for request in done:
            del self.sent_on[request]

    def fail(self, rank: int, chance: random.Random) -> None:
        """The worker is lost, and back at some later step."""
        ranks, here = self.ranks, [request for request in self.sent_on if self.ranks.home[request] == rank]
        if not ranks.ranks[rank].up:
            ranks.ranks[rank].up = True
            return
        lost = ranks.fail(rank, self.step)
        assert sorted(lost) == sorted(here)
        assert ranks.loads[rank] == 0 and not ranks.ranks[rank].held and not ranks.ranks[rank].queue
        for request in lost:
            self.send(request, chance.randrange(WORKERS))

    def recount(self) -> None:
        ranks, setting = self.ranks, self.setting
        assert ranks.in_queues == sum(len(rank.queue) for rank in ranks.ranks)
        if setting.kv_capacity_tokens is None and all(rank.up for rank in ranks.ranks):
            slotless = [len(rank.queue) + rank.held - setting.slots for rank in ranks.ranks]
            assert ranks.queued == sum(max(0, count) for count in slotless)
        assert ranks.active == sum(len(rank.running) + len(rank.moving) for rank in ranks.ranks)
        for rank in ranks.ranks:
            grown = sum(self.asked[request][0] + self.got[request] for request in rank.running)
            coming = sum(self.asked[request][0] + self.got[request] for request in rank.moving)
            assert ranks.loads[rank.index] == grown
            assert ranks.counts[rank.index] == len(rank.running) <= setting.slots
            most, capacity = grown + coming + rank.held * (1 + setting.draft_tokens), setting.kv_capacity_tokens
            assert capacity is None or most <= capacity, "what the step may add fits"
            if rank.queue and rank.up and len(rank.running) < setting.slots:
                first = self.asked[rank.queue[0]][0] + self.got[rank.queue[0]] + 1 + setting.draft_tokens
                assert capacity is not None and most + first > capacity, "no slot idles beside what fits"
            assert rank.up or not rank.held, "nothing runs on a worker that is lost"


@settings(max_examples=300, deadline=None)
@given(options, requests, st.integers(0, 2**32))
def test_every_request_gets_its_tokens_and_all_sums_are_those_of_a_recount(
    setting: Setting, asked: list[tuple[int, int]], seed: int
) -> None:
    chance = random.Random(seed)
    cluster = Cluster(setting, asked)
    coming = list(range(len(asked)))
    for _ in range(400):
        while coming and chance.random() < 0.5:
            cluster.send(coming.pop(), chance.randrange(WORKERS))
        if chance.random() < 0.1 and cluster.step < 60:
            cluster.fail(chance.randrange(WORKERS), chance)
        if cluster.step == 60:
            for rank in cluster.ranks.ranks:
                rank.up = True
        cluster.play(chance)
        if not coming and not cluster.sent_on:
            break
    assert cluster.got == [tokens for _, tokens in asked]
    assert cluster.ranks.loads == [0] * WORKERS and not cluster.ranks.active and not cluster.ranks.in_queues

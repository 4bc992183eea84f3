"""Which prompt gets which prefiller, against the text: `docs/prefix.md`, `prefill.py`, `prefill_queue.py`, `prefix.py`.

Runs of random events: prompts of conversations with and without a common beginning, in three classes; probes that are
answered (with more, less or nothing cached) or fail; prefillers that are down, nearly full or tell no usage; caches
that are small, shrink, or hit less than was predicted. The model keeps plain lists, and counts everything anew.
"""

import math
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import RequestSpec, WorkerState
from tests.unit.core.builders import a_scheduler

BLOCK, JUDGED = 1_500, 32_768
DEADLINE_S = 20.0
POLICIES = ("least_tokens", "prefix_affinity", "round_robin")
Prompt = tuple[int, ...]


@dataclass
class Probe:
    """A request; since it was sent, also what its prefiller was believed to have of it."""

    name: str
    size: int
    prefix: Prompt
    priority: int
    arrived_s: float
    place_s: float | None = None
    had: list[int] = field(default_factory=list)  # by block from the first on: when it had been used before
    began: int = 0  # the last use before its own
    uncached: int = 0


@dataclass
class Prefiller:
    """A prefiller of the model; `cache`: when each block was used last."""

    name: str
    up: bool = True
    usage: float | None = 0.0
    capacity: float = math.inf
    limit: float = math.inf
    cache: dict[int, int] = field(default_factory=dict)
    uses: int = 0
    probes: list[Probe] = field(default_factory=list)
    last_used: int = 0
    busy_s: float = 1_000 / 6_000
    work: float = 1_000.0
    unsettled_s: float = 0.0
    since_s: float = 0.0
    answered: int = 0
    predicted: int = 0
    counted: int | None = None
    counters: tuple[int, int] = (0, 0)
    judged: tuple[int, int] = (0, 0)

    def held(self, prefix: Prompt) -> int:
        """How many of the prompt's first blocks are here."""
        return next((index for index, block in enumerate(prefix) if block not in self.cache), len(prefix))

    def uncached(self, probe: Probe) -> int:
        return max(1, probe.size - BLOCK * self.held(probe.prefix)) if probe.prefix else probe.size

    def evict(self) -> None:
        while len(self.cache) * BLOCK > min(self.capacity, self.limit):
            del self.cache[min(self.cache, key=lambda block: self.cache[block])]

    def pass_time(self, now: float) -> None:
        self.unsettled_s += (now - self.since_s) if self.probes else 0.0
        self.since_s = now

    def has_hit(self) -> bool:
        return bool(self.answered if self.counted is None else self.counted)


def chained(blocks: list[int]) -> Prompt:
    """A hash for each block that stands for all blocks up to it."""
    return tuple(hash(tuple(blocks[: index + 1])) for index in range(len(blocks)))


def work_of(size: int, uncached: int) -> float:
    return uncached + (size - uncached) / 16


@dataclass
class Model:
    """Decides as the text says."""

    policy: str
    prefillers: list[Prefiller]
    most: int | None  # probes of a prefiller
    most_pooled: int
    waiting: list[Probe] = field(default_factory=list)
    pooled: int = 0
    sent: int = 0
    mean_work: float = 0.0
    conversations: list[tuple[Prompt, bool]] = field(default_factory=list)  # and whether a longer one is its next turn

    def dispatch(self, now: float) -> list[tuple[str, str]]:
        made: list[tuple[str, str]] = []
        while self.waiting and self.pooled + sum(len(each.probes) for each in self.prefillers) < self.most_pooled:
            head, ready = self.head(), self.ready()
            if not ready:
                break
            place = min(ready, key=lambda each: (self.cost(each, head, ready), each.last_used, int(each.name[1:])))
            self.waiting.remove(head)
            self.send(head, place, now)
            made.append((head.name, place.name))
        return made

    def pace(self) -> float:
        return sum([each.busy_s / each.work for each in self.prefillers]) / len(self.prefillers)

    def head(self) -> Probe:
        """A place is computed once, and only where more than one waits."""
        for probe in self.waiting:
            if probe.place_s is None and len(self.waiting) > 1:
                work = work_of(probe.size, min(each.uncached(probe) for each in self.prefillers))
                probe.place_s = probe.arrived_s + min(work * self.pace(), DEADLINE_S / 2)
        return min(self.waiting, key=lambda each: (each.priority, each.place_s or 0.0, each.arrived_s))

    def ready(self) -> list[Prefiller]:
        ready = []
        for each in self.prefillers:
            most = self.most or (8 if each.usage is None else math.inf)
            work = sum(work_of(probe.size, probe.uncached) for probe in each.probes)
            most_s = self.most * self.mean_work * self.pace() if self.most else math.inf
            has_time = not each.probes or work * (each.busy_s / each.work) < most_s
            if each.up and (each.usage or 0.0) <= 0.9 and len(each.probes) < most and has_time:
                ready.append(each)
        return ready

    def cost(self, place: Prefiller, probe: Probe, ready: list[Prefiller]) -> int:
        if self.policy == "least_tokens":
            return sum(each.size for each in place.probes)
        if self.policy == "round_robin":
            return 0
        weight = 32 if any(each.has_hit() for each in ready) else 1
        known = [sum(block in conversation for conversation, _ in self.conversations) for block in probe.prefix]
        shared = sum(count >= 2 * len(self.prefillers) for count in known)
        lone, uncached = max(0, probe.size - BLOCK * shared), place.uncached(probe)
        return sum(each.uncached for each in place.probes) + uncached + (weight - 1) * min(lone, uncached)

    def send(self, probe: Probe, place: Prefiller, now: float) -> None:
        self.sent += 1
        place.pass_time(now)
        place.last_used, probe.began = self.sent, place.uses
        probe.had = [place.cache[block] for block in probe.prefix[: place.held(probe.prefix)]]
        probe.uncached = place.uncached(probe)
        for block in reversed(probe.prefix):
            place.uses += 1
            place.cache[block] = place.uses
        place.evict()
        place.probes.append(probe)
        self.mean_work += max(0.01, 1 / self.sent) * (work_of(probe.size, probe.uncached) - self.mean_work)
        self.converse(probe.prefix)

    def converse(self, prefix: Prompt) -> None:
        """A prompt that goes on where a known one ended is its next turn; any other is a conversation of its own."""
        known = {block for conversation, _ in self.conversations for block in conversation}
        count = next((index for index, block in enumerate(prefix) if block not in known), len(prefix))
        if 0 < count < len(prefix) and (prefix[:count], True) in self.conversations:
            self.conversations.remove((prefix[:count], True))
        self.conversations.append((prefix, count < len(prefix)))

    def end(self, place: Prefiller, probe: Probe, now: float, done: bool) -> None:
        place.pass_time(now)
        if done:
            place.busy_s = 0.98 * place.busy_s + place.unsettled_s
            place.work = 0.98 * place.work + work_of(probe.size, probe.uncached)
        place.unsettled_s = 0.0
        place.probes.remove(probe)

    def answer(self, place: Prefiller, probe: Probe, size: int, cached: int | None, now: float) -> None:
        place.predicted += probe.size - probe.uncached
        place.answered += cached or 0
        if cached is not None and probe.prefix:
            found, had = int(cached / (BLOCK * size / probe.size)), len(probe.had)
            found = max(found, 1) if cached else 0
            if found < had and (not found or found < had - max(1, had / 8)):
                place.cache = {block: used for block, used in place.cache.items() if used > probe.had[found]}
        self.end(place, probe, now, done=True)
        self.pooled += 1

    def fail(self, place: Prefiller, probe: Probe, now: float) -> None:
        """Its blocks that were not there before, and that nobody has used since, do not count as cached."""
        own = range(probe.began + 1, probe.began + len(probe.prefix) + 1)
        for block in probe.prefix[len(probe.had) :]:
            if place.cache.get(block) in own:
                del place.cache[block]
        self.end(place, probe, now, done=False)
        self.waiting.append(probe)

    def count(self, place: Prefiller, queried: int, hits: int) -> None:
        before, place.counters = place.counters, (queried, hits)
        if place.counted is None:
            place.counted = place.answered
            place.judged = (place.predicted, place.counted)
            return
        place.counted += hits - before[1]
        predicted, counted = place.predicted - place.judged[0], place.counted - place.judged[1]
        if max(predicted, counted) < JUDGED:
            return
        place.judged = (place.predicted, place.counted)
        if counted < 0.75 * predicted:
            place.limit = BLOCK * len(place.cache) * max(0.5, counted / predicted)
            place.evict()
        elif place.limit < math.inf:
            place.limit = max(2 * place.limit, JUDGED)
            if place.limit >= min(place.capacity, 512 * 65_536):
                place.limit = math.inf


class Run:
    """The scheduler and the model through the same events."""

    def __init__(self, policy: str, random: Random) -> None:
        count = random.randint(1, 5)
        most, most_pooled = random.choice((None, None, 1, 2, 4)), random.choice((6, 60))
        self.random, self.now, self.chats = random, 0.0, list[list[int]]()
        self.model = Model(policy, [Prefiller(f"p{index}") for index in range(count)], most, most_pooled)
        config = SchedulerConfig(
            prefill_policy=policy, max_prefill_inflight=most, max_pooled=most_pooled, queue_deadline_s=DEADLINE_S
        )
        self.scheduler: Scheduler = a_scheduler(workers=1, slots=1, prefillers=count, config=config)
        self.names = 0

    def submit(self) -> None:
        """A turn of a chat, a new chat with one of two system prompts or none, or a prompt without a prefix."""
        random = self.random
        self.names += 1
        old = random.choice(self.chats) if self.chats and random.random() < 0.6 else None
        chat = old or [1_000_000 * random.randint(1, 3) + index for index in range(random.randint(0, 3))]
        if not old:
            self.chats.append(chat)
        if random.random() < 0.8:
            chat += [10_000_000 + 1_000 * self.names + index for index in range(random.randint(0, 6))]
        prefix = chained(chat) if random.random() < 0.9 else ()
        size = BLOCK * len(prefix) + random.randint(1, random.choice((BLOCK, 20 * BLOCK)))
        probe = Probe(f"r{self.names}", size, prefix, random.choice((0, 0, 0, -1, 1)), self.now)
        spec = RequestSpec(probe.name, size, probe.priority, prefix=prefix, block_tokens=BLOCK if prefix else 0)
        if self.scheduler.submit(spec, self.now) is None:  # refused while all prefillers are down
            self.model.waiting.append(probe)

    def end_a_probe(self) -> None:
        busy = [(each, probe) for each in self.model.prefillers for probe in each.probes]
        if not busy:
            return
        place, probe = self.random.choice(busy)
        if self.random.random() < 0.15:
            self.scheduler.prefill_failed(probe.name, self.now)
            self.model.fail(place, probe, self.now)
            return
        size = max(1, probe.size + self.random.randint(-20, 20))
        right = max(0, probe.size - probe.uncached)
        less = max(0, right - BLOCK * self.random.randint(1, 2))
        cached = self.random.choice((None, right, right, right, right // 2, less, less, 0))
        self.scheduler.prefilled(probe.name, size, self.now, None, cached)
        self.model.answer(place, probe, size, cached, self.now)

    def admit(self) -> None:
        for admission in self.scheduler.admit(self.now):
            self.scheduler.finish(admission.request, "finished", self.now)
            self.model.pooled -= 1

    def change_a_prefiller(self) -> None:
        random, place = self.random, self.random.choice(self.model.prefillers)
        change = random.choice(("down", "up", "up", "usage", "usage", "capacity", "forget", "count", "count"))
        if change in ("down", "up"):
            place.up = change == "up"
            place.cache = place.cache if place.up else {}
            self.scheduler.set_worker_state(place.name, WorkerState(change), self.now)
        elif change == "usage":
            place.usage = random.choice((0.0, 0.9, 0.95, None, None))
            self.scheduler.report_prefiller(place.name, place.usage, self.now)
        elif change == "capacity":
            place.capacity = random.choice((math.inf, 50 * BLOCK, 20 * BLOCK + 1, 0))
            known = None if place.capacity == math.inf else int(place.capacity)
            self.scheduler.report_prefix_cache(place.name, known, self.now)
            place.evict()
        elif change == "forget":
            place.cache = {}
            self.scheduler.forget_prefixes(place.name, self.now)
        else:
            queried, hits = place.counters[0] + random.randint(0, 50_000), place.counters[1]
            hits += random.choice((0, random.randint(0, 3_000), random.randint(0, 50_000)))
            self.scheduler.report_prefix_hits(place.name, queried, hits, self.now)
            self.model.count(place, queried, hits)

    def step(self) -> None:
        self.now += self.random.choice((0.001, 0.01, 0.3)) * self.random.random()
        event = self.random.choices((self.submit, self.end_a_probe, self.admit, self.change_a_prefiller), (8, 5, 2, 1))
        event[0]()

    def decide(self) -> None:
        made = [(prefill.request, prefill.worker) for prefill in self.scheduler.dispatch(self.now)]
        assert made == self.model.dispatch(self.now)
        self.scheduler.snapshot.check_invariants()


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_each_prompt_gets_the_prefiller_that_the_text_describes(policy: str, seed: int) -> None:
    run = Run(policy, Random(seed))
    for _ in range(80):
        run.step()
        if run.random.random() < 0.7:
            run.decide()

"""The baselines of the paper, and two more that a comparison needs: `least_kv` and `pool_fifo`.

The assign-at-once policies bind a request to a worker as soon as its prefill is done, whether a slot is free or not;
the surplus queues at the worker. Random choices are drawn from the seed and the number of draws so far, which is in the
snapshot, so a policy object has no hidden state.
"""

from collections.abc import Iterator
from random import Random

from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import DecodeInstanceState

SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: draws of neighbouring seeds do not overlap


class AssignAtOnce(AdmissionPolicy):
    """Base of the policies that do not wait for a slot: subclasses pick a worker, whatever the request."""

    name = ""
    waits_for_slots = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        while len(snapshot.pool):
            workers = snapshot.up
            if not workers:
                return
            worker = self.pick(workers, snapshot)
            yield Choice(snapshot.pool.front[0], worker, 3, float(-worker.step_load))

    def pick(self, workers: list[DecodeInstanceState], snapshot: ClusterSnapshot) -> DecodeInstanceState:
        """The worker for the next request, out of those that take new ones."""
        raise NotImplementedError

    def draw(self, snapshot: ClusterSnapshot) -> Random:
        """A new random generator for the next decision."""
        snapshot.draws += 1
        return Random(self.seed * SEED_STRIDE + snapshot.draws)


class RandomChoice(AssignAtOnce):
    """Any worker, with equal chance."""

    name = "random"

    def pick(self, workers: list[DecodeInstanceState], snapshot: ClusterSnapshot) -> DecodeInstanceState:
        return self.draw(snapshot).choice(workers)


class RoundRobin(AssignAtOnce):
    """The workers in turn."""

    name = "round_robin"

    def pick(self, workers: list[DecodeInstanceState], snapshot: ClusterSnapshot) -> DecodeInstanceState:
        snapshot.draws += 1
        return workers[(snapshot.draws - 1) % len(workers)]


class PowerOfTwo(AssignAtOnce):
    """The emptier (by requests over slots) of two different workers drawn at random."""

    name = "power_of_two"

    def pick(self, workers: list[DecodeInstanceState], snapshot: ClusterSnapshot) -> DecodeInstanceState:
        if len(workers) == 1:
            return workers[0]
        return min(self.draw(snapshot).sample(workers, 2), key=occupancy)


class JoinShortestQueue(AssignAtOnce):
    """The fewest requests running plus queued, over its slots; ties broken at random."""

    name = "join_shortest_queue"

    def pick(self, workers: list[DecodeInstanceState], snapshot: ClusterSnapshot) -> DecodeInstanceState:
        occupancies = [occupancy(worker) for worker in workers]
        least = min(occupancies)
        return self.draw(snapshot).choice([w for w, share in zip(workers, occupancies, strict=True) if share == least])


class LeastKv(AssignAtOnce):
    """The fewest KV tokens, running requests and queued prompts together; ties to the lowest index."""

    name = "least_kv"

    def pick(self, workers: list[DecodeInstanceState], snapshot: ClusterSnapshot) -> DecodeInstanceState:
        return min(workers, key=lambda worker: worker.step_load)


class PoolFifo(AdmissionPolicy):
    """From the pool, oldest first, to the worker with a free slot and the least KV."""

    name = "pool_fifo"

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        while len(snapshot.pool):
            open_workers = snapshot.open_workers()
            if not open_workers:
                return
            worker = min(open_workers, key=lambda candidate: candidate.step_load)
            yield Choice(snapshot.pool.front[0], worker, 1, float(-worker.step_load))


def occupancy(worker: DecodeInstanceState) -> float:
    """Requests running plus queued, over the slots; each counts for as many as the worker is slower."""
    return worker.spec.slowdown * worker.occupied / worker.spec.slots


ASSIGN_AT_ONCE: dict[str, type[AssignAtOnce]] = {
    policy.name: policy for policy in (RandomChoice, RoundRobin, PowerOfTwo, JoinShortestQueue, LeastKv)
}

"""BR-0 without a pool (paper, appendix "Pool-bypass deployment path for BR-0").

A prefilled request goes at once to the worker with the largest F_g(s) = alpha s - beta max(0, s - m_g). The load behind
m_g is virtual: it counts what runs and what was dispatched and does not run yet, which is how the snapshot charges a
request from its admission on. The KV transfer then overlaps with the steps of running requests instead of following a
freed slot; the price is that every request is placed alone, so there is no subset to choose.

Requests in flight per worker are capped at its slots plus a margin, which bounds the connector's send buffers; while
all workers are at their cap, requests wait in the pool in their order.

Below the envelope F is alpha s on every worker that has the margin, so ties are the rule: they go to the lightest
worker, as in stage 1, then to the lowest index.
"""

import math
from collections.abc import Iterator

from balanceroute.core.balance_route import PresentMargins
from balanceroute.core.policy import Choice
from balanceroute.core.snapshot import ClusterSnapshot


class PoolBypass:
    """The policy `br_0` with `pool_bypass`: assigns as soon as a prefill is done."""

    name = "br_0"
    waits_for_slots = False
    horizon_steps = 0

    def __init__(self, alpha: float, beta: float | None, margin: int) -> None:
        self.alpha = alpha
        self.beta = beta
        self.margin = margin

    def patience_s(self, prompt_tokens: int, snapshot: ClusterSnapshot) -> float:
        """Infinite: nothing is ever passed over."""
        return math.inf

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        """Never: nothing is held back beside a free slot."""
        return math.inf

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        """Yield an admission for each request, in waiting order, while a worker is below its cap. O(G) each."""
        margins = PresentMargins(snapshot, self.alpha, self.beta)
        workers = [worker for worker in snapshot.up if len(worker.active) < worker.own_slots + self.margin]
        while workers and len(snapshot.pool):
            request = snapshot.pool.front[0]
            worker, score = margins.best(workers, request.prompt_tokens)
            yield Choice(request, worker, 3, score)
            margins.admit(request, worker)
            if len(worker.active) >= worker.own_slots + self.margin:
                workers.remove(worker)

"""A policy of one's own: who fits goes first, and who does not fit waits a little.

    PYTHONPATH=examples python -m balanceroute.testing own_policy:FirstFit patience_s=5
    PYTHONPATH=examples balanceroute replay --policy own_policy:FirstFit --param patience_s=5 --max-requests 2000

In the YAML of a router:

    routing: {policy: "own_policy:FirstFit", options: {patience_s: 5}}
"""

from collections.abc import Iterator

from balanceroute import AdmissionPolicy, Choice, ClusterSnapshot


class FirstFit(AdmissionPolicy):
    """To the lightest worker with a free slot goes the oldest request that does not make it the heaviest of all.

    A request that fits nowhere lets smaller ones pass for `patience_s` seconds; then it goes whether it fits or not.
    """

    name = "first_fit"

    def __init__(self, patience_s: float = 10.0) -> None:
        if patience_s < 0:
            raise ValueError(f"patience_s must be at least 0, not {patience_s}")
        self.patience = patience_s

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        """The scheduler applies each choice before it asks for the next, so the snapshot is always the present one."""
        while len(snapshot.pool):
            with_room = [worker for worker in snapshot.workers if worker.free_slots]
            if not with_room:
                return
            worker = min(with_room, key=lambda candidate: candidate.total_load)
            margin = max(other.total_load for other in snapshot.workers) - worker.total_load
            for request in snapshot.pool.front:  # the class of the lowest priority number, oldest first
                if request.prompt_tokens <= margin or now >= request.ready_s + self.patience:
                    yield Choice(request, worker, stage=1, score=float(margin - request.prompt_tokens))
                    break
            else:
                return

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        """It holds requests back beside free slots, so it says when to ask again: when the oldest has waited enough."""
        front = snapshot.pool.front if len(snapshot.pool) else ()
        return min((request.ready_s + self.patience for request in front), default=float("inf"))

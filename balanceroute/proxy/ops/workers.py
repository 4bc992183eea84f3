"""Why a worker gets nothing, in an operator's words."""

from balanceroute.proxy.workers.circuit import CircuitState
from balanceroute.proxy.workers.fleet import Worker


def why_not_up(worker: Worker) -> str:
    """The first that holds of what can keep requests from a worker; empty where nothing does."""
    reasons = (
        (worker.stalled, "it runs requests and generates no tokens"),
        (not worker.healthy and not worker.seen_healthy, "it has not answered /health since the router started"),
        (not worker.healthy, "it does not answer /health"),
        (worker.circuit.state is CircuitState.OPEN, "requests to it fail"),
        (worker.leaving, "it was removed and finishes what it has"),
        (worker.drained, "it was drained by an operator"),
        (worker.doubted, "its last health check had no answer"),
        (worker.circuit.state is not CircuitState.CLOSED, "it failed or refused a request and gets a pause"),
    )
    return next((text for holds, text in reasons if holds), "")

"""Why a worker gets nothing, in an operator's words."""

from balanceroute.proxy.workers.circuit import CircuitState
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.liveness import why_not_healthy


def why_not_up(worker: Worker) -> str:
    """The first that holds of what can keep requests from a worker; empty where nothing does."""
    reasons = (
        (worker.stalled, "it runs requests and generates no tokens"),
        (not worker.healthy, why_not_healthy(worker)),
        (worker.circuit.state is CircuitState.OPEN, "requests to it fail"),
        (worker.leaving, "it was removed and finishes what it has"),
        (worker.drained, "it was drained by an operator"),
        (worker.doubted, "its last health check had no answer"),
        (worker.circuit.state is not CircuitState.CLOSED, "it failed or refused a request and gets a pause"),
    )
    return next((text for holds, text in reasons if holds), "")

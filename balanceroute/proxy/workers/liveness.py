"""What a worker's /health says: a single look out of turn, and why it counts as down."""

from typing import Final

from balanceroute.errors import UpstreamError
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.polling import Silent, answer_of

_LIMIT: Final = 2**20


async def is_alive(worker: Worker, timeout_s: float) -> bool:
    """Whether its /health answers, and with no 5xx, within `timeout_s`; so it is said where the fault may be ours."""
    try:
        status = await answer_of(health_status(worker, timeout_s), timeout_s)
    except Silent as silence:
        return silence.ours
    except UpstreamError:
        return False
    return status < 500


async def health_status(worker: Worker, connect_timeout_s: float) -> int:
    """The status of its /health. Raises: UpstreamError."""
    reply = await worker.upstream.request("GET", "/health", connect_timeout_s=connect_timeout_s)
    await reply.read(_LIMIT)
    return reply.status


def why_not_healthy(worker: Worker) -> str:
    """What an operator has to know of a worker whose health checks fail."""
    said = worker.health_said
    if isinstance(said, int):
        return f"its /health answers {said}"
    began = "it does not answer /health" if worker.seen_healthy else "it has not answered /health yet"
    return f"{began} ({said})" if said else began

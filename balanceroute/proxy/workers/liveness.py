"""A single check of a worker's /health, outside the regular ones."""

import asyncio
from typing import Final

from balanceroute.errors import UpstreamError
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.polling import Silent, answer_of

_LIMIT: Final = 2**20


async def is_alive(worker: Worker, timeout_s: float) -> bool:
    """Whether its /health answers within `timeout_s`, without a 5xx; also True if the fault may be the router's.

    All who ask while a check is under way share it: thousands of streams of a worker that dies ask at once.
    """
    check = worker.alive_check
    if check is None or check.done():
        check = worker.alive_check = asyncio.get_running_loop().create_task(_is_alive(worker, timeout_s))
    return await asyncio.shield(check)


async def _is_alive(worker: Worker, timeout_s: float) -> bool:
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

"""A single look at a worker, out of turn."""

import asyncio
from typing import Final

from balanceroute.errors import UpstreamError
from balanceroute.proxy.workers.fleet import Worker

_LIMIT: Final = 2**20


async def is_alive(worker: Worker, timeout_s: float) -> bool:
    """Whether its /health answers, and with no 5xx, within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            reply = await worker.upstream.request("GET", "/health", connect_timeout_s=timeout_s)
            await reply.read(_LIMIT)
    except (UpstreamError, TimeoutError):
        return False
    return reply.status < 500

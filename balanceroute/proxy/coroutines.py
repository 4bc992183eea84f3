"""The coroutines of a running router: each is restarted after a bug, until all are stopped."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.ops.admin import state
from balanceroute.proxy.ops.services import Services

log = logging.getLogger(__name__)

QUIET_S: Final = 60.0  # between two log lines of errors of one kind: with the state a line may have a megabyte
_RESTART_S: Final = 0.1


def after(event: asyncio.Event | None, run: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """A coroutine function that waits for the event, then runs `run`; without an event, `run` itself."""
    if event is None:
        return run

    async def later() -> None:
        await event.wait()
        await run()

    return later


def start_all(services: ClientServices, coroutines: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
    """Start these, by their names."""
    for name, run in coroutines.items():
        services.tasks[name] = services.loop.create_task(supervised(services, name, run), name=name)


def start_refits(services: Services) -> None:
    """Start the re-fits of the present predictor, and stop those of the former one."""
    before = services.tasks.pop("refits", None)
    if before is not None:
        before.cancel()
    refits = services.ledger.refits()
    if refits is not None:
        start_all(services, {"refits": refits})


async def stop(services: Services) -> None:
    """Stop everything; requests under way are cut off."""
    try:
        await stop_tasks(services)
    finally:
        if services.forecasts is not None:
            services.forecasts.close()
        services.ledger.close()


async def stop_tasks(services: ClientServices) -> None:
    """End the coroutines, the drains and the connections to workers."""
    tasks = list(services.tasks.values())
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await services.drainer.close()
    services.fleet.close()
    if services.pins is not None:
        services.pins.close()
    for result in results:
        if isinstance(result, Exception):
            raise result


def supervised(services: ClientServices, name: str, run: Callable[[], Awaitable[None]]) -> Coroutine[Any, Any, None]:
    """A coroutine that runs `run` again and again; a bug in it is logged, at most once per `QUIET_S`."""
    services.metrics.tasks_failed.inc(name, by=0)
    logged_s: dict[type[BaseException], float] = {}

    async def forever() -> None:
        while True:
            try:
                await run()
            except (Exception, SystemExit) as error:  # a user's own policy may call `sys.exit`
                # a router that has stopped deciding is worse than one that continues after a bug
                services.metrics.tasks_failed.inc(name)
                now = services.loop.time()
                if now - logged_s.get(type(error), -math.inf) >= QUIET_S:
                    logged_s[type(error)] = now
                    log.exception("internal error", extra={"where": name, "state": _state_for_log(services)})
                if services.strict:
                    raise
                await asyncio.sleep(_RESTART_S)

    return forever()


def _state_for_log(services: ClientServices) -> dict[str, Any] | None:
    """The state, if this process has it and it is readable."""
    with suppress(Exception):
        return state(services) if isinstance(services, Services) else None
    return None

"""The fourth coroutine: it ends what has waited too long.

    in the queue or the pool    expired by the scheduler; the client gets a 503, pinned KV is drained
    at a worker                 the first byte, or the next token, is late: that try has failed
    at a silent worker          moved elsewhere, or left there because its whole group is silent (`mover.py`)
    at a worker that does not   an answer has more tokens than any context window: the request has failed
      stop
    at the client               it has stopped reading with a full buffer: cut off
    altogether                  the request's own deadline: 504, or an error event; in the queue or the pool, as above
    leaving workers             forgotten once they hold nothing

It checks a few numbers per request several times per second, instead of a timer per request and try. It also reports
new tokens to the scheduler, and workers' progress to the fleet.
"""

import asyncio
from collections.abc import Callable, Sized
from functools import partial
from typing import Final

from balanceroute.core.types import Phase
from balanceroute.errors import BalanceRouteError, QueueTimeout, UpstreamTimeout
from balanceroute.proxy.admission.decider import MOST_ENDED
from balanceroute.proxy.life.errors import TOO_LONG, ClientStalled, DeadlineExceeded
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.life.mover import Mover
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.telemetry.ticks import until_tick_s
from balanceroute.proxy.telemetry.turns import over_turns
from balanceroute.proxy.wire.answers import UnreadableEvent
from balanceroute.proxy.wire.bounds import MAX_TOKENS
from balanceroute.proxy.workers.silence import SETTLE_S

PERIOD_S: Final = 0.25
_WAITS_FOR: Final = {Phase.QUEUED: "a prefiller", Phase.POOLED: "a decode worker"}


class PoolReaper:
    """Looks every `PERIOD_S`."""

    def __init__(self, services: LifeServices, expire: Callable[[int], Sized], judges: bool = True) -> None:
        """`expire` ends requests that have waited too long in the queue or pool, at most so many, and returns them.
        `judges`: whether this process judges workers.
        """
        self._services, self._expire = services, expire
        self._expires = False  # the next turn of the loop goes on with it
        self._mover = Mover(services, judges)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(until_tick_s(self._services.tickets.now(), PERIOD_S))
            self.look()

    def look(self) -> None:
        """One look at everything that waits."""
        self._services.tickets.settle()
        if not self._expires:
            self._expire_all()
        self._services.fleet.sweep()
        self._services.metrics.fold()
        now = self._services.tickets.now()
        for leg in self._services.legs:
            leg.note_progress()
        for leg in self._services.legs:  # when the progress of all workers is known
            leg.kv.watch_pull()
        self._mover.look(now, PERIOD_S)
        if now - self._services.attention.since_s >= SETTLE_S:  # bytes that came during a pause have been read
            self._services.last_look_s = now
        legs = [leg for leg in self._services.legs if leg.wants_look(now, MAX_TOKENS)]
        over_turns(self._services.loop, legs, partial(self._look_at, now), MOST_ENDED)

    def _expire_all(self) -> None:
        """Expire what has waited too long, a bounded number in a turn of the loop, as `over_turns` does."""
        self._expires = False
        if len(self._expire(MOST_ENDED)) == MOST_ENDED:
            self._expires = True
            self._services.loop.call_soon(self._expire_all)

    def _look_at(self, now: float, leg: Leg) -> None:
        if now > leg.deadline_s:
            leg.interrupt(_too_late(leg))
        elif leg.answer.scanner.tokens > MAX_TOKENS:  # their ids are kept, and need no client that reads
            worker, tier = leg.last_tried
            leg.interrupt(UnreadableEvent(f"its answer has more than {MAX_TOKENS} tokens", worker=worker, tier=tier))
        elif leg.blocked_by_client:
            # the worker is not read, so its silence means nothing
            leg.try_deadline_s = max(leg.try_deadline_s, now + self._services.config.limits.idle_timeout_s)
            leg.generates_from_s = now
            leg.stalled_since_s = min(leg.stalled_since_s, now)
            if now - leg.stalled_since_s > self._services.config.limits.client_stall_timeout_s:
                leg.interrupt(ClientStalled("the client has stopped reading"))
        elif leg.late(now) and not self._mover.tolerates(leg, now):
            worker, tier = leg.last_tried
            leg.interrupt(UpstreamTimeout("no answer in time", worker=worker, tier=tier))
        else:
            leg.stalled_since_s = float("inf")


def _too_late(leg: Leg) -> BalanceRouteError:
    """The error for a request's own deadline; it blames no worker if the request still waits for one."""
    waits_for = _WAITS_FOR.get(leg.ticket.phase)
    if waits_for is None:
        return DeadlineExceeded(f"{TOO_LONG}.", worker=leg.last_tried[0], tier="")
    return QueueTimeout(f"{TOO_LONG}, while it waited for {waits_for}.")

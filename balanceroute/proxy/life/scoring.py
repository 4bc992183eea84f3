"""Requests for the logprobs of their prompt only: `echo` with `max_tokens: 0`.

A prefiller computes the prompt anyway, so it answers alone, with no KV pinned and no decode worker involved:

    submit -> QUEUED -> PREFILLING -> GONE
                ^---------'

Decode first, the scheduler assigns prefillers only on a decode worker's request, so the least busy one is taken
here. While all rest, the request waits.
The table `Scoring.follows` is what runs.
"""

import asyncio
from typing import Any, ClassVar, Final

from balanceroute.core.types import GONE, PREFILLING, QUEUED, Phase, WorkerState
from balanceroute.errors import InvariantError, NoHealthyWorkers, QueueTimeout
from balanceroute.proxy.life.leg import (
    COMPLETE,
    PREFILL_FAILED,
    TAKEN,
    Event,
    Leg,
    Transitions,
)
from balanceroute.proxy.life.outlet import write_last
from balanceroute.proxy.life.prefilling import next_prefiller, try_probe
from balanceroute.proxy.wire.bounds import shown_id
from balanceroute.proxy.wire.prompt_echo import scored_answer, scored_events
from balanceroute.proxy.wire.sse import DONE
from balanceroute.proxy.workers.fleet import Worker

LOOK_S: Final = 0.1  # between two looks whether a prefiller's rest is over


class Scoring:
    """The strategy of a request that ends with its prefill."""

    __slots__ = ("_leg", "_prefiller")

    first: ClassVar[Phase] = QUEUED
    follows: ClassVar[Transitions] = {
        QUEUED: {TAKEN: PREFILLING},
        PREFILLING: {COMPLETE: GONE, PREFILL_FAILED: QUEUED},
    }

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._prefiller: Worker

    async def queued(self) -> Event:
        """Wait for a prefiller; decode first, choose one."""
        leg = self._leg
        if leg.services.tickets.decode_first:
            self._prefiller = await self._when_up()
            leg.prefiller_id = self._prefiller.id
        else:
            self._prefiller = await next_prefiller(leg)
        return TAKEN

    async def prefilling(self) -> Event:
        """Have the prompt computed, and answer with the prefiller's logprobs."""
        leg, services = self._leg, self._leg.services
        result = await try_probe(leg, self._prefiller)
        if result is None:
            if not services.tickets.decode_first:
                leg.ticket.prefill_failed()
            return PREFILL_FAILED
        leg.answer.prefilled(result)
        if result.reply is None:
            raise InvariantError("the reply with a prompt's scores was not kept")
        await self._answer(result.reply)
        return COMPLETE

    async def _answer(self, reply: dict[str, Any]) -> None:
        answer = self._leg.answer
        scanner, outlet = answer.scanner, answer.outlet
        scanner.end, scanner.finish_reason = DONE, "length"
        # the engine generates one token, and counts it, though it shows none
        scanner.tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
        scanner.fingerprint = reply.get("system_fingerprint")
        scanner.identity.put_into({"model": reply.get("model")})
        reply = {**reply, "id": shown_id(reply.get("id"), self._leg.upstream_id, self._leg.id)}
        if not answer.request.stream:
            outlet.whole(scored_answer(reply))
            return
        outlet.start()
        await write_last(outlet, scored_events(answer.request, reply, answer.part))

    async def _when_up(self) -> Worker:
        """The least busy prefiller, as soon as one is up. Raises: NoHealthyWorkers: none only rests; QueueTimeout."""
        leg, services = self._leg, self._leg.services
        since_s = services.tickets.now()
        try:
            while True:
                leg.ticket.check()
                worker = self._least_busy()
                if worker is not None:
                    return worker
                if services.tickets.now() - leg.ticket.arrived_s > services.config.queue.deadline_s:
                    raise QueueTimeout("The request waited too long for a prefiller.")
                await asyncio.sleep(LOOK_S)
        finally:
            leg.prefill_wait_s += services.tickets.now() - since_s

    def _least_busy(self) -> Worker | None:
        """The least busy prefiller of those still present; None: all rest. Raises: NoHealthyWorkers.

        At a relay the fleet knows of states sooner than the view.
        """
        fleet = self._leg.services.fleet
        here = [p for p in self._leg.services.tickets.view().prefillers if p.id in fleet]
        up = [p for p in here if fleet[p.id].state is WorkerState.UP]
        if up:
            return fleet[min(up, key=lambda p: (fleet[p.id].in_use, p.kv_usage or 0.0)).id]
        if not any(fleet[p.id].able for p in here):
            raise NoHealthyWorkers("No prefiller can serve the request now.")
        return None

"""Requests for the logprobs of their prompt only: `echo` with `max_tokens: 0`.

A prefiller computes the prompt anyway, so it answers alone, with no KV pinned and no decode worker involved:

    submit -> QUEUED -> PREFILLING -> GONE
                ^---------'

The order is the same decode first: the scheduler knows by its limit of 0 tokens that it needs no slot.
The table `Scoring.follows` is what runs.
"""

from typing import Any, ClassVar

from balanceroute.core.types import GONE, PREFILLING, QUEUED, Phase
from balanceroute.errors import InvariantError
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
        """Wait for a prefiller."""
        self._prefiller = await next_prefiller(self._leg)
        return TAKEN

    async def prefilling(self) -> Event:
        """Have the prompt computed, and answer with the prefiller's logprobs."""
        leg = self._leg
        result = await try_probe(leg, self._prefiller)
        if result is None:
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
        named = {"model": reply.get("model")}
        scanner.identity.put_into(named)
        reply = {**reply, **named, "id": shown_id(reply.get("id"), self._leg.upstream_id, self._leg.id)}
        if not answer.request.stream:
            outlet.whole(scored_answer(reply))
            return
        outlet.start()
        await write_last(outlet, scored_events(answer.request, reply, answer.part))

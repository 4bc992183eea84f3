"""Prefill first: a decode worker is chosen for a request whose KV waits at a prefiller, and pulls it.

    submit -> QUEUED -> PREFILLING -> POOLED -> DECODING -> GONE
                ^---------'                       |
                '---------------------------------' cut off: prompt and answer so far are the next prompt

The table `Pull.follows` is what runs.
"""

import asyncio
from typing import ClassVar, Final

from mypy_extensions import mypyc_attr

from balanceroute.core.types import DECODING, GONE, POOLED, PREFILLING, QUEUED, Phase
from balanceroute.errors import UpstreamError
from balanceroute.proxy.life.cut_off import failed, given_back, requeue_rest
from balanceroute.proxy.life.decoding import decode
from balanceroute.proxy.life.errors import KvLost, KvTooOld
from balanceroute.proxy.life.leg import (
    ADMITTED,
    COMPLETE,
    CUT_OFF,
    PREFILL_FAILED,
    PREFILLED,
    TAKEN,
    Event,
    Leg,
    Transitions,
    clear_frames,
)
from balanceroute.proxy.life.prefilling import next_prefiller, try_probe
from balanceroute.proxy.workers.fleet import Worker

# For a decoder to pass a request from its socket to its engine. An idle one needs milliseconds; its first event ends
# the wait. A real vLLM on an overloaded machine had not done it after 0.5 s, and its prefiller kept the KV.
DECODE_GRACE_S: Final = 5.0


@mypyc_attr(allow_interpreted_subclasses=True)
class Pull:
    """The strategy of connectors whose decode worker pulls: mooncake_v1, nixl."""

    __slots__ = ("_leg", "_prefiller", "_worker")

    first: ClassVar[Phase] = QUEUED
    follows: ClassVar[Transitions] = {
        QUEUED: {TAKEN: PREFILLING},
        PREFILLING: {PREFILLED: POOLED, PREFILL_FAILED: QUEUED},
        POOLED: {ADMITTED: DECODING},
        DECODING: {COMPLETE: GONE, CUT_OFF: QUEUED},
    }

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._prefiller: Worker
        self._worker: Worker

    async def queued(self) -> Event:
        """Wait for a prefiller."""
        self._prefiller = await next_prefiller(self._leg)
        return TAKEN

    async def prefilling(self) -> Event:
        """Have the prompt computed."""
        leg, services, worker = self._leg, self._leg.services, self._prefiller
        sent_s = services.tickets.now()
        result = await try_probe(leg, worker)
        if result is None:
            leg.ticket.prefill_failed()
            return PREFILL_FAILED
        # the answer may have waited since the loop's last turn
        pinned_s = sent_s if sent_s > services.last_look_s else services.last_look_s
        leg.kv.pinned(worker, result.kv_transfer_params, pinned_s)
        if services.pins is not None:
            leg.record(services.pins, worker, result)
        leg.check_abandoned(worker)
        leg.answer.check_prefill(worker, result)
        leg.answer.prefilled(result)
        leg.ticket.prefilled(result.prompt_tokens, result.cached_tokens)
        return PREFILLED

    async def pooled(self) -> Event:
        """Wait for a slot at a decode worker."""
        self._worker = await self._leg.admission()
        return ADMITTED

    async def decoding(self) -> Event:
        """Have the answer generated, or the rest of it."""
        leg, worker = self._leg, self._worker
        tokens, why = leg.answer.scanner.tokens, "recomputed"
        lost: UpstreamError | None = None
        too_old = False
        try:
            if await decode(leg, worker, DECODE_GRACE_S):
                return COMPLETE
        except KvTooOld as gone:
            too_old, why = True, "worker_lost" if isinstance(gone, KvLost) else "pulled_late"
            worker.circuit.inconclusive()
        except UpstreamError as error:
            lost = error
        try:
            if too_old:
                await asyncio.sleep(leg.retries.count_without_token(worker))
            elif lost is not None:
                leg.check_abandoned(worker)
                await failed(leg, worker, lost, tokens)
            else:
                await given_back(leg, worker, tokens)
            leg.check_abandoned(worker)  # no other prefill is begun for a client that has left
            return await requeue_rest(leg, lost, why)
        finally:
            clear_frames(lost)
            lost = None  # it keeps the frames that it came through, this one among them

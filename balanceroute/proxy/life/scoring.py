"""Requests that want nothing but what their prompt is worth: `echo` with `max_tokens: 0`.

A prefiller computes the prompt anyway, so it answers alone, with no KV pinned and no decode worker involved:

    submit -> [ wait for a prefiller -> ask it ] -> finish
                     ^------- failed ------'

Decode first, the scheduler gives out prefillers only to requests that a decode worker has asked for, so the least busy
one is taken here.
"""

import asyncio

from balanceroute.core.types import WorkerState
from balanceroute.errors import InvariantError, NoHealthyWorkers, UpstreamError
from balanceroute.proxy.admission.ledger import RETRY_AFTER_S, Ticket
from balanceroute.proxy.life.lifecycle import Leg
from balanceroute.proxy.life.relay import write_part
from balanceroute.proxy.wire.bounds import shown_id
from balanceroute.proxy.wire.payloads import PrefillResult
from balanceroute.proxy.wire.prompt_part import scored_answer, scored_events
from balanceroute.proxy.wire.sse import StreamEnd
from balanceroute.proxy.workers.fleet import Worker


class ScoringLeg(Leg):
    """A leg that ends with its prefill."""

    __slots__ = ()

    async def _serve(self, ticket: Ticket) -> None:
        decode_first = self._s.ledger.bounds.decode_first
        result = await (self._ask_least_busy() if decode_first else self._prefill(ticket))
        reply = result.reply
        if reply is None:
            raise InvariantError("the reply with a prompt's scores was not kept")
        if self.scanner.end is None:
            self.scanner.end, self.scanner.finish_reason = StreamEnd.DONE, "length"
            # the engine generates one token, and counts it, though it shows none
            self.scanner.tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
        reply = {**reply, "id": shown_id(reply.get("id"), self.upstream_id, self.id)}
        outlet = self._outlet
        if not self.request.stream:
            outlet.whole(scored_answer(reply))
            return
        outlet.start()
        body = scored_events(self.request, reply, **self._scanner_options)
        if outlet.ends_response:
            outlet.end(body)
        else:
            await write_part(outlet, body)

    async def _ask_least_busy(self) -> PrefillResult:
        while True:
            worker = self._least_busy()
            self.prefiller = worker.id
            try:
                result = await self._probe(worker)
            except UpstreamError as error:
                self._check_abandoned(worker)
                await asyncio.sleep(self._judge(error, worker, "prefill"))
            else:
                self._check_abandoned(worker)
                self.prompt_tokens, self.cached_tokens = result.prompt_tokens, result.cached_tokens
                self._learn_size(result.prompt_tokens)
                self.scanner = self._new_scanner(result)
                return result

    def _least_busy(self) -> Worker:
        """Raises: NoHealthyWorkers."""
        up = [p for p in self._s.ledger.view().prefillers if p.state is WorkerState.UP]
        if not up:
            raise NoHealthyWorkers("No prefiller can serve the request now.", retry_after_s=RETRY_AFTER_S)
        chosen = min(up, key=lambda p: (self._s.fleet[p.id].in_use, p.kv_usage or 0.0))
        return self._s.fleet[chosen.id]

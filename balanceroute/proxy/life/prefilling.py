"""One try at a prefiller: the probe, which makes it compute the prompt and pin the KV.

If the client leaves meanwhile the try does not end at once where KV is pinned: see `leg.py`.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final

from balanceroute.core.types import UP
from balanceroute.errors import ConnectionLost, ForeignReply, NoCompletion, ReplyTooLarge, UpstreamError
from balanceroute.proxy.life.errors import NothingPinned
from balanceroute.proxy.life.leg import REPLY_LIMIT, Leg, clear_frames
from balanceroute.proxy.life.retries import status_error
from balanceroute.proxy.wire.bounds import MAX_ERROR_BYTES
from balanceroute.proxy.wire.connectors import connector_of
from balanceroute.proxy.wire.payloads import probe_body, score_body
from balanceroute.proxy.wire.probe_reply import PrefillResult, parse_probe_reply
from balanceroute.proxy.workers.connector_check import NO_PARAMETERS
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.identity import check_id
from balanceroute.proxy.workers.reply import Reply

# To hang up costs (chance to hit the window) x (480 s of pinned KV), to continue half of the prefill's time:
# with a window of 20 ms between engine and reply (a busy machine) both are equal for a prefill of 4.4 s.
PROBE_GRACE_S: Final = 5.0
UNASKED_REPLY_LIMIT: Final = 64 * 2**20  # bytes, where the client asked for nothing of it: ids and KV parameters


async def next_prefiller(leg: Leg) -> Worker:
    """Wait for the prefiller that takes the request. Raises: QueueTimeout."""
    services, ticket = leg.services, leg.ticket
    waiting_since_s = services.tickets.now()
    try:
        while True:
            worker = services.fleet[await leg.retries.wait_for_worker(ticket, ticket.prefiller())]
            if worker.state is UP:
                leg.prefiller_id = worker.id
                return worker
            ticket.prefill_failed()
    finally:
        leg.prefill_wait_s += services.tickets.now() - waiting_since_s


async def try_probe(leg: Leg, worker: Worker) -> PrefillResult | None:
    """Ask the prefiller; None: the try has failed and its pause is over, so another one may be made.

    Raises: ClientGone; UpstreamError: it was the last try.
    """
    try:
        return await probe(leg, worker)
    except UpstreamError as error:
        leg.check_abandoned(worker)
        wait_s = leg.retries.judge(error, worker, begun=bool(leg.answer.scanner.tokens))
        clear_frames(error)
    await asyncio.sleep(wait_s)
    return None


async def probe(leg: Leg, worker: Worker) -> PrefillResult:
    """Ask the prefiller once. Raises: UpstreamError."""
    services, request = leg.services, leg.answer.request
    leg.new_try()
    deadline_s = services.tickets.now() + services.config.limits.first_byte_timeout_s.prefill
    pins = not request.scores_only
    leg.enter(worker, deadline_s, PROBE_GRACE_S if pins else 0.0)
    try:
        result = await ask(leg, worker, probe_body(request) if pins else score_body(request))
        if pins and result.kv_transfer_params is None:
            services.doubt_connector(worker, NO_PARAMETERS.format(services.config.connector))
            raise worker.failure(NothingPinned, "it returned no kv_transfer_params")
        has_prefilled(leg, worker, result)
        return result
    except (ConnectionLost, ForeignReply, NoCompletion, ReplyTooLarge):
        if pins:
            services.drainer.orphan()  # the parameters of what it has pinned, if anything, are lost
        raise
    except asyncio.CancelledError:
        worker.circuit.inconclusive()
        if pins:
            services.drainer.orphan()  # it may finish all the same
        error = leg.interruption()
        if error is None:
            raise
        raise error from None
    finally:
        leg.leave(worker)


def ask(leg: Leg, worker: Worker, body: bytes) -> Awaitable[PrefillResult]:
    """A prefiller's answer to this body. Raises, awaited: UpstreamError: an error, or an answer to another request.

    No coroutine, which would keep the body until the answer comes.
    """
    path, headers = leg.answer.request.path, worker.headers_of(leg.upstream_id, leg.headers)
    connect_s = leg.services.config.limits.connect_timeout_s
    return _result(leg, worker, worker.upstream.request("POST", path, body, headers, connect_timeout_s=connect_s))


async def _result(leg: Leg, worker: Worker, asked: Awaitable[Reply]) -> PrefillResult:
    request, reply = leg.answer.request, await asked
    if reply.status != 200:
        raise status_error(reply, await reply.read(MAX_ERROR_BYTES, cut=True), worker)
    asks = request.prompt_wishes is not None
    answer = await reply.read(REPLY_LIMIT if asks else UNASKED_REPLY_LIMIT)
    result = parse_probe_reply(answer, worker=worker.id, keep=asks)
    check_id(worker, result.reply_id, leg.upstream_id)
    result.reply_id = None  # may be longer than all else that is kept
    return result


def has_prefilled(leg: Leg, worker: Worker, result: PrefillResult) -> None:
    """Note that the prefiller has computed the prompt. Raises: WrongConnector: its parameters can't be used."""
    if result.kv_transfer_params is not None and worker.kv_connector is None:
        leg.services.note_connector(worker, connector_of(result.kv_transfer_params))
    worker.progress_s = leg.services.tickets.now()
    worker.has_begun(worker.progress_s)
    worker.has_served(leg.answer.request.model)
    leg.retries.prefilled()

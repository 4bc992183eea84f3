"""One try at a decode worker: the request with its KV's parameters, its stream to the client, and how it ended.

How the stream ends, and what that means:

| the worker's stream | this try |
|---|---|
| [DONE] after a finish reason | complete |
| broken off after a finish reason | complete, without a [DONE] of ours |
| [DONE] without one, or `stop_reason: "recomputed"` | the request was given back: the answer continues elsewhere |
| `finish_reason: "abort"`: the engine is being stopped | an error, which `retries.py` judges |
| broken off, an error event, a damaged event, no JSON, another request's | the same |
| its first event comes when its KV may have been dropped before the worker pulled it | not read, made anew |
"""

import asyncio
import logging
import math
from collections.abc import Awaitable
from functools import partial

from balanceroute.config import Config
from balanceroute.errors import BadUpstreamReply, BalanceRouteError, EdgeFull, UpstreamError, UpstreamStatus
from balanceroute.proxy.life.errors import ClientGone, ClientStalled, KvTooOld, PromptsDiffer
from balanceroute.proxy.life.leg import REPLY_LIMIT, Leg
from balanceroute.proxy.life.retries import event_error, status_error
from balanceroute.proxy.life.streaming import stream_events
from balanceroute.proxy.wire.answers import correct_answer
from balanceroute.proxy.wire.bounds import ABORT, MAX_ERROR_BYTES, aborted
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.payloads import decode_body
from balanceroute.proxy.wire.sse import DONE, StreamEnd
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.identity import check_id, foreign_reply, learn_id
from balanceroute.proxy.workers.reply import Reply

log = logging.getLogger(__name__)

_NO_ANSWER = frozenset((StreamEnd.ERROR, StreamEnd.MALFORMED, StreamEnd.FOREIGN))
_GOES_ON = frozenset((None, DONE, StreamEnd.NO_DONE))  # or is complete


async def decode(leg: Leg, worker: Worker, grace_s: float) -> bool:
    """Let the worker decode; True when the answer is complete, False when it was given back.

    Uses up `leg.kv.params`, unless the worker certainly has not seen them.

    Args: grace_s: how long to wait for its first event when the client goes.

    Raises: UpstreamError; ClientStalled; KvTooOld: no request was sent, or its answer was not used.
    """
    answer, params, now = leg.answer, leg.kv.params, leg.services.tickets.now()
    assert params is not None
    leg.decoder_id = worker.id
    streams = answer.request.streams_upstream
    leg.enter(worker, now + first_bytes_s(leg.services.config, answer.request), grace_s)
    leg.generates_from_s = now
    tokens, answered = answer.scanner.tokens, False
    try:
        try:
            reply = leg.reply = await _asked(leg, worker, params)
            if streams:
                leg.kv.written(worker)
            if reply.status != 200:
                raise await _refusal(leg, worker, reply, params)
            if reply.header(b"content-encoding") not in (None, b"identity"):
                raise worker.failure(BadUpstreamReply, "it compressed its reply unasked")
            complete = await (_stream(leg, worker, reply) if streams else _whole(leg, worker, reply))
            answered = True
            if complete:
                worker.circuit.success()  # also of an answer that finished in the same read as what is wrong behind it
                worker.has_served(answer.request.model)
            return complete
        except (ClientGone, KvTooOld, PromptsDiffer):
            answered = True  # the worker, if it was asked, has begun its answer, so it has pulled the KV
            raise
        except EdgeFull:  # for more of an unstreamed answer, which says nothing about the worker
            worker.circuit.inconclusive()
            raise
        except asyncio.CancelledError:
            worker.circuit.inconclusive()
            interruption = leg.interruption()
            if interruption is None:
                raise
        return await _interrupted(leg, interruption)
    finally:
        _left(leg, worker, has_pulled=answered or answer.scanner.tokens > tokens)


def _asked(leg: Leg, worker: Worker, params: bytes) -> Awaitable[Reply]:
    """Send the request; awaited, returns the reply's head. No coroutine, which would keep the body until that comes."""
    request, kv = leg.answer.request, leg.kv
    kv.cache_salt = worker.cache_salt
    return worker.upstream.request(
        "POST",
        request.path,
        decode_body(request, params, kv.cache_salt + _apart(leg, worker)),
        worker.headers_of(leg.upstream_id, leg.headers),
        connect_timeout_s=leg.services.config.limits.connect_timeout_s,
        retry_stale=False,  # a worker that took the request and died looks the same: the KV may be pulled
        about_to_send=partial(kv.spend, worker, request.streams_upstream),
    )


def _left(leg: Leg, worker: Worker, *, has_pulled: bool) -> None:
    """Release what the try holds. `has_pulled`: a worker that got the parameters has shown that it pulled the KV."""
    if leg.reply is not None and leg.answer.scanner.end is not DONE:
        leg.reply.abort()
    leg.reply = leg.streaming_from = None
    leg.kv.answered()
    if not has_pulled and leg.kv.params is None:
        nixl = leg.services.config.connector == "nixl"  # with it the worker has kept the KV alive
        leg.services.drainer.orphan(None if nixl else leg.kv.pinned_s)
    leg.stalled_since_s = leg.generates_from_s = math.inf
    leg.idle_s = -math.inf
    leg.leave(worker)


def _apart(leg: Leg, worker: Worker) -> str:
    """What its prefiller's KV gets in addition to the worker's salt; see `Answer.check_prompt`."""
    fleet, prefiller = leg.services.fleet, leg.prefiller_id
    return fleet[prefiller].apart_at.get(worker.id, "") if prefiller in fleet else ""


def first_bytes_s(config: Config, request: ClientRequest) -> float:
    """The time limit for the first bytes of an answer.

    An unstreamed answer comes whole, so each of its tokens may take as long as an event of a stream. The same holds if
    the engine hides reasoning: the answer may be nothing else.
    """
    limits, tokens = config.limits, request.effective_limit
    first_s = limits.first_byte_timeout_s.decode
    if request.streams_upstream and not request.counted_by_usage:
        return first_s
    return math.inf if tokens is None else first_s + (tokens - 1) * limits.idle_timeout_s


async def _refusal(leg: Leg, worker: Worker, reply: Reply, params: bytes) -> UpstreamError:
    """The error for a status other than 200; the leg keeps the parameters if the engine has not seen them."""
    error = status_error(reply, await reply.read(MAX_ERROR_BYTES, cut=True), worker)
    streams = leg.answer.request.streams_upstream
    if isinstance(error, UpstreamStatus) and (error.status < 500 or error.status == 503 or streams):
        leg.kv.refused(params)
    return error


async def _interrupted(leg: Leg, error: BalanceRouteError) -> bool:
    """End an interrupted try; True: its answer is complete all the same. Raises: `error`; ClientStalled."""
    answer = leg.answer
    if leg.reply is not None and leg.reply.undelivered:
        raise ClientStalled("the client had not taken all events when the request was ended") from None
    if answer.scanner.end is DONE:
        return True
    if answer.scanner.finish_reason is not None and not isinstance(error, ClientStalled):
        await answer.close_finished()
        return True
    raise error from None


async def _stream(leg: Leg, worker: Worker, reply: Reply) -> bool:
    """Relay a streamed answer; True when it is complete, False when the request was given back."""
    answer, ticket = leg.answer, leg.ticket
    scanner, outlet = answer.scanner, answer.outlet
    before = scanner.tokens
    _check_is_stream(reply, worker)
    scanner.identity.expect(leg.upstream_id, checked=bool(worker.echoes_ids), request_id=leg.id)
    first = await _first_events(leg, worker, reply)
    answer.check_prompt(leg.prefiller_id, worker, len(scanner.generated.prompt_ids or ()))
    if scanner.begun and scanner.end not in _NO_ANSWER:
        learn_id(worker, scanner.identity.echoed)
        if scanner.tokens > before or scanner.end in _GOES_ON:  # to give a request back is no sign that it works
            worker.has_begun(leg.services.tickets.now())
    broken: UpstreamError | None = None
    if first:
        if not outlet.started:
            outlet.start()
        broken = await stream_events(
            reply,
            scanner,
            outlet,
            ticket.progress,
            # a chat's role may come before its first token
            on_first=None if scanner.tokens > before else lambda: _has_begun(leg, worker),
            first=first,
            ends_response=outlet.ends_response,
        )
    if scanner.finish_reason is not None and scanner.end is not DONE:
        await answer.close_finished()
    return _ended(leg, worker, broken)


async def _first_events(leg: Leg, worker: Worker, reply: Reply) -> bytes:
    """Read until the answer has begun or the stream has ended; returns the client's bytes so far.

    Returns nothing where a 200 would be wrong: no answer has begun ([DONE] alone gives the request back), or an error
    comes after mere comments.

    Raises: BadUpstreamReply: the stream holds no event of an answer. ClientGone; KvTooOld.
    """
    scanner, out = leg.answer.scanner, b""
    counted = scanner.tokens
    while not (out and scanner.begun) and scanner.end is None:
        chunk = await reply.next_chunk()
        if chunk is None:
            scanner.close()
            break
        leg.note_received(worker)
        if not scanner.begun:
            _check_kv(leg, worker)
        out += scanner.feed(chunk)
        if len(out) > MAX_ERROR_BYTES and not scanner.begun:
            break
        if scanner.tokens > counted:
            leg.ticket.progress(scanner.tokens - counted)
            counted = scanner.tokens
            if leg.streaming_from is None:
                _has_begun(leg, worker)
    if not scanner.begun and (chunk is None or scanner.end is None):
        raise worker.failure(BadUpstreamReply, "its stream holds no event of an answer")
    if not scanner.begun or (scanner.end in _NO_ANSWER and b"data:" not in out):
        return b""
    return out


def _has_begun(leg: Leg, worker: Worker) -> None:
    """Note the first tokens: the next one now has a deadline, and earlier refusals are forgotten."""
    leg.ticket.began()  # the prefiller's KV has been pulled
    leg.answer.count_resumed()
    at = worker.progress_s = leg.ticket.last_token_s
    worker.given_back = 0
    leg.streaming_from = worker
    if not leg.first_token_s:
        leg.first_token_s = at
    if not leg.answer.request.counted_by_usage:
        leg.idle_s = leg.services.config.limits.idle_timeout_s
        leg.try_deadline_s = at + leg.idle_s
    leg.retries.begun(at)


def _ended(leg: Leg, worker: Worker, broken: UpstreamError | None) -> bool:
    """Judge how the worker's stream ended: True complete, False given back. Raises: UpstreamError."""
    scanner = leg.answer.scanner
    end = scanner.end
    if end is DONE or end is StreamEnd.NO_DONE:
        return True
    if end is StreamEnd.ERROR:
        raise event_error(scanner.error or b"{}", worker)
    if end is StreamEnd.ABORTED:
        raise aborted(worker.id, "decode")
    if broken is not None:
        raise broken
    if end is StreamEnd.MALFORMED:
        raise worker.failure(BadUpstreamReply, scanner.fault)
    if end is StreamEnd.FOREIGN:
        raise foreign_reply(worker, scanner.fault)
    return False


async def _whole(leg: Leg, worker: Worker, reply: Reply) -> bool:
    """Take an unstreamed answer; False: the request was given back, and the client has got nothing."""
    answer, scanner = leg.answer, leg.answer.scanner
    body = await reply.read(REPLY_LIMIT)
    _check_kv(leg, worker)
    corrected = correct_answer(
        answer.request,
        body,
        worker=worker.id,
        prompt_details=answer.prompt_details,
        upstream_id=leg.upstream_id,
        request_id=leg.id,
    )
    check_id(worker, corrected.reply_id, leg.upstream_id)
    answer.check_prompt(leg.prefiller_id, worker, corrected.prompt_ids)
    if corrected.finish_reason == ABORT:
        raise aborted(worker.id, "decode")
    if corrected.recomputed or not corrected.finish_reason:
        return False  # once more from its own prompt
    worker.has_begun(leg.services.tickets.now())
    if corrected.tokens:
        leg.ticket.progress(corrected.tokens)
    leg.first_token_s = worker.progress_s = leg.services.tickets.now()
    worker.given_back = 0
    scanner.tokens, scanner.finish_reason, scanner.usage = corrected.tokens, corrected.finish_reason, corrected.usage
    scanner.end = DONE
    leg.retries.clear_choices()
    answer.outlet.whole(corrected.body)
    return True


def _check_kv(leg: Leg, worker: Worker) -> None:
    """At the first bytes, check again whether the KV was still pinned when the worker pulled it.

    Raises: KvTooOld: the worker may have pulled, or cached earlier, another request's KV.
    """
    try:
        leg.kv.check_first_event(worker)
    except KvTooOld:
        fields = {"request": leg.id, "worker": worker.id, "reason": "its KV may be another prompt's"}
        log.warning("answer made anew", extra=fields)
        raise


def _check_is_stream(reply: Reply, worker: Worker) -> None:
    """Check the Content-Type. Raises: BadUpstreamReply: the answer is not a stream."""
    kind = reply.header(b"content-type")
    if kind is not None and not kind.lower().startswith(b"text/event-stream"):
        content_type = kind[:80].decode("latin-1")
        raise worker.failure(BadUpstreamReply, f"it answered with {content_type}, not a stream of events")

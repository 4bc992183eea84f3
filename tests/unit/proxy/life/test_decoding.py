"""How a decode worker's answer ends, and what that means for the request and for its KV."""

import asyncio
import math
from typing import Any

import orjson
import pytest

from balanceroute.core.types import Phase
from balanceroute.errors import (
    BadUpstreamReply,
    ConnectFailed,
    ConnectionLost,
    EdgeFull,
    ForeignReply,
    UpstreamError,
    UpstreamStatus,
)
from balanceroute.proxy.client.outlets import PartAnswer
from balanceroute.proxy.life.decoding import decode
from balanceroute.proxy.life.errors import ClientGone, PromptsDiffer
from balanceroute.proxy.life.layerwise import Layerwise
from balanceroute.proxy.life.leg import SLOWEST_TOKEN_S, Event, Leg
from balanceroute.proxy.life.pull import Pull
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.workers.circuit import CircuitState
from tests.unit.proxy.life.legs import (
    DONE,
    LOST,
    PROMPT_IDS,
    Client,
    a_leg,
    a_request,
    dispatching,
    events,
    idle,
    probed,
    streaming,
    whole,
)
from tests.unit.proxy.virtual_time import (
    Answer,
    Page,
    a_config,
    a_router,
    let_pass,
    script,
    with_virtual_time,
)
from tests.waiting import until

PARAMS = b'{"remote_engine_id":"p"}'


class Once(Pull):
    """Pull, whose first decode is its last; `kept` are the parameters that no worker has seen after it."""

    follows = Pull.follows | {Phase.DECODING: {Event.COMPLETE: Phase.GONE}}
    complete: bool
    kept: bytes | None

    def __init__(self, leg: Leg) -> None:
        super().__init__(leg)
        Once.last = self  # type: ignore[attr-defined]

    async def decoding(self) -> Event:
        try:
            self.complete = await decode(self._leg, self._worker, 0.0)
        finally:
            self.kept, self._leg.kv.params = self._leg.kv.params, None
        return Event.COMPLETE


async def decoded(services: Services, client: Client, answer: Answer, **fields: object) -> Once:
    """One decode of a request whose prefill went well."""
    script(services, "p0", probed())
    script(services, "d0", answer)
    made: list[Once] = []

    def strategy(leg: Leg) -> Once:
        made.append(Once(leg))
        return made[0]

    async with dispatching(services):
        try:
            await a_leg(services, client, strategy, **fields).run()
        finally:
            (once,) = made
            assert services.fleet["d0"].in_use == 0
            assert math.isinf(once._leg.try_deadline_s) and once._leg.reply is None
    return once


@pytest.mark.parametrize(
    ("body", "complete", "ended"),
    [
        (events(20, 21) + DONE, True, True),
        (events(20, 21), True, False),
        (events(20, 21, finish=None) + DONE, False, False),
        (events(20, 21, finish="stop", stop_reason="recomputed") + DONE, False, False),
        (DONE, False, False),
    ],
    ids=["whole", "without [DONE]", "without a finish reason", "recomputed", "nothing but [DONE]"],
)
@with_virtual_time
async def test_the_end_of_a_stream_shows_whether_the_answer_is_complete_or_recomputed(
    body: bytes, complete: bool, ended: bool
) -> None:
    services, client = a_router(a_config(1, 1)), Client()
    once = await decoded(services, client, Page(body))
    assert (once.complete, client.ended) == (complete, ended)
    assert b"recomputed" not in client.got


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Page(events(20, finish=None), breaks=LOST), ConnectionLost),
        (Page(events(20, finish=None) + b'data: {"error": {"message": "x", "code": 500}}\n\n'), UpstreamError),
        (Page(events(20) + DONE, headers=((b"content-encoding", b"gzip"),)), BadUpstreamReply),
        (Page(events(20) + DONE, headers=((b"content-type", b"application/json"),)), BadUpstreamReply),
        (Page(b"data: nonsense\n\n"), BadUpstreamReply),
        (Page(b""), BadUpstreamReply),
        (Page(events(20).replace(b"$ID", b"another") + DONE), ForeignReply),
    ],
    ids=["broken off", "error event", "compressed", "no stream", "no JSON", "nothing", "of another request"],
)
@with_virtual_time
async def test_an_invalid_stream_fails_and_orphans_its_kv_unless_a_token_arrived(
    answer: Page, kind: type[UpstreamError]
) -> None:
    services, client = a_router(a_config(1, 1)), Client()
    services.fleet["d0"].echoes_ids = True
    with pytest.raises(kind):
        await decoded(services, client, answer)
    assert not client.ended
    assert services.metrics.orphaned_kv == (0 if client.text == " 20" else 1)


@with_virtual_time
async def test_an_error_event_after_only_comments_is_raised_before_the_client_is_answered() -> None:
    services, client = a_router(a_config(1, 1)), Client()
    with pytest.raises(UpstreamStatus) as raised:
        await decoded(services, client, Page(b': ping\n\ndata: {"error": {"message": "x", "code": 503}}\n\n'))
    assert raised.value.status == 503 and not client.started


@pytest.mark.parametrize(
    ("answer", "stream", "kept"),
    [
        (Page(status=429), True, True),
        (Page(status=400), True, True),
        (Page(status=503), False, True),
        (Page(status=500), True, True),
        (Page(status=500), False, False),
        (ConnectFailed("lost", worker="d0", tier="decode"), True, False),
    ],
    ids=["429", "400", "503", "500 before a stream", "500 of a whole answer", "sent and lost"],
)
@with_virtual_time
async def test_parameters_are_used_up_unless_the_engine_has_surely_not_seen_them(
    answer: Answer, stream: bool, kept: bool
) -> None:
    services = a_router(a_config(1, 1))
    with pytest.raises(UpstreamError) as caught:
        await decoded(services, Client(), answer, stream=stream)
    assert isinstance(caught.value, UpstreamStatus | ConnectFailed)
    assert (Once.last.kept is not None) == kept  # type: ignore[attr-defined]
    assert services.metrics.orphaned_kv == (0 if kept else 1)


@with_virtual_time
async def test_a_request_that_was_never_sent_keeps_its_parameters() -> None:
    services, unsent = a_router(a_config(1, 1)), ConnectFailed("refused", worker="d0", tier="decode")
    unsent.sent = False
    with pytest.raises(ConnectFailed):
        await decoded(services, Client(), unsent)
    assert Once.last.kept == PARAMS  # type: ignore[attr-defined]


@with_virtual_time
async def test_the_first_token_starts_the_token_timeout_and_counts_as_worker_progress() -> None:
    services = a_router(a_config(1, 1, limits={"idle_timeout_s": 7.0}))
    script(services, "p0", probed())
    script(services, "d0", Page(events(20, finish=None), ends=False))
    async with dispatching(services):
        leg, task = await streaming(services)
        worker = services.fleet["d0"]
        assert leg.idle_s == 7.0 and leg.try_deadline_s == leg.first_token_s + 7.0
        assert worker.progress_s == leg.first_token_s == leg.last_token_s
        assert leg.expects_tokens
        task.cancel()


ERROR = b'data: {"error": {"message": "late", "code": 500}}\n\n'
NO_USAGE = b'data: {"id": "cmpl-$ID", "choices": [], "usage": {"completion_tokens": -5}}\n\n'


@pytest.mark.parametrize(
    "after",
    [DONE, b"", ERROR, NO_USAGE, events(22).replace(b"$ID", b"another")],
    ids=["[DONE]", "the end", "an error", "a usage that is none", "another answer"],
)
@with_virtual_time
async def test_a_completely_answered_trial_closes_the_circuit_whatever_else_the_read_contains(after: bytes) -> None:
    services, client = a_router(a_config(1, 1)), Client()
    worker = services.fleet["d0"]
    worker.echoes_ids = True
    worker.circuit.open(services.tickets.now(), "status 500")
    worker.circuit.reachable()
    once = await decoded(services, client, Page(events(20, 21) + after))
    assert once.complete and client.text == " 20 21"
    assert worker.circuit.state is CircuitState.CLOSED


@with_virtual_time
async def test_a_trial_whose_answer_finds_no_room_here_before_it_was_judged_is_repeated_by_another_request() -> None:
    def full(more_bytes: int) -> None:
        raise EdgeFull("no room")

    services, request = a_router(a_config(1, 1)), a_request(stream=False, max_tokens=200)
    script(services, "p0", probed())
    script(services, "d0", Page(events(20, finish=None, text="x" * 100_000) + ERROR))
    circuit = services.fleet["d0"].circuit
    circuit.open(services.tickets.now(), "status 500")
    circuit.reachable()
    async with dispatching(services):
        with pytest.raises(EdgeFull):
            await Leg(services, "r", request, PartAnswer(request, full), [], Pull).run()
    assert circuit.state is CircuitState.HALF_OPEN and services.metrics.orphaned_kv == 0 and idle(services)


@with_virtual_time
async def test_a_token_is_awaited_since_the_request_that_waits_longest_came_if_its_client_reads() -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    script(services, "d0", Page(events(20, finish=None), ends=False))
    legs, tasks, since_s = [], [], []
    async with dispatching(services):
        for request_id in ("full", "first", "second"):
            leg = a_leg(services, request_id=request_id)
            legs.append(leg)
            since_s.append(services.tickets.now())
            tasks.append(services.loop.create_task(leg.run()))
            await until(lambda: leg.streaming_from is not None)  # noqa: B023 (awaited in the same turn)
            await let_pass(5.0)
        assert services.awaited() == {"d0": since_s[0]}
        assert legs[0].reply is not None
        legs[0].reply.paused = True
        assert services.awaited() == {"d0": since_s[1]}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert services.awaited() == {}


class Full(Client):
    """Reads nothing."""

    ends_response = False

    def write(self, body: bytes, /) -> bool:
        return False

    async def drained(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("end", [DONE, b""], ids=["[DONE]", "no [DONE]"])
@with_virtual_time
async def test_no_token_is_awaited_of_a_worker_whose_stream_has_ended_before_its_client_has_read_it(end: bytes) -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    script(services, "d0", Page(events(20, 21) + end))
    async with dispatching(services):
        leg = a_leg(services, Full())
        task = services.loop.create_task(leg.run())
        await until(lambda: leg.answer.scanner.tokens == 2)
        await let_pass(1.0)
        assert leg.at_worker == "d0" and services.awaited() == {}
        task.cancel()
        await asyncio.wait([task])


def chat_events(*deltas: dict[str, Any], last: dict[str, Any]) -> bytes:
    """The role with the prompt's ids, then an event for each delta with an id of its own, and one that ends."""
    head = {"id": "chatcmpl-$ID", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices: list[dict[str, Any]] = [
        {"delta": {"role": "assistant", "content": ""}},
        *({"delta": delta, "token_ids": [20 + number]} for number, delta in enumerate(deltas)),
        {"delta": {"content": ""}, "token_ids": [], **last},
    ]
    told = [head | {"choices": [{"index": 0, "finish_reason": None} | choice]} for choice in choices]
    told[0]["prompt_token_ids"] = PROMPT_IDS
    return b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in told)


@with_virtual_time
async def test_the_first_token_of_an_answer_that_continues_with_hidden_reasoning_is_timed_once() -> None:
    """By that time the overlap is sized: what comes later would count as a transfer of that length."""
    services = a_router(a_config(1, 1))
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 100}
    request = parse("chat", orjson.dumps(chat | {"stream": True, "include_reasoning": False}))
    script(services, "p0", *(probed(id_="chatcmpl-$ID", prompt=ids) for ids in (PROMPT_IDS, [*PROMPT_IDS, 20])))
    cut_off = chat_events({"reasoning": "a"}, last={"finish_reason": "stop", "stop_reason": "recomputed"})
    thinks = [{"reasoning": "b"}] * 50
    rest = chat_events(*thinks, {"content": "x"}, last={"finish_reason": "length"}) + DONE
    script(services, "d0", Page(cut_off), Page(rest, pace_s=1.0))
    overlap = services.ledger.scheduler.snapshot.overlap
    overlap.see_answer(1.0, 101)  # nothing is measured before an answer has ended
    async with dispatching(services):
        leg = Leg(services, "r", request, Client(), [], Pull)
        await leg.run()
    assert (leg.recomputes, leg.answer.scanner.tokens) == (1, 52)
    assert overlap.transfers == 2 and overlap.transfer_s < 2.0


@pytest.mark.parametrize("body", [events(20), chat_events(last={})], ids=["a token", "the role"])
@with_virtual_time
async def test_a_worker_that_sends_something_once_the_client_has_left_has_pulled_the_kv(body: bytes) -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    d0, has_left = script(services, "d0", Page(body)), asyncio.Event()
    d0.before_body = has_left.wait  # type: ignore[method-assign]
    async with dispatching(services):
        leg = a_leg(services)
        task = services.loop.create_task(leg.run())
        await until(lambda: leg.reply is not None)
        leg.abandon()
        has_left.set()
        with pytest.raises(ClientGone):
            await task
    assert services.metrics.orphaned_kv == 0 and idle(services)


@pytest.mark.parametrize(
    ("stream", "body"),
    [
        (False, Page(whole(20, prompt_token_ids=[*PROMPT_IDS, 8]).body)),
        (True, Page(chat_events(last={}).replace(b"[5,6,7]", b"[5,6,7,8]"))),
    ],
    ids=["in one piece", "a stream"],
)
@with_virtual_time
async def test_a_worker_that_has_made_another_prompt_of_a_request_has_pulled_the_kv(stream: bool, body: Page) -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    script(services, "d0", body)
    async with dispatching(services):
        leg = a_leg(services, stream=stream)
        with pytest.raises(PromptsDiffer):
            await leg.run()
    assert services.metrics.orphaned_kv == 0 and idle(services)


@with_virtual_time
async def test_a_worker_whose_answer_is_made_anew_has_pulled_the_kv() -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    d0 = script(services, "d0", Page(events(20, 21) + DONE))

    async def doubted_once() -> None:
        if len(d0.asked) == 1:
            services.fleet.doubt_cache(services.fleet["d0"])

    d0.before_body = doubted_once  # type: ignore[method-assign]
    async with dispatching(services):
        await a_leg(services).run()
    assert len(d0.asked) == 2 and services.metrics.orphaned_kv == 0 and idle(services)


@with_virtual_time
async def test_kv_that_a_lost_worker_may_not_have_pulled_is_orphaned_only_until_its_prefiller_drops_it() -> None:
    services = a_router(a_config(1, 2, retry={"max_attempts": 1}))
    script(services, "p0", probed())
    for name in ("d0", "d1"):
        services.fleet.drain(services.fleet[name])
        script(services, name, LOST)
    pin_s = services.config.kv_pin_s
    assert pin_s is not None
    async with dispatching(services):
        leg = a_leg(services)
        task = services.loop.create_task(leg.run())
        await until(lambda: leg.kv.params is not None)
        await let_pass(10.0)
        services.fleet.undrain(services.fleet["d0"])
        with pytest.raises(UpstreamError):
            await task
        assert services.metrics.orphaned_kv == 1
        await let_pass(pin_s - 9.0)
    assert services.metrics.orphaned_kv == 0


@pytest.mark.parametrize("connector", ["mooncake_v1", "mooncake_layerwise"])
@with_virtual_time
async def test_an_answer_in_one_piece_is_awaited_once_a_slow_engine_would_have_completed_it(connector: str) -> None:
    """Else a worker that hangs, and has short answers alone, would keep them for hours."""
    layerwise = connector == "mooncake_layerwise"
    reached = {"layerwise": {"callback_url": "http://10.0.0.5:8000"}} if layerwise else {}
    services = a_router(a_config(1, 1, connector=connector, **reached))
    script(services, "p0", probed())
    script(services, "d0", None)  # it takes the request, and hangs
    async with dispatching(services):
        leg = a_leg(services, strategy=Layerwise if layerwise else Pull, stream=False, max_tokens=20)
        task = services.loop.create_task(leg.run())
        await until(lambda: services.fleet["d0"].in_use == 1)
        if layerwise:
            await let_pass(4.0)
            (token,) = services.callbacks._expected
            services.callbacks.called_back(token, "cmpl-request-1-0", b"{}")
            await until(lambda: not leg.kv_due)
        await let_pass(20 * SLOWEST_TOKEN_S - 0.1)
        assert not services.awaited()
        await let_pass(0.2)
        assert services.awaited().keys() == {"d0"}
        task.cancel()
        await asyncio.wait([task])
        assert not services.awaited()

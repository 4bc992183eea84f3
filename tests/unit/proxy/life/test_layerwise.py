"""Decode first: a prefiller that fails, or is late, when its decode worker has had all of the KV."""

import asyncio
from contextlib import suppress
from typing import Any, ClassVar

import orjson
import pytest

from balanceroute.core.types import Outcome
from balanceroute.errors import (
    BadUpstreamReply,
    ConnectionLost,
    EdgeFull,
    InvalidRequest,
    InvariantError,
    UpstreamTimeout,
)
from balanceroute.proxy.client.outlets import PartAnswer
from balanceroute.proxy.life import layerwise
from balanceroute.proxy.life.errors import DeadlineExceeded, PromptsDiffer
from balanceroute.proxy.life.layerwise import CALLBACK_S, GIVE_UP_S, PREFILL_REPLY_S, Layerwise, own_echo
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.wire.derived_requests import split
from balanceroute.proxy.wire.payloads import push_body
from balanceroute.proxy.workers.circuit import MAX_REST_S, CircuitState
from balanceroute.proxy.workers.connector_check import WrongConnector
from balanceroute.proxy.workers.silence import SETTLE_S
from tests.unit.proxy.life.legs import (
    DONE,
    PROMPT_IDS,
    Client,
    a_leg,
    an_assembled_leg,
    dispatching,
    events,
    idle,
    probed,
    whole,
)
from tests.unit.proxy.life.test_pool_reaper import reaped
from tests.unit.proxy.virtual_time import (
    Answer,
    Page,
    ScriptedUpstream,
    a_config,
    a_router,
    let_pass,
    script,
    with_virtual_time,
)

LOST = ConnectionLost("reset", worker="p0", tier="prefill")
USAGE = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": 2}
USAGE_EVENT = b"data: %s\n\n" % orjson.dumps({"id": "cmpl-$ID", "choices": [], "usage": USAGE})


class Asking(ScriptedUpstream):
    """A decode worker that asks for its prefill, and answers at once."""

    def __init__(self, services: Services, *answers: Answer) -> None:
        super().__init__(*answers)
        self._callbacks = services.callbacks
        self.tokens: list[str] = []

    async def request(self, method: str, path: str, body: bytes = b"", headers: bytes = b"", **options: Any) -> Any:
        token = orjson.loads(body)["kv_transfer_params"]["metaserver"].rpartition("/")[2]
        self.tokens.append(token)
        sent_id = headers.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
        assert self._callbacks.called_back(token, f"cmpl-{sent_id}-0", b'{"remote_host":"d0"}') == "accepted"
        await let_pass(0.01)
        return await super().request(method, path, body, headers, **options)


class Late(ScriptedUpstream):
    """A prefiller whose answer comes later than the decode worker's."""

    def __init__(self, after_s: float, *answers: Answer) -> None:
        super().__init__(*answers)
        self._after_s = after_s

    async def request(self, *args: Any, **options: Any) -> Any:
        await let_pass(self._after_s)
        return await super().request(*args, **options)


def a_pair(decoder: Answer, prefiller_s: float, prefiller: Answer, attempts: int = 1, prefillers: int = 1) -> Services:
    reached = {"callback_url": "http://10.0.0.5:8000"}
    retry = {"max_attempts": attempts}
    services = a_router(a_config(prefillers, 1, connector="mooncake_layerwise", layerwise=reached, retry=retry))
    services.fleet["d0"].upstream = Asking(services, decoder)  # type: ignore[assignment]
    services.fleet["p0"].upstream = Late(prefiller_s, prefiller)  # type: ignore[assignment]
    return services


@pytest.mark.parametrize("done", [DONE, b""], ids=["with [DONE]", "without"])
@with_virtual_time
async def test_a_prefiller_lost_after_the_answer_is_complete_does_not_change_it(done: bytes) -> None:
    services, client = a_pair(Page(events(20, 21) + done), PREFILL_REPLY_S / 2, LOST), Client()
    async with dispatching(services):
        leg = a_leg(services, client, Layerwise)
        await leg.run()
    assert (leg.outcome, client.text) == (Outcome.FINISHED, " 20 21")
    assert idle(services)


@pytest.mark.parametrize("done", [DONE, b""], ids=["with [DONE]", "without"])
@with_virtual_time
async def test_a_deadline_that_ends_after_the_answer_is_complete_does_not_change_it(done: bytes) -> None:
    services, client = a_pair(Page(events(20, 21) + done), 10 * PREFILL_REPLY_S, 200), Client()
    async with reaped(services):
        leg = a_leg(services, client, Layerwise)
        leg.deadline_s = services.tickets.now() + PREFILL_REPLY_S / 2
        await leg.run()
        assert services.tickets.now() > leg.deadline_s  # else the deadline was not tested
    assert (leg.outcome, client.text) == (Outcome.FINISHED, " 20 21")
    assert idle(services)


@with_virtual_time
async def test_a_deadline_ends_an_answer_that_lacks_what_was_asked_of_its_prompt() -> None:
    services = a_pair(whole(20, 21), 10 * PREFILL_REPLY_S, 200)
    async with reaped(services):
        leg, _ = an_assembled_leg(services, Layerwise, max_tokens=2, echo=True)
        leg.deadline_s = services.tickets.now() + PREFILL_REPLY_S / 2
        with pytest.raises(DeadlineExceeded):
            await leg.run()
    assert leg.outcome is Outcome.FAILED and idle(services)


@pytest.mark.parametrize("answer", [Page(events(20, 21) + DONE), LOST], ids=["answered", "lost"])
@with_virtual_time
async def test_nobody_may_ask_for_the_prefill_of_an_attempt_that_is_over(answer: Answer) -> None:
    services = a_pair(answer, 0.01, probed())
    async with dispatching(services):
        with suppress(ConnectionLost):
            await a_leg(services, Client(), Layerwise).run()
    d0 = services.fleet["d0"].upstream
    assert isinstance(d0, Asking) and d0.tokens
    assert not any(services.callbacks.expects(token) for token in d0.tokens)


class Body(bytes):
    """Of a request; `kept` are those that something still refers to."""

    kept: ClassVar[list[int]] = []

    def __init__(self, body: bytes) -> None:
        self.kept.append(id(self))

    def __del__(self) -> None:
        self.kept.remove(id(self))


class Forgetful(Late):
    """A prefiller whose connection keeps no request that it has written."""

    async def request(self, method: str, path: str, body: bytes = b"", *args: Any, **options: Any) -> Any:
        assert body and Body.kept
        body = b""
        await let_pass(0.01)
        assert not Body.kept
        return await super().request(method, path, body, *args, **options)


@with_virtual_time
async def test_the_body_for_a_prefiller_that_pushes_is_not_kept_while_it_prefills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be of 30 MB, for each choice."""
    services, client = a_pair(Page(events(20, 21) + DONE), 0.0, probed()), Client()
    prefiller = Forgetful(0.1, probed())
    services.fleet["p0"].upstream = prefiller  # type: ignore[assignment]
    monkeypatch.setattr(layerwise, "push_body", lambda *args: Body(push_body(*args)))
    async with dispatching(services):
        await a_leg(services, client, Layerwise).run()
    assert prefiller.asked and client.text == " 20 21"


@with_virtual_time
async def test_a_prefiller_lost_after_the_first_token_does_not_end_the_stream() -> None:
    services, client = a_pair(Page(events(20, 21, finish=None), ends=False), 1.0, LOST), Client()
    async with dispatching(services):
        leg = a_leg(services, client, Layerwise)
        request = asyncio.ensure_future(leg.run())
        await let_pass(5.0)
        assert not request.done() and client.text == " 20 21"
        assert not leg.kv_due and not leg.ticket.pushing
        assert services.ledger.prefiller("p0").inflight == 0
        leg.abandon()
        await asyncio.wait({request})
    assert idle(services)


@with_virtual_time
async def test_an_internal_error_in_the_prefill_ends_the_request_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Buggy(ScriptedUpstream):
        async def request(self, *args: Any, **options: Any) -> Any:
            raise LookupError("a bug")

    services = a_pair(None, 0.0, 200)
    services.fleet["p0"].upstream = Buggy()  # type: ignore[assignment]
    async with dispatching(services):
        leg = a_leg(services, Client(), Layerwise)
        with pytest.raises(InvariantError, match="the prefill has failed"):
            await leg.run()
        assert services.tickets.now() - leg.ticket.arrived_s < 1.0
    assert services.metrics.tasks_failed.value("push") == 1 and idle(services)
    assert "a bug" in caplog.text


@pytest.mark.parametrize("prefiller", ["late", "lost"])
@with_virtual_time
async def test_an_unstreamed_echo_waits_for_the_prefiller_and_is_no_answer_without_its_word(prefiller: str) -> None:
    prefill_reply = probed(None, text="a b c") if prefiller == "late" else LOST
    services = a_pair(whole(20, 21), 5 * PREFILL_REPLY_S, prefill_reply)
    async with dispatching(services):
        leg, answer = an_assembled_leg(services, Layerwise, max_tokens=2, echo=True)
        if prefiller == "lost":
            with pytest.raises(BadUpstreamReply):
                await leg.run()
        else:
            await leg.run()
            assert answer()["choices"][0]["text"] == "a b c 20 21"
    assert idle(services)


@pytest.mark.parametrize("prefiller_s", [0.0, 5 * PREFILL_REPLY_S], ids=["first", "last"])
@with_virtual_time
async def test_what_a_prefiller_says_of_the_prompt_finds_no_room_and_the_request_is_refused(
    monkeypatch: pytest.MonkeyPatch, prefiller_s: float
) -> None:
    def full(outlet: PartAnswer, size: int) -> None:
        raise EdgeFull("no room")

    monkeypatch.setattr(PartAnswer, "prompt_came", full)
    services = a_pair(whole(20, 21), prefiller_s, probed(None, text="a b c"))
    async with dispatching(services):
        leg, _ = an_assembled_leg(services, Layerwise, max_tokens=2, echo=True)
        with pytest.raises(EdgeFull):
            await leg.run()
    assert idle(services) and services.metrics.tasks_failed.value("push") == 0


@pytest.mark.parametrize("limit", [2, 200], ids=["in-one-piece", "from-a-stream"])
@with_virtual_time
async def test_an_unstreamed_answer_has_the_cached_tokens_of_a_prefiller_that_replies_later(
    limit: int,
) -> None:
    def telling(answer: Page, usage: bytes, cached: int) -> Page:
        return Page(answer.body.replace(usage, usage + b',"prompt_tokens_details":{"cached_tokens":%d}' % cached))

    generated = b'"completion_tokens":2'
    decoder = whole(20, 21) if limit == 2 else Page(events(20, 21) + USAGE_EVENT + DONE)
    prefiller = telling(probed(None), b'"completion_tokens":1', 2)
    services = a_pair(telling(decoder, generated, len(PROMPT_IDS) - 1), PREFILL_REPLY_S / 2, prefiller)
    async with dispatching(services):
        leg, answer = an_assembled_leg(services, Layerwise, max_tokens=limit)
        await leg.run()
    assert answer()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert answer()["choices"][0]["text"] == " 20 21" and idle(services)


@with_virtual_time
async def test_a_client_never_receives_an_estimated_prompt_size() -> None:
    """Its prefiller is late, its first decode worker is lost: only the second one says how many tokens it was."""
    usage = {"prompt_tokens": len(PROMPT_IDS) + 1, "completion_tokens": 1, "total_tokens": len(PROMPT_IDS) + 2}
    usage_event = b"data: %s\n\n" % orjson.dumps({"id": "cmpl-$ID", "choices": [], "usage": usage})
    last = events(21) + usage_event + DONE
    services, client = a_pair(Page(last), 10 * PREFILL_REPLY_S, 200, attempts=2), Client()
    first = events(20, finish=None, prompt_token_ids=PROMPT_IDS)
    broken = Page(first, breaks=BadUpstreamReply("odd", worker="d0", tier="decode"))
    decoder = services.fleet["d0"].upstream
    assert isinstance(decoder, Asking)
    decoder.answers.insert(0, broken)
    async with dispatching(services):
        leg = a_leg(services, client, Layerwise, stream_options={"include_usage": True})
        await leg.run()
    counts = orjson.loads(client.got.split(b"data: ")[-2])["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (len(PROMPT_IDS), 2)
    assert client.text == " 20 21" and idle(services)


@pytest.mark.parametrize(
    ("answer", "fields"),
    [(Page(events(20, 21) + USAGE_EVENT + DONE), {}), (whole(20, 21), {"stream": False, "max_tokens": 2})],
    ids=["streamed", "whole"],
)
@with_virtual_time
async def test_a_decode_workers_prompt_count_is_used_when_the_prefillers_is_late(
    answer: Page, fields: dict[str, Any]
) -> None:
    services = a_pair(answer, 10 * PREFILL_REPLY_S, 200)
    async with dispatching(services):
        leg = a_leg(services, Client(), Layerwise, **fields)
        await leg.run()
    assert (leg.outcome, leg.answer.prompt_tokens) == (Outcome.FINISHED, len(PROMPT_IDS))
    assert idle(services)


@with_virtual_time
async def test_a_request_ends_early_with_the_reason_when_no_decode_worker_ever_requested_a_prefill() -> None:
    services = a_pair(None, 0.0, 200, attempts=3)
    services.fleet["d0"].upstream = ScriptedUpstream(None)  # type: ignore[assignment]
    async with dispatching(services):
        leg = a_leg(services, Client(), Layerwise)
        request = asyncio.ensure_future(leg.run())
        await let_pass(CALLBACK_S + 1)
        assert "http://10.0.0.5:8000" in services.metrics.conditions.reasons[0]
        with pytest.raises(WrongConnector, match="asked for no prefill"):
            await request
        assert services.tickets.now() - leg.ticket.arrived_s < GIVE_UP_S + 1
        assert services.metrics.conditions.reasons and not services.fleet["d0"].circuit.failures
    assert idle(services)


@with_virtual_time
async def test_an_unstreamed_answer_times_out_like_a_stream_when_no_prefill_is_requested() -> None:
    """It may take a minute per token only from when it can be generated."""
    services = a_pair(None, 0.0, 200)
    services.fleet["d0"].upstream = ScriptedUpstream(None)  # type: ignore[assignment]
    services.fleet["d0"].kv_connector = "mooncake_layerwise"  # it has asked before
    async with reaped(services):
        leg, _ = an_assembled_leg(services, Layerwise, max_tokens=60)
        with pytest.raises(UpstreamTimeout):
            await leg.run()
        waited_s = services.tickets.now() - leg.ticket.arrived_s
        assert waited_s < services.config.limits.first_byte_timeout_s.decode + 1
    assert idle(services)


@with_virtual_time
async def test_a_decode_worker_whose_stream_has_begun_without_a_token_before_the_kv_came_is_late_like_others() -> None:
    begins = b'data: {"id": "cmpl-$ID", "choices": [{"index": 0, "text": "", "finish_reason": null}]}\n\n'
    services = a_pair(Page(begins, ends=False), 0.1, probed())
    async with reaped(services):
        began_s = services.tickets.now()
        with pytest.raises(UpstreamTimeout):
            await a_leg(services, Client(), Layerwise).run()
    limit_s = services.config.limits.first_byte_timeout_s.decode
    assert limit_s < services.tickets.now() - began_s < limit_s + 1.0 and idle(services)


@with_virtual_time
async def test_a_long_answer_continues_although_its_decode_worker_was_judged_down_since() -> None:
    services = a_pair(Page(events(20, finish=None), ends=False), 0.0, probed(None))
    async with dispatching(services):
        leg = a_leg(services, Client(), Layerwise)
        request = asyncio.ensure_future(leg.run())
        await let_pass(1.0)
        services.fleet["d0"].kv_connector = None  # as when it is down: it may come back as another version
        await let_pass(GIVE_UP_S + 1)
        assert not request.done()
        leg.abandon()
        await asyncio.wait({request})
    assert idle(services)


class Dying(Asking):
    """A decode worker that is lost with the prefiller p0, of the same machine; its /health is not answered."""

    def __init__(self, services: Services) -> None:
        super().__init__(services, ConnectionLost("reset", worker="d0", tier="decode"))
        self._services = services

    async def request(self, method: str, path: str, body: bytes = b"", headers: bytes = b"", **options: Any) -> Any:
        if path == "/health":
            await asyncio.Event().wait()
        try:
            return await super().request(method, path, body, headers, **options)
        finally:
            self._services.fleet.set_healthy(self._services.fleet["p0"], False)


@with_virtual_time
async def test_a_request_that_has_left_its_decode_worker_does_not_end_because_its_prefiller_is_out() -> None:
    """It is still asked whether the decode worker is alive, which takes as long as a health check."""
    reached = {"callback_url": "http://10.0.0.5:8000"}
    services, client = a_router(a_config(2, 2, connector="mooncake_layerwise", layerwise=reached)), Client()
    p0 = script(services, "p0", None)
    script(services, "p1", probed(None))
    services.fleet["d0"].upstream = Dying(services)  # type: ignore[assignment]
    services.fleet["d1"].upstream = Asking(services, Page(events(20, 21) + DONE))  # type: ignore[assignment]
    async with reaped(services):
        await let_pass(2 * SETTLE_S)
        leg = a_leg(services, client, Layerwise)
        await leg.run()
        assert len(p0.asked) == 1
        assert services.tickets.now() - leg.ticket.arrived_s > SETTLE_S
    assert (leg.outcome, leg.prefiller_id, client.text) == (Outcome.FINISHED, "p1", " 20 21")
    assert idle(services)


@pytest.mark.parametrize("prefillers", [1, 2])
@with_virtual_time
async def test_a_stream_stays_when_its_prefiller_falls_silent_after_the_first_token(prefillers: int) -> None:
    """Neither are its tokens waited for, nor is it refused where no other prefiller is left."""
    services, client = a_pair(Page(events(20, 21, finish=None), ends=False), 0.0, None, prefillers=prefillers), Client()
    async with reaped(services):
        await let_pass(2 * SETTLE_S)
        leg = a_leg(services, client, Layerwise)
        request = asyncio.ensure_future(leg.run())
        await let_pass(1.0)
        services.fleet.set_healthy(services.fleet["p0"], False)
        await let_pass(services.config.queue.no_worker_grace_s + services.config.retry.resume_after_silence_s + 2.0)
        left = request.done() or leg.recomputes > 0
        leg.abandon()
        await asyncio.wait({request})
    assert not left and client.text == " 20 21" and idle(services)


@with_virtual_time
async def test_a_request_that_a_prefiller_refused_waits_for_a_slot_anew_after_another_failed() -> None:
    """The prefill that failed may have taken longer than requests wait in the queue."""
    services, client = a_pair(None, 0.0, 503, attempts=2, prefillers=2), Client()
    services.fleet["d0"].upstream = Asking(services, None, Page(events(20, 21) + DONE))  # type: ignore[assignment]
    late = Late(services.config.queue.deadline_s + 1, LOST, probed(None))
    services.fleet["p1"].upstream = late  # type: ignore[assignment]
    async with reaped(services):
        leg = a_leg(services, client, Layerwise)
        await leg.run()
    assert (leg.outcome, client.text) == (Outcome.FINISHED, " 20 21")
    assert leg.recomputes == 1 and idle(services)


def decoded(ids: list[int], stream: bool) -> Page:
    """The answer to a prompt of these ids."""
    return Page(events(20, prompt_token_ids=ids) + DONE) if stream else whole(20, prompt_token_ids=ids)


@pytest.mark.parametrize("stream", [True, False])
@with_virtual_time
async def test_an_answer_to_another_prompt_than_the_one_whose_kv_was_pushed_is_not_relayed(stream: bool) -> None:
    services, client = a_pair(decoded([*PROMPT_IDS, 8], stream), 0.0, probed(None)), Client()
    async with dispatching(services):
        leg = a_leg(services, client, Layerwise, stream=stream)
        with pytest.raises(PromptsDiffer, match="templates"):
            await leg.run()
    assert not client.got and idle(services)


@with_virtual_time
async def test_a_prefiller_that_tells_of_another_prompt_after_the_first_token_ends_the_stream() -> None:
    begun = Page(events(20, finish=None, prompt_token_ids=[*PROMPT_IDS, 8]), ends=False)
    services, client = a_pair(begun, 0.1, probed(None)), Client()
    async with dispatching(services):
        with pytest.raises(PromptsDiffer, match="templates"):
            await a_leg(services, client, Layerwise).run()
    assert client.text == " 20" and idle(services)


@pytest.mark.parametrize("stream", [True, False])
@with_virtual_time
async def test_a_decode_worker_that_makes_other_prompts_than_all_others_is_replaced(stream: bool) -> None:
    reached = {"callback_url": "http://10.0.0.5:8000"}
    services, client = a_router(a_config(1, 2, connector="mooncake_layerwise", layerwise=reached)), Client()
    services.fleet["p0"].upstream = Late(0.0, probed(None))  # type: ignore[assignment]
    sick = Asking(services, decoded([*PROMPT_IDS, 8], stream))
    services.fleet["d0"].upstream = sick  # type: ignore[assignment]
    services.fleet["d1"].upstream = Asking(services, decoded(PROMPT_IDS, stream))  # type: ignore[assignment]
    async with dispatching(services):
        for number in range(4):
            leg = a_leg(services, client, Layerwise, request_id=str(number), stream=stream)
            await leg.run()
            assert leg.outcome is Outcome.FINISHED and leg.decoder_id == "d1"
        assert len(sick.asked) == 1 and services.fleet["d0"].circuit.state is CircuitState.RESTING
    assert idle(services)


@with_virtual_time
async def test_kv_of_another_prompt_that_a_worker_has_cached_serves_no_later_request() -> None:
    services = a_pair(None, 0.0, probed(None))
    right = Page(events(20, prompt_token_ids=PROMPT_IDS) + DONE)
    d0 = Asking(services, Page(events(20, prompt_token_ids=[*PROMPT_IDS, 8]) + DONE), right)
    services.fleet["d0"].upstream = d0  # type: ignore[assignment]
    async with dispatching(services):
        with pytest.raises(PromptsDiffer):
            await a_leg(services, Client(), Layerwise).run()
        await let_pass(MAX_REST_S)
        await a_leg(services, Client(), Layerwise, request_id="later").run()
    salts = [orjson.loads(one.body).get("cache_salt") for one in d0.asked]
    assert salts[0] is None and salts[1] and idle(services)


@with_virtual_time
async def test_an_answer_that_may_be_from_another_prompts_kv_is_made_anew() -> None:
    services, client = a_pair(None, 0.0, probed(None)), Client()
    d0 = Asking(services, Page(events(20, 21) + DONE))
    services.fleet["d0"].upstream = d0  # type: ignore[assignment]

    async def doubted_once() -> None:
        if len(d0.asked) == 1:
            services.fleet.doubt_cache(services.fleet["d0"])

    d0.before_body = doubted_once  # type: ignore[method-assign]
    async with dispatching(services):
        await a_leg(services, client, Layerwise).run()
    assert len(d0.asked) == 2 and client.text == " 20 21" and idle(services)


def test_a_stream_echoes_the_texts_of_a_batch_and_no_token_ids() -> None:
    """Of which one may be empty: engines take that in a list only."""
    body = {"prompt": ["", "a"], "echo": True, "stream": True}
    assert [own_echo(part) for part in split(parse("completions", orjson.dumps(body)))] == [
        {"choices": [{"text": text}]} for text in ("", "a")
    ]
    with pytest.raises(InvalidRequest, match="echo of token ids"):
        own_echo(parse("completions", orjson.dumps({**body, "prompt": [7]})))

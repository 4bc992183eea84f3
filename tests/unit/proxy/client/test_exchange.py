"""One client request: how it ends, what the client is told, and how it is counted."""

import asyncio
import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest

from balanceroute.errors import (
    BadUpstreamReply,
    BalanceRouteError,
    Draining,
    EdgeFull,
    InvalidRequest,
    NoHealthyWorkers,
)
from balanceroute.proxy.admission import decider
from balanceroute.proxy.admission.forecasts import Keys
from balanceroute.proxy.client.exchange import Exchange
from balanceroute.proxy.client.messages_exchange import MessagesExchange
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.perimeter.perimeter import Perimeter
from tests.unit.proxy.client.connections import Connection, a_request
from tests.unit.proxy.life.legs import DONE, dispatching, events, probed, whole
from tests.unit.proxy.life.test_layerwise import Asking, Late
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

BODY = {"model": "m", "prompt": "a b c", "max_tokens": 10}
OUTCOMES = ("finished", "rejected", "cancelled", "failed", "expired")
KEY = b"sk-0123456789abcdef0123456789abcdef"
WHOLE = Page(events(20, 21) + DONE)


def counted(services: Services) -> dict[str, float]:
    """The requests that ended, by outcome; those of none are left out."""
    found = {outcome: services.metrics.requests.value(outcome) for outcome in OUTCOMES}
    return {outcome: count for outcome, count in found.items() if count}


async def served(
    services: Services, connection: Connection, body: Any = BODY, headers: list[tuple[bytes, bytes]] | None = None
) -> Exchange:
    """A request as the protocol has it served."""
    exchange = Exchange(services, "completions", a_request(body, headers=headers or []), connection.response())
    try:
        exchange.check()
    except BalanceRouteError as error:
        exchange.refuse(error)
        return exchange
    async with dispatching(services):
        await exchange.run()
    return exchange


def end_for_want_of_workers(services: Services) -> None:
    for leg in list(services.legs):
        leg.interrupt(NoHealthyWorkers("no decode worker"))


@pytest.mark.parametrize("stream", [False, True])
@with_virtual_time
async def test_an_answer_has_the_client_s_own_id_and_counts_as_finished(stream: bool) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    script(services, "p0", probed())
    script(services, "d0", WHOLE if stream else whole(20, 21))
    await served(services, connection, BODY | {"stream": stream}, [(b"x-request-id", b"mine")])
    status, headers, body = connection.answer
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert (b"[DONE]" in body) == stream and connection.done == [True]
    assert counted(services) == {"finished": 1} and services.exchanges == 0
    assert services.metrics.tokens.value() == 2


@pytest.mark.parametrize(
    ("answer", "status", "outcome"),
    [
        (Page(b'{"error": {"message": "too long"}}', 400), 400, "rejected"),
        (Page(b'{"error": {"message": "broken"}}', 500), 500, "failed"),
        (BadUpstreamReply("cut", worker="p0", tier="prefill"), 502, "failed"),
    ],
    ids=["the client's fault", "the worker's", "broken"],
)
@with_virtual_time
async def test_a_failure_before_the_first_byte_is_a_status_with_an_openai_error(
    answer: Answer, status: int, outcome: str
) -> None:
    services, connection = a_router(a_config(1, 1, retry={"max_attempts": 1})), Connection()
    script(services, "p0", answer)
    await served(services, connection, BODY | {"stream": True})
    status_code, _, body = connection.answer
    assert status_code == status and "message" in orjson.loads(body)["error"]
    assert counted(services) == {outcome: 1} and not services.legs


@with_virtual_time
async def test_a_failure_after_the_first_byte_is_an_event_and_the_answer_never_ends() -> None:
    config = a_config(1, 1, retry={"max_attempts": 1, "resume_on_worker_loss": False})
    services, connection = a_router(config), Connection()
    script(services, "p0", probed())
    script(services, "d0", Page(events(20, finish=None), breaks=BadUpstreamReply("cut", worker="", tier="decode")))
    await served(services, connection, BODY | {"stream": True})
    status, _, body = connection.answer
    assert status == 200 and b'"error"' in body and b"[DONE]" not in body
    assert connection.done == [] and counted(services) == {"failed": 1}


@with_virtual_time
async def test_an_answer_is_counted_and_timed_also_without_a_known_prompt_size() -> None:
    layerwise = {"callback_url": "http://10.0.0.5:8000"}
    services = a_router(a_config(1, 1, connector="mooncake_layerwise", layerwise=layerwise))
    script(services, "d0", WHOLE)  # it asks for no prefill, and tells no usage
    await served(services, Connection(), BODY | {"stream": True})
    assert counted(services) == {"finished": 1}
    assert (services.metrics.tokens.value(), services.metrics.ttft.count) == (2, 1)


@pytest.mark.parametrize(
    "then", [b'data: {"error": {"message": "no", "code": 400}}\n\n', b""], ids=["error", "silence"]
)
@with_virtual_time
async def test_an_error_that_ends_a_begun_stream_is_no_refusal(then: bytes) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    script(services, "p0", probed())
    script(services, "d0", Page(events(20, finish=None) + then, ends=False))
    services.loop.call_later(1.0, end_for_want_of_workers, services)
    await served(services, connection, BODY | {"stream": True})
    assert connection.answer[0] == 200 and connection.done == []
    assert counted(services) == {"failed": 1}


@pytest.mark.parametrize(("body", "param"), [(b"no JSON", None), ({"model": "m"}, "prompt"), (BODY | {"n": 1000}, "n")])
@with_virtual_time
async def test_a_clients_error_is_a_400_and_reaches_no_worker(body: Any, param: str | None) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    p0 = script(services, "p0", probed())
    await served(services, connection, body)
    status, _, error_body = connection.answer
    assert (status, orjson.loads(error_body)["error"]["param"]) == (400, param)
    assert counted(services) == {"rejected": 1} and not p0.asked


@with_virtual_time
async def test_a_header_without_meaning_is_refused_before_the_body() -> None:
    services = a_router(a_config(1, 1))
    request = a_request(BODY, headers=[(b"x-request-timeout", b"soon")])
    with pytest.raises(InvalidRequest):
        Exchange(services, "completions", request, Connection().response()).check()


@with_virtual_time
async def test_choices_together_have_no_engine_s_figures_of_one_of_them() -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    page = whole(20, 21)
    script(services, "p0", probed())
    script(services, "d0", Page(orjson.dumps(orjson.loads(page.body) | {"metrics": {"queued_s": 1}})))
    await served(services, connection, BODY | {"n": 2})
    answer = orjson.loads(connection.answer[2])
    assert len(answer["choices"]) == 2 and answer["metrics"] is None


@with_virtual_time
async def test_a_prompt_with_several_choices_is_looked_at_once() -> None:
    """A chat of 1 MB with 256 images and 128 choices stopped everybody's stream for half a minute."""
    services, connection = a_router(a_config(1, 1, prefill={"policy": "prefix_affinity"})), Connection()
    services.keyer, hashed = Keys(b"salt", by_header=False), list[bytes]()

    def key(keys: Keys, prompt: bytes, header: str) -> str:
        hashed.append(prompt)
        return str(len(hashed))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "key", key)
        script(services, "p0", probed())
        script(services, "d0", whole(20, 21))
        exchange = await served(services, connection, BODY | {"prompt": ["a b c", "d"], "n": 3})
    assert len(orjson.loads(connection.answer[2])["choices"]) == 6
    assert hashed == [b'"a b c"', b'"d"']
    [weights] = services.prompt_estimates._models.values()
    assert weights.answers == 2
    legs = exchange._legs
    assert [leg._key for leg in legs] == ["1"] * 3 + ["2"] * 3
    assert [leg._blocks is None for leg in legs] == [False, True, True] * 2  # the first leg's are those of all
    assert len({leg.answer.estimated_tokens for leg in legs[:3]}) == 1


@with_virtual_time
async def test_a_draining_router_refuses_a_request_before_its_body() -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    services.ledger.drain()
    with pytest.raises(Draining):
        Exchange(services, "completions", a_request(b""), Connection().response()).check()
    await served(services, connection)
    status, headers, _ = connection.answer
    assert status == 503 and int(headers["retry-after"]) >= 1 and counted(services) == {"rejected": 1}


@with_virtual_time
async def test_a_request_whose_body_came_after_the_drain_began_is_refused() -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    exchange = Exchange(services, "completions", a_request(BODY), connection.response())
    exchange.check()
    services.ledger.drain()
    await exchange.run()
    assert connection.answer[0] == 503 and counted(services) == {"rejected": 1} and not services.legs


@with_virtual_time
async def test_a_request_whose_client_has_gone_before_it_is_served_reaches_no_worker() -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    prefiller, response = script(services, "p0", probed()), connection.response()
    exchange = Exchange(services, "completions", a_request(BODY), response)
    exchange.check()
    response.lost()
    async with dispatching(services):
        await exchange.run()
    assert not prefiller.asked and counted(services) == {"cancelled": 1}


@with_virtual_time
async def test_a_request_that_the_stopping_server_cancels_is_cancelled_and_counted() -> None:
    services = a_router(a_config(1, 1))
    p0 = script(services, "p0", None)
    exchange = Exchange(services, "completions", a_request(BODY), Connection().response())
    exchange.check()
    async with dispatching(services):
        task = services.loop.create_task(exchange.run())
        await until(lambda: p0.under_way)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert counted(services) == {"cancelled": 1} and not services.legs and services.exchanges == 0


@pytest.mark.parametrize(
    ("more", "second"),
    [
        ({}, whole(20, 21)),
        ({"stream": True}, WHOLE),
        ({"n": 2}, whole(20, 21)),
        ({"n": 2, "stream": True}, WHOLE),
        ({"stream": True}, Page(events(20, finish=None), breaks=BadUpstreamReply("cut", worker="", tier="decode"))),
        ({"max_tokens": "many"}, None),
    ],
    ids=["whole", "stream", "choices", "streamed choices", "cut off", "refused"],
)
@with_virtual_time
async def test_a_key_may_send_its_next_request_as_soon_as_it_has_the_last_bytes(
    more: dict[str, Any], second: Answer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: team, sha256: {sha256(KEY).hexdigest()}, tokens_per_minute: 10000}}]")
    retry = {"max_attempts": 1, "resume_on_worker_loss": False}
    config = a_config(1, 1, auth={"client_keys": str(keys)}, retry=retry)
    services, connection = a_router(config), Connection()
    services.perimeter = Perimeter(config)
    assert services.perimeter.keys is not None
    (key,), in_flight = services.perimeter.keys, list[int]()
    write = connection.transport.write

    def noted(data: bytes) -> None:
        in_flight.append(key.in_flight)
        write(data)

    connection.transport.write = noted  # type: ignore[method-assign]
    script(services, "p0", probed(), probed())
    script(services, "d0", second, second)
    await served(services, connection, BODY | more, [(b"authorization", b"Bearer " + KEY)])
    assert in_flight and in_flight[-1] == key.in_flight == 0
    assert in_flight == sorted(in_flight, reverse=True)


@with_virtual_time
async def test_a_key_pays_for_a_prompt_whose_prefiller_answers_after_the_decode_worker(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: team, sha256: {sha256(KEY).hexdigest()}, tokens_per_minute: 10000}}]")
    reached = {"callback_url": "http://10.0.0.5:8000"}
    config = a_config(1, 1, connector="mooncake_layerwise", layerwise=reached, auth={"client_keys": str(keys)})
    services = a_router(config)
    services.perimeter = Perimeter(config)
    services.fleet["d0"].upstream = Asking(services, Page(events(20) + DONE))  # type: ignore[assignment]
    services.fleet["p0"].upstream = Late(1.0, probed(None))  # type: ignore[assignment]
    more = {"stream": True, "max_tokens": 1, "prompt": "one two three four five six seven"}
    await served(services, Connection(), BODY | more, [(b"authorization", b"Bearer " + KEY)])
    assert services.perimeter.keys is not None
    (use,) = services.perimeter.keys.uses()
    assert use.in_flight == 0 and use.tokens > 1 + 3


@pytest.mark.parametrize("begun", [False, True])
@with_virtual_time
async def test_a_client_that_leaves_cancels_its_request_and_receives_nothing_more(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "balanceroute.requests")
    services, connection = a_router(a_config(1, 1)), Connection()
    script(services, "p0", probed())
    script(services, "d0", Page(events(20, finish=None) if begun else b"", ends=False))
    response = connection.response()
    exchange = Exchange(services, "completions", a_request(BODY | {"stream": True}), response)
    exchange.check()
    async with dispatching(services):
        task = services.loop.create_task(exchange.run())
        await until(lambda: services.fleet["d0"].in_use and response.started == begun)
        response.lost()
        await task
    assert counted(services) == {"cancelled": 1} and not services.legs
    assert all(worker.in_use == 0 for worker in services.fleet)
    (line,) = [vars(record) for record in caplog.records if record.message == "request"]
    assert (line["outcome"], line["status"]) == ("cancelled", 200 if begun else 0)


@pytest.mark.parametrize(("asked", "counts_as"), [(-5, 0), (3, 3), (9, 5)])
@with_virtual_time
async def test_a_priority_is_clamped_for_the_router_and_reaches_the_engine_unchanged(
    asked: int, counts_as: int
) -> None:
    services, connection = a_router(a_config(1, 1, limits={"priority": {"min": 0, "max": 5}})), Connection()
    p0 = script(services, "p0", probed())
    script(services, "d0", whole(20, 21))
    submitted: dict[str, int] = {}
    on_answer = services.ledger.on_answer

    def noted(request_id: str, answer: decider.Answer) -> None:
        submitted[request_id] = services.ledger.scheduler.snapshot.requests[request_id].priority
        on_answer(request_id, answer)

    services.ledger.on_answer = noted
    await served(services, connection, BODY | {"priority": asked})
    assert list(submitted.values()) == [counts_as] and orjson.loads(p0.asked[0].body)["priority"] == asked


@pytest.mark.parametrize(
    ("header", "engine_gets"),
    [(b"-2", -2), (b"7", 7), (b"soon", 1), (b"99999999999999999999", 1)],
    ids=["first", "last", "no-integer", "no-engine-holds-it"],
)
@with_virtual_time
async def test_a_priority_header_overrides_the_body_as_on_vllm(header: bytes, engine_gets: int) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    p0 = script(services, "p0", probed())
    d0 = script(services, "d0", whole(20, 21))
    await served(services, connection, BODY | {"priority": 1}, [(b"x-vllm-priority", header)])
    priorities = [orjson.loads(worker.asked[0].body)["priority"] for worker in (p0, d0)]
    assert priorities == [engine_gets, engine_gets]


@with_virtual_time
async def test_a_keys_limit_is_a_429_in_the_log_too_and_a_finished_request_frees_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "balanceroute.requests")
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: team, sha256: {sha256(KEY).hexdigest()}, max_in_flight: 1}}]")
    config = a_config(1, 1, auth={"client_keys": str(keys)})
    services = a_router(config)
    services.perimeter = Perimeter(config)
    bearer = [(b"authorization", b"Bearer " + KEY)]
    p0 = script(services, "p0", None)
    script(services, "d0", WHOLE)
    held = Exchange(services, "completions", a_request(BODY, headers=bearer), Connection().response())
    held.check()
    async with dispatching(services):
        task = services.loop.create_task(held.run())
        await until(lambda: p0.under_way)
        second = Connection()
        other = Exchange(services, "completions", a_request(BODY, headers=bearer), second.response())
        with pytest.raises(BalanceRouteError) as refused:
            other.check()
        other.refuse(refused.value)
        assert second.answer[0] == 429
        (line,) = [vars(record) for record in caplog.records if record.message == "request"]
        told = [line[name] for name in ("status", "key", "peer", "path")]
        assert line["refused"] and told == [429, "team", "203.0.113.9", "/v1/completions"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    third = Exchange(services, "completions", a_request(BODY, headers=bearer), Connection().response())
    third.check()


@with_virtual_time
async def test_an_internal_error_is_a_500_counted_and_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    services.strict = False

    def broken(request_id: str, answer: decider.Answer) -> None:
        raise RuntimeError("a bug")

    services.ledger.on_answer = broken
    await served(services, connection, headers=[(b"x-request-id", b"mine")])
    status, _, body = connection.answer
    assert status == 500 and b"a bug" not in body
    assert counted(services) == {"failed": 1} and services.metrics.tasks_failed.value("request") == 1
    assert any(record.levelno == logging.ERROR and record.exc_info for record in caplog.records)


@with_virtual_time
async def test_an_internal_error_within_a_stream_is_logged_with_the_status_that_was_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    services.strict = False
    script(services, "p0", probed())
    script(services, "d0", Page(events(20, finish=None), breaks=RuntimeError("a bug")))
    with caplog.at_level(logging.INFO, "balanceroute.requests"):
        await served(services, connection, BODY | {"stream": True})
    assert connection.answer[0] == 200 and counted(services) == {"failed": 1}
    assert services.metrics.tasks_failed.value("request") == 1
    assert [record.status for record in caplog.records if record.message == "request"] == [200]


@with_virtual_time
async def test_the_log_says_why_a_request_failed_and_quotes_no_body_of_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    services, connection = a_router(a_config(1, 1, retry={"max_attempts": 1})), Connection()
    script(services, "p0", 500)
    exchange = Exchange(services, "completions", a_request(BODY), connection.response())
    exchange.check()
    async with dispatching(services):
        with caplog.at_level(logging.INFO, "balanceroute.requests"):
            await exchange.run()
    assert counted(services) == {"failed": 1}
    (line,) = [vars(record) for record in caplog.records if record.message == "request"]
    assert line["error"] == "prefill worker: status 500"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no JSON", "The body is not valid JSON: "),
        (BODY | {"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ],
    ids=["no JSON", "a field"],
)
@with_virtual_time
async def test_the_log_says_why_a_request_was_refused(body: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    with caplog.at_level(logging.INFO, "balanceroute.requests"):
        await served(services, connection, body)
    (line,) = [vars(record) for record in caplog.records if record.message == "request"]
    assert (line["outcome"], line["status"]) == ("rejected", 400) and line["error"].startswith(reason)


@pytest.mark.parametrize("kind", ["my secret", "it's mine", 'a "secret"', "'a' \"secret\"", "x" * 80])
@with_virtual_time
async def test_the_log_quotes_nothing_of_a_body_that_was_refused(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    message = {"role": "user", "content": [{"type": kind}]}
    request = a_request({"model": "m", "max_tokens": 1, "messages": [message]})
    exchange = MessagesExchange(services, request, connection.response())
    exchange.check()
    with caplog.at_level(logging.INFO, "balanceroute.requests"):
        await exchange.run()
    (line,) = [vars(record) for record in caplog.records if record.message == "request"]
    assert line["error"].startswith("messages.0.content.0.type: A block of type ...") and kind[-4:] not in line["error"]


@pytest.mark.parametrize("tier", ["prefill", "decode"])
@with_virtual_time
async def test_a_wait_that_ends_without_a_worker_is_answered_and_counted(
    tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    services, connection = a_router(a_config(1, 1, queue={"deadline_s": 20.0}, pool={"ttl_s": 20.0})), Connection()
    script(services, "p0", probed())
    services.fleet.drain(services.fleet["p0" if tier == "prefill" else "d0"])
    exchange = Exchange(services, "completions", a_request(BODY), connection.response())
    exchange.check()
    async with dispatching(services):
        task = services.loop.create_task(exchange.run())
        await let_pass(21.0)
        services.ledger.expire()
        with caplog.at_level(logging.INFO, "balanceroute.requests"):
            await task
    assert connection.answer[0] == 503 and counted(services) == {"expired": 1}
    waits = {"prefill": services.metrics.prefill_wait, "decode": services.metrics.decode_wait}
    assert (waits[tier].count, round(waits[tier].total)) == (1, 21)
    assert waits["prefill"].count == 1 and waits["decode"].count == (tier == "decode")
    (line,) = [vars(record) for record in caplog.records if record.message == "request"]
    assert line["error"].startswith("The request waited too long for ")
    waited_s = {"prefill": line["prefill_wait_s"], "decode": line["decode_wait_s"]}
    assert round(waited_s.pop(tier)) == 21 and list(waited_s.values()) == [0.0]


@pytest.mark.parametrize("choices", [1, 3])
@with_virtual_time
async def test_the_log_has_the_number_of_worker_requests_per_client_request(
    choices: int, caplog: pytest.LogCaptureFixture
) -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    script(services, "d0", whole(20, 21))
    with caplog.at_level(logging.INFO, "balanceroute.requests"):
        await served(services, Connection(), BODY | {"n": choices})
    (line,) = [vars(record) for record in caplog.records if record.message == "request"]
    assert (line.get("choices", 1), line["tokens"]) == (choices, 2 * choices)


@with_virtual_time
async def test_a_wait_that_ends_because_all_workers_left_is_counted() -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    services.fleet.drain(services.fleet["p0"])
    services.loop.call_later(21.0, end_for_want_of_workers, services)
    await served(services, connection)
    assert connection.answer[0] == 503 and counted(services) == {"rejected": 1}
    assert (services.metrics.prefill_wait.count, services.metrics.prefill_wait.total) == (1, 21.0)


@with_virtual_time
async def test_a_request_refused_by_a_full_queue_has_no_wait() -> None:
    services = a_router(a_config(1, 1, queue={"max_queued": 1}))
    services.fleet.drain(services.fleet["p0"])
    first = Exchange(services, "completions", a_request(BODY), Connection().response())
    first.check()
    async with dispatching(services):
        task = services.loop.create_task(first.run())
        await until(lambda: services.ledger.view().queued == 1)
        refused = Connection()
        second = Exchange(services, "completions", a_request(BODY), refused.response())
        second.check()
        await second.run()
        assert refused.answer[0] == 429 and services.metrics.prefill_wait.count == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@with_virtual_time
async def test_a_request_whose_body_never_arrived_is_counted() -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    exchange = Exchange(services, "completions", a_request(b""), connection.response())
    exchange.check()
    exchange.refuse(InvalidRequest("too large", status=413))
    assert connection.answer[0] == 413 and counted(services) == {"rejected": 1}
    gone = Exchange(services, "completions", a_request(b""), Connection().response())
    gone.check()
    gone.abandoned()
    assert counted(services) == {"rejected": 1, "cancelled": 1} and services.exchanges == 0


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "page", [Page(events(20, text="x" * 100_000) + DONE), whole(*range(100, 20_100))], ids=["events", "whole"]
)
@with_virtual_time
async def test_what_is_kept_of_an_unstreamed_answer_is_counted_choice_by_choice(page: Page, n: int) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    script(services, "p0", probed())
    script(services, "d0", page)
    limit = 1000 if page.body.startswith(b"data:") else 16
    await served(services, connection, BODY | {"n": n, "max_tokens": limit})
    assert connection.answer[0] == 200
    assert connection.kept_bytes > n * 64 * 1024


@pytest.mark.parametrize("stream", [False, True])
@with_virtual_time
async def test_what_prefillers_say_of_the_prompt_is_counted_choice_by_choice_while_it_is_kept(stream: bool) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()
    script(services, "p0", probed(text="a b c", prompt_logprobs=["x" * 100_000]))
    script(services, "d0", Page(events(20, 21) + DONE) if stream else whole(20, 21))
    wish = {"stream": True, "echo": True} if stream else {"prompt_logprobs": 1}
    await served(services, connection, BODY | {"n": 2} | wish)
    assert connection.answer[0] == 200
    assert connection.kept_bytes > 200_000


@pytest.mark.parametrize("large", ["prompt", "answer"])
@with_virtual_time
async def test_an_unstreamed_answer_that_finds_no_room_is_a_503_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, large: str
) -> None:
    services, connection = a_router(a_config(1, 1)), Connection()

    def keep(more_bytes: int) -> None:
        raise EdgeFull("no room")

    monkeypatch.setattr(connection, "keep", keep)
    script(services, "p0", probed(prompt_logprobs=["x" * 100_000]) if large == "prompt" else probed())
    script(services, "d0", Page(events(20, text="x" * 100_000) + DONE))
    wish = {"prompt_logprobs": 1} if large == "prompt" else {}
    await served(services, connection, BODY | {"n": 2, "max_tokens": 1000} | wish)
    assert connection.answer[0] == 503 and counted(services) == {"rejected": 1}
    assert not services.legs and services.fleet["d0"].healthy

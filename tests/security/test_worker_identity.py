"""Late poison: bytes that a worker sends after its answer, or instead of it, never become another request's answer.

Bytes on an idle connection close it. Bytes that come when the next request has just been sent look like its answer;
then the id gives them away, because vLLM puts X-Request-Id into the `id` of every answer and event.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from balanceroute.proxy.wire.client_request import FOLLOWED_ABOVE_TOKENS
from tests.security.evil_worker import (
    Asked,
    Attacked,
    answered,
    attacked,
    events,
    probed,
    reply,
    token,
    well_decoded,
    well_prefilled,
)
from tests.waiting import pace, until

pytestmark = pytest.mark.anyio
POISON = "poison"


@pytest.fixture
async def router() -> AsyncIterator[Attacked]:
    """A router whose workers have shown that they echo ids."""
    async with attacked() as router:
        assert (await router.complete()).status_code == 200
        router.prefiller.asked.clear()
        router.decoder.asked.clear()
        yield router
        assert "Traceback" not in await router.metrics()
        await router.unharmed()


def of_another(answer: Callable[..., dict[str, Any]]) -> Callable[[Asked], dict[str, Any]]:
    """The answer to a request that was not asked now."""

    def other(asked: Asked) -> dict[str, Any]:
        return {**answer(asked), "id": "cmpl-0123456789abcdef"}

    return other


def once(bad: Callable[[Asked], bytes], good: Callable[[Asked], bytes]) -> Callable[[Asked], bytes]:
    """The first answer is bad, the others are good."""
    answers = iter([bad])
    return lambda asked: next(answers, good)(asked)


async def foreign(router: Attacked, worker: str, tier: str) -> float:
    """How many answers of other requests were caught."""
    line = f'balanceroute_upstream_errors_total{{kind="foreign_reply",tier="{tier}",worker="{worker}"}} '
    return float((await router.metrics()).partition(line)[2].partition("\n")[0] or 0)


async def test_a_prefillers_answer_to_another_request_is_not_taken(router: Attacked) -> None:
    params = {"remote_block_ids": [[99]], "whose": POISON}
    router.prefiller.answer = once(
        lambda asked: reply({**of_another(probed)(asked), "kv_transfer_params": params}), well_prefilled
    )
    assert (await router.complete()).status_code == 200
    assert await foreign(router, "p0", "prefill") == 1
    assert all(POISON not in asked.body.decode() for asked in router.decoder.asked)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_decoders_answer_to_another_request_is_not_passed_on(router: Attacked, stream: bool) -> None:
    def poisoned(asked: Asked) -> bytes:
        whole = of_another(answered)(asked)
        whole["choices"][0]["text"] = POISON
        return events(of_another(lambda asked: token(asked, POISON))(asked)) if stream else reply(whole)

    router.decoder.answer = once(poisoned, well_decoded)
    answer = await router.complete(stream=stream)
    assert answer.status_code == 200 and POISON not in answer.text
    assert await foreign(router, "d0", "decode") == 1


async def test_an_answer_without_an_id_is_not_taken_from_a_worker_that_gives_them(router: Attacked) -> None:
    router.decoder.answer = once(lambda asked: reply({**answered(asked), "id": None}), well_decoded)
    assert (await router.complete()).status_code == 200
    assert await foreign(router, "d0", "decode") == 1


async def test_a_stream_that_continues_with_another_requests_events_resumes_elsewhere(router: Attacked) -> None:
    def mixed(asked: Asked) -> bytes:
        return events(token(asked, "a"), of_another(lambda asked: token(asked, POISON))(asked), token(asked, "b"))

    def rest(asked: Asked) -> bytes:
        return events(token(asked, "b", finish="length"))

    router.prefiller.answer = lambda asked: reply(
        probed(asked, prompt_token_ids=[1, 2, 3][: 3 if asked.data["prompt"] == "hi" else None])
        | ({} if asked.data["prompt"] == "hi" else {"usage": {"prompt_tokens": 4}})
    )
    router.decoder.answer = once(mixed, rest)
    answer = await router.complete(stream=True)
    assert answer.status_code == 200 and POISON not in answer.text
    assert answer.text.count('"text":"a"') == answer.text.count('"text":"b"') == 1
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("worker", ["prefiller", "decoder"])
async def test_late_bytes_reach_no_other_request(router: Attacked, worker: str) -> None:
    """After each answer another one, at a time of the worker's choosing: at once, when idle, or under the next."""
    evil = getattr(router, worker)
    good = well_prefilled if worker == "prefiller" else well_decoded
    pauses = [0.0, 0.001, 0.005, 0.02]

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        late = {**(probed if worker == "prefiller" else answered)(asked)}
        late["choices"][0]["text"] = POISON
        late["kv_transfer_params"] = {"whose": POISON}
        writer.write(good(asked))
        pause = pauses[len(evil.asked) % len(pauses)]
        if pause:
            await pace(pause)
        writer.write(reply(late))

    evil.respond = respond
    answers = [await router.complete() for _ in range(40)]
    assert all(POISON not in answer.text for answer in answers)
    assert [answer.status_code for answer in answers] == [200] * 40
    bodies = [asked.body for asked in router.decoder.asked]
    assert bodies and all(POISON.encode() not in body for body in bodies)


async def test_bytes_after_a_complete_answer_close_its_connection(router: Attacked) -> None:
    for extra in (reply({}), b"HTTP/1.1 200 OK\r\n", b"garbage", b"0\r\n\r\n"):
        router.decoder.answer = once(lambda asked, extra=extra: well_decoded(asked) + extra, well_decoded)
        upstream = router.app.services.fleet["d0"].upstream
        before = set(upstream._idle)
        answer = await router.complete()
        assert answer.status_code == 200 and "xx" in answer.text
        await until(lambda before=before, upstream=upstream: not upstream.busy_connections)
        assert all(connection in before or connection.usable for connection in upstream._idle)
        assert (await router.complete()).status_code == 200


async def test_a_worker_that_never_echoed_ids_is_served_unchecked_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def own_id(asked: Asked) -> bytes:
        return (
            events({**token(asked, finish="length"), "id": "own"})
            if asked.data.get("stream")
            else reply({**answered(asked), "id": "own"})
        )

    async with attacked(lambda asked: reply({**probed(asked), "id": "own"}), own_id) as router:
        for stream in (False, True, False):
            assert (await router.complete(stream=stream)).status_code == 200
        records = [record for record in caplog.records if "does not echo" in record.message]
        assert sorted(getattr(record, "worker", "") for record in records) == ["d0", "p0"]
        router.decoder.answer = well_decoded  # a new version: from now on it does
        assert (await router.complete()).status_code == 200
        router.decoder.answer = own_id
        assert (await router.complete()).status_code == 502


async def test_a_worker_that_was_down_is_checked_anew_for_echoed_ids() -> None:
    """It may have come back as an engine that has ids of its own."""
    async with attacked() as router:
        assert (await router.complete()).status_code == 200
        fleet = router.app.services.fleet
        fleet.set_healthy(fleet["d0"], False)
        router.decoder.answer = lambda asked: reply({**answered(asked), "id": "own"})
        await until(lambda: fleet["d0"].healthy)
        assert (await router.complete()).status_code == 200


SHAPES: dict[str, dict[str, Any]] = {
    "whole": {},
    "assembled": {"max_tokens": 200},
    "stream": {"stream": True},
    "whole n": {"n": 2},
    "stream n": {"n": 2, "stream": True},
    "scored": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "scored stream": {"echo": True, "max_tokens": 0, "stream": True},
}


@pytest.mark.parametrize(
    ("shape", "tier"),
    [(shape, tier) for shape in SHAPES for tier in ("prefill", "decode") if (shape[:6], tier) != ("scored", "decode")],
)
async def test_a_client_sees_the_same_id_however_many_tries_its_answer_took(
    router: Attacked, shape: str, tier: str
) -> None:
    """Every try has an X-Request-Id of its own, and engines make their `id` of it."""
    scored = shape.startswith("scored")

    def failed(asked: Asked) -> bytes:
        return reply({"error": {"message": "no", "code": 500}}, status="500 Internal Server Error")

    if scored:
        router.prefiller.answer = once(failed, lambda asked: reply(probed(asked, kv_transfer_params=None)))
    elif tier == "prefill":
        router.prefiller.answer = once(failed, well_prefilled)
    else:
        router.decoder.answer = once(failed, well_decoded)
    answer = await router.complete(**SHAPES[shape], headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200
    ids = set(re.findall(r'"id":"([^"]*)"', answer.text))
    assert len(ids) == 1, ids
    assert re.fullmatch(r"cmpl-mine-[0-9a-f]{16}", ids.pop())
    asked = [one.id for one in (*router.prefiller.asked, *router.decoder.asked)]
    assert any(re.fullmatch(r"mine-[0-9a-f]{16}(-\d)?-2", one) for one in asked), asked


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_an_answer_cut_off_at_its_limit_has_an_end_though_its_worker_echoes_ids(
    router: Attacked, stream: bool, chat: bool
) -> None:
    """Nobody has anything left to generate, so the router writes the end, which no worker's id is in."""
    limit = FOLLOWED_ABOVE_TOKENS + 1
    router.prefiller.answer = lambda asked: reply(probed(asked, prompt_token_ids=[1, 2, 3]))
    router.decoder.answer = lambda asked: events(*[token(asked)] * limit)
    answer = await router.complete(chat=chat, stream=stream, max_tokens=limit)
    assert answer.status_code == 200
    assert '"finish_reason":"length"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n") or not stream

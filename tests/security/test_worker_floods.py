"""Workers whose answers do not end: what each kind costs is bounded, and the client is told."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from balanceroute.proxy.life import pool_reaper
from balanceroute.proxy.wire import answers
from tests.security.evil_worker import Asked, attacked, token

pytestmark = pytest.mark.anyio

LIMIT = 2**18
FLOOD_BYTES = 2**28  # what a worker would send if nobody stopped it: eight times the longest event
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


Make = Callable[[Asked, int], bytes]
KINDS: dict[str, Make] = {
    "tokens": lambda asked, n: event(token(asked, "x" * 4000)),
    "text without ids": lambda asked, n: event(token(asked, "x" * 4000, token_ids=None)),
    "one choice more each": lambda asked, n: event(token(asked, "x" * 4000, index=n)),
    "fields of their own": lambda asked, n: event({**token(asked), f"field{n}": "x" * 4000}),
    "ids of the prompt": lambda asked, n: event(token(asked, prompt_token_ids=[1] * 1000)),
    "one event that does not end": lambda asked, n: b"data: " if n == 0 else b"x" * 4000,
    "one line that says nothing": lambda asked, n: b":" * 4000,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
async def test_an_endless_unstreamed_answer_is_a_502(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """It is put together of a stream, so what has come of it is kept."""
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", LIMIT)
    sent = 0

    async def flood(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD)
        for n in range(FLOOD_BYTES // 4000):
            part = make(asked, n)
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            sent += len(part)
            await writer.drain()

    async with attacked(retry={"max_attempts": 1}) as router:
        router.decoder.respond = flood
        answer = await router.complete(max_tokens=500)
        assert answer.status_code == 502, answer.text
        assert answer.json()["error"]["message"].startswith("decode worker: ")
        assert sent < FLOOD_BYTES // 4
        await router.unharmed()


IDS = {  # without text, so that the client has nothing to read, and with one, so that events fit a template
    "no text": {"delta": {}, "text": ""},
    "text": {"delta": {"content": "x"}, "text": "x"},
}


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize("part", IDS.values(), ids=IDS)
async def test_an_answer_with_more_tokens_than_any_context_window_is_a_502(
    monkeypatch: pytest.MonkeyPatch, part: dict[str, Any], chat: bool
) -> None:
    monkeypatch.setattr(pool_reaper, "MAX_TOKENS", 10**5)
    sent = 0

    async def flood(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        name = "delta" if chat else "text"
        data = token(asked, token_ids=[7] * 10_000, **{name: part[name]})
        text = b"data: %b\n\n" % json.dumps(data, separators=(",", ":")).encode()
        writer.write(HEAD)
        while sent < FLOOD_BYTES:
            writer.write(b"%x\r\n%b\r\n" % (len(text), text))
            sent += len(text)
            await writer.drain()

    async with attacked() as router:
        router.decoder.respond = flood
        answer = await router.complete(chat=chat, max_tokens=500)
        assert answer.status_code == 502 and "tokens" in answer.text
        assert len(router.decoder.asked) == 1, "it was asked for the rest of an answer that is none"
        assert sent < FLOOD_BYTES // 2
        await router.unharmed()

"""Requests between scripted workers and a client that keeps what it gets, on the virtual clock."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from balanceroute.errors import ConnectionLost
from balanceroute.proxy.admission.decode_dispatcher import DecodeDispatcher
from balanceroute.proxy.admission.prefill_dispatcher import PrefillDispatcher
from balanceroute.proxy.client.outlets import PartAnswer
from balanceroute.proxy.life.leg import Leg, Strategy
from balanceroute.proxy.life.pull import Pull
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.wire.client_request import ClientRequest, parse
from tests.unit.proxy.virtual_time import Page, ScriptedUpstream
from tests.waiting import until

PROMPT_IDS = [5, 6, 7]
DONE = b"data: [DONE]\n\n"


class Client:
    """A stream's outlet that keeps what it gets."""

    ends_response = True

    def __init__(self) -> None:
        self.got, self.ended, self.started = b"", False, False

    def start(self) -> None:
        self.started = True

    def write(self, body: bytes, /) -> bool:
        self.got += body
        return True

    def end(self, body: bytes, /) -> None:
        self.got, self.ended = self.got + body, True

    async def drained(self) -> None:
        raise AssertionError("this client takes everything")

    def prompt_came(self, size: int) -> None:
        self.prompt_bytes = size

    def whole(self, body: bytes) -> None:
        self.got, self.ended = body, True

    def forget(self) -> bool:
        return not self.started

    @property
    def text(self) -> str:
        """What the model has said."""
        events = [orjson.loads(event) for event in self.got.split(b"data: ")[1:] if b"[DONE]" not in event]
        return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


def a_request(**fields: Any) -> ClientRequest:
    body = {"model": "m", "prompt": "a b c", "max_tokens": 10, "stream": True} | fields
    return parse("completions", orjson.dumps(body))


def probed(params: Any = "default", id_: str = "cmpl-$ID", prompt: Sequence[int] = PROMPT_IDS, **choice: Any) -> Page:
    """What a prefiller answers to a probe for this prompt."""
    pinned = {"remote_engine_id": "p"} if params == "default" else params
    token = {"index": 0, "text": "x", "token_ids": [1], "prompt_token_ids": [*prompt], "finish_reason": "length"}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
    reply = {"id": id_, "object": "text_completion", "created": 1, "model": "m", "choices": [token | choice]}
    return Page(orjson.dumps(reply | {"usage": usage, "kv_transfer_params": pinned}))


def events(*ids: int, finish: str | None = "length", **last: Any) -> bytes:
    """A token each; the last one with the finish reason."""
    out = b""
    for token in ids:
        reason = {"finish_reason": finish, **last} if token == ids[-1] else {"finish_reason": None}
        choice = {"index": 0, "text": f" {token}", "token_ids": [token], **reason}
        event = {"id": "cmpl-$ID", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        out += b"data: %s\n\n" % orjson.dumps(event)
    return out


LOST = ConnectionLost("reset", worker="d0", tier="decode")
WHOLE = Page(events(20, 21) + DONE)


def asked(upstream: ScriptedUpstream) -> list[dict[str, Any]]:
    """The completions that a worker was asked for."""
    return [orjson.loads(one.body) for one in upstream.asked if one.path == "/v1/completions"]


def whole(*ids: int, **more: Any) -> Page:
    """An answer in one piece."""
    choice = {"index": 0, "text": "".join(f" {token}" for token in ids), "token_ids": [*ids], "finish_reason": "length"}
    choice |= more
    reply = {"id": "cmpl-$ID", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": len(ids)}
    return Page(orjson.dumps(reply | {"usage": usage}))


def a_leg(
    services: Services,
    client: Client | None = None,
    strategy: Callable[[Leg], Strategy] = Pull,
    request_id: str = "request-1",
    **fields: Any,
) -> Leg:
    return Leg(services, request_id, a_request(**fields), client or Client(), [], strategy)


async def streaming(services: Services) -> tuple[Leg, asyncio.Task[None]]:
    """A leg whose answer is under way, and the task that runs it."""
    leg = a_leg(services)
    task = services.loop.create_task(leg.run())
    await until(lambda: leg.streaming_from is not None)
    return leg, task


def an_assembled_leg(
    services: Services, strategy: Callable[[Leg], Strategy] = Pull, **fields: Any
) -> tuple[Leg, Callable[[], Any]]:
    """A leg whose client wants the answer whole, and what gives that once it has run."""
    request = a_request(stream=False, **fields)
    answer = PartAnswer(request)
    leg = Leg(services, "r", request, answer, [], strategy)
    return leg, lambda: orjson.loads(answer.answer(leg))


@asynccontextmanager
async def dispatching(services: Services) -> AsyncIterator[None]:
    """Both dispatchers run, as they do in a router."""
    decode = DecodeDispatcher(services.ledger, services.metrics.admit_duration, lambda admission: None)
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(run()) for run in (PrefillDispatcher(services.ledger).run, decode.run)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result


def idle(services: Services) -> bool:
    """Whether nothing is held for any request."""
    view = services.ledger.view()
    held = any(worker.in_use for worker in services.fleet) or any(p.pinned or p.inflight for p in view.prefillers)
    return not (held or services.legs or view.queued or view.pooled or any(d.active for d in view.decoders))

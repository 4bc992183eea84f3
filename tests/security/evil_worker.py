"""A router, in the test's own loop, in front of one prefiller and one decoder that answer as an attack wants.

Every other request, the health check and the metrics included, is answered as a real worker would.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from balanceroute.config import validate
from balanceroute.proxy.app import RouterApp, create_app
from tests.integration.router import served
from tests.plain_http import PLAIN
from tests.unit.proxy.servers import read_request, worker
from tests.waiting import PATIENCE_S, until

PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_request_id": "r"}
METRICS = b'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:num_requests_running{engine="0"} 0.0\n'


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a worker got it."""

    method: str
    target: str
    head: bytes
    body: bytes

    @property
    def id(self) -> str:
        """Its X-Request-Id."""
        return self.head.lower().partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()

    @property
    def data(self) -> dict[str, Any]:
        """Its body."""
        return dict(json.loads(self.body))

    @property
    def chat(self) -> bool:
        """Whether it asks for a chat."""
        return self.target == "/v1/chat/completions"

    @property
    def reply_id(self) -> str:
        """What vLLM puts into `id`."""
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"


Answer = Callable[[Asked], bytes]
Respond = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def reply(
    body: bytes | dict[str, Any],
    *,
    status: str = "200 OK",
    kind: str = "application/json",
    headers: tuple[str, ...] = (),
) -> bytes:
    """A whole reply with a content-length."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def events(*payloads: dict[str, Any] | bytes, done: bool = True, kind: str = "text/event-stream") -> bytes:
    """A whole chunked stream, one chunk per event."""
    texts = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in payloads]
    parts = [b"data: %s\n\n" % text for text in [*texts, *([b"[DONE]"] if done else [])]]
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def probed(asked: Asked, **changes: Any) -> dict[str, Any]:
    """A prefiller's answer."""
    choice = {"index": 0, "text": "x", "message": {"content": "x"}, "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {"id": asked.reply_id, "choices": [choice], "usage": usage, "kv_transfer_params": PARAMS, **changes}


def token(asked: Asked, text: str = "x", finish: str | None = None, **changes: Any) -> dict[str, Any]:
    """One event of a decoder's stream."""
    part: dict[str, Any] = {"delta": {"content": text}} if asked.chat else {"text": text}
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish, "token_ids": [7], **changes}
    return {"id": asked.reply_id, "object": "o", "created": 1, "model": "m", "choices": [choice]}


def answered(asked: Asked, **changes: Any) -> dict[str, Any]:
    """A decoder's unstreamed answer."""
    part = {"message": {"role": "assistant", "content": "xx"}} if asked.chat else {"text": "xx"}
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length", "token_ids": [7, 8]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {"id": asked.reply_id, "choices": [choice], "usage": usage, "model": "m", "created": 1, **changes}


def well_prefilled(asked: Asked) -> bytes:
    """As a real prefiller answers."""
    return reply(probed(asked))


def well_decoded(asked: Asked) -> bytes:
    """As a real decoder answers."""
    if asked.data.get("stream"):
        return events(token(asked), token(asked, finish="length"))
    return reply(answered(asked))


def other(asked: Asked) -> bytes:
    """Whatever is no completion."""
    if asked.target == "/metrics":
        return reply(METRICS, kind="text/plain")
    return reply({})


@dataclass(slots=True)
class Evil:
    """One worker; `answer` may be replaced while it runs. `respond` writes by itself what no single reply is."""

    answer: Answer
    others: Answer = other
    respond: Respond | None = None
    asked: list[Asked] = field(default_factory=list)

    async def script(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        while True:
            head, body = await read_request(reader)
            method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
            asked = Asked(method, target, head, body)
            if not target.endswith("/completions"):
                writer.write(self.others(asked))
                continue
            self.asked.append(asked)
            if self.respond is None:
                writer.write(self.answer(asked))
            else:
                await self.respond(asked, writer)


@dataclass(frozen=True, slots=True)
class Attacked:
    """The router and who attacks it."""

    app: RouterApp
    client: httpx.AsyncClient
    prefiller: Evil
    decoder: Evil

    async def complete(
        self, *, chat: bool = False, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """One completion, whatever its answer."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
        body = {"model": "m", **prompt, "max_tokens": 2, **fields}
        return await self.client.post(path, json=body, headers=headers)

    async def metrics(self) -> str:
        """What the router counts."""
        return (await self.client.get("/metrics")).text

    async def failures(self) -> float:
        """How many failures of workers the router has counted."""
        return sum(
            map(float, re.findall(r"^balanceroute_upstream_errors_total\{.*\} (\S+)", await self.metrics(), re.M))
        )

    async def unharmed(self) -> None:
        """The router holds nothing, has met no bug of its own, can still show itself, and serves with good workers."""
        self.prefiller.answer, self.decoder.answer = well_prefilled, well_decoded
        self.prefiller.respond = self.decoder.respond = None
        services = self.app.services

        async def served() -> bool:
            return (await self.complete()).status_code == 200

        await until(served)  # its circuit may be open
        await until(lambda: not (services.tickets.by_id or services.legs or services.drainer.pending))
        await self.sound()

    async def sound(self) -> None:
        """The router can show itself, and has met no bug of its own."""
        assert (await self.client.get("/state")).status_code == 200
        assert (await self.client.get("/dashboard/data")).status_code == 200
        self.app.services.ledger.scheduler.snapshot.check_invariants()
        bugs = re.findall(r"^balanceroute_internal_errors_total.* (\S+)$", await self.metrics(), re.M)
        assert bugs and not any(map(float, bugs))


@asynccontextmanager
async def attacked(
    prefiller: Answer = well_prefilled, decoder: Answer = well_decoded, **sections: Any
) -> AsyncIterator[Attacked]:
    """A router in front of two such workers, with short pauses between tries."""
    evil = (Evil(prefiller), Evil(decoder))
    async with worker(evil[0].script) as first, worker(evil[1].script) as second:
        tree: dict[str, Any] = {
            "prefill": {"workers": [{"url": first.url, "id": "p0"}], "poll_interval_s": 0.05},
            "decode": {"workers": [{"url": second.url, "id": "d0"}], "max_num_seqs": 8},
            "routing": {"policy": "br_0"},
            "predictor": {"kind": "none"},
            "retry": {"base_delay_s": 0.001, "max_delay_s": 0.01},
            "health": {"interval_s": 0.05, "open_for_s": 0.05},
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        app = create_app(validate(tree))
        async with (
            served(app) as url,
            httpx.AsyncClient(base_url=url, **PLAIN, timeout=PATIENCE_S) as client,
        ):
            await client.get("/ready")
            yield Attacked(app, client, *evil)

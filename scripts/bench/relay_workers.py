"""Workers that cost next to nothing: prefillers and decode workers for `relay.py`, all in one process.

They speak as much of vLLM's HTTP as routers need: completions and chat, whole or as SSE, `return_token_ids`, probes
with `kv_transfer_params` (vLLM's pulling connectors) and with `bootstrap_room` (SGLang's). A streamed token's text is
"@" and the monotonic nanosecond at which it was written, so that a client on this machine reads its way's duration.

    .venv/bin/python -m scripts.bench.relay_workers --prefill 9201 9202 --decode 9211 9212

POST /interval with a number sets the milliseconds between two events of a stream, for all workers.
"""

import argparse
import asyncio
import time
from collections import deque
from typing import Any, cast

import httptools
import orjson
import uvloop

MODEL = "bench"
PHASES = 20  # streams tick in so many groups, evenly spread over the interval
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
INFO = {"model_path": MODEL, "served_model_name": MODEL, "model_id": MODEL, "is_generation": True, "dp_size": 1}
METRICS = b'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:num_requests_running{engine="0"} 0\n'


def chunked(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


class Clock:
    """Ticks every stream once per interval."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.groups: list[set[Connection]] = [set() for _ in range(PHASES)]
        self._next = 0

    def join(self, connection: "Connection") -> None:
        self._next = (self._next + 1) % PHASES
        connection.group = self.groups[self._next]
        connection.group.add(connection)

    async def run(self) -> None:
        turn = 0
        due = time.monotonic()
        while True:
            due = max(due + self.interval_s / PHASES, time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            for connection in list(self.groups[turn]):
                connection.tick()
            turn = (turn + 1) % PHASES


class Connection(asyncio.Protocol):
    """One connection of a router."""

    def __init__(self, clock: Clock, prefills: bool) -> None:
        self.clock, self.prefills = clock, prefills
        self.parser = httptools.HttpRequestParser(self)
        self.group: set[Connection] = set()
        self.left = 0
        self.before = self.after = self.closing = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.group.discard(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.body = b"", deque[bytes]()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, part: bytes) -> None:
        self.body.append(part)

    def on_message_complete(self) -> None:
        path, body = self.url.partition(b"?")[0], b"".join(self.body)
        if path in (b"/v1/chat/completions", b"/v1/completions"):
            self.generate(orjson.loads(body), chat=b"chat" in path)
        elif path == b"/interval":
            self.clock.interval_s = float(body) / 1e3
            self.answer({})
        elif path == b"/metrics":
            self.reply(METRICS, b"text/plain")
        elif path == b"/v1/models":
            self.answer({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]})
        else:
            self.answer(INFO)

    def generate(self, request: dict[str, Any], chat: bool) -> None:
        limit = 1 if self.prefills else int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)
        if request.get("stream"):
            self.stream(request, chat, limit)
            return
        text = "tok " * limit
        part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": 250, "completion_tokens": limit, "total_tokens": 250 + limit}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        kind = "chat.completion" if chat else "text_completion"
        answer = {"id": "cmpl-1", "object": kind, "created": 1, "model": MODEL, "choices": [choice], "usage": usage}
        if (request.get("kv_transfer_params") or {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "engine",
                "remote_block_ids": list(range(16)),
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
            }
        self.answer(answer)

    def stream(self, request: dict[str, Any], chat: bool, limit: int) -> None:
        def event(text: str, finish: str | None) -> bytes:
            part = {"delta": {"content": text}} if chat else {"text": text}
            choice: dict[str, Any] = {"index": 0, **part, "logprobs": None, "finish_reason": finish}
            if request.get("return_token_ids"):
                choice["token_ids"] = [1234] if finish is None else []
            kind = "chat.completion.chunk" if chat else "text_completion"
            head = {"id": "cmpl-1", "object": kind, "created": 1, "model": MODEL}
            return b"data: %s\n\n" % orjson.dumps({**head, "choices": [choice]})

        token = chunked(event("@" + "0" * 19, None))
        at = token.index(b"@") + 1
        self.before, self.after, self.left = token[:at], token[at + 19 :], limit
        self.closing = chunked(event("", "length")) + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.transport.write(STREAM_HEAD)
        self.clock.join(self)

    def tick(self) -> None:
        if self.transport.is_closing():
            return
        self.left -= 1
        last = b"" if self.left else self.closing
        self.transport.write(b"%s%019d%s%s" % (self.before, time.monotonic_ns(), self.after, last))
        if last:
            self.group.discard(self)

    def answer(self, content: dict[str, Any]) -> None:
        self.reply(orjson.dumps(content), b"application/json")

    def reply(self, body: bytes, kind: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
        self.transport.write(head + body)


async def serve(prefill: list[int], decode: list[int]) -> None:
    loop = asyncio.get_running_loop()
    clock = Clock(0.02)
    for port in prefill + decode:
        prefills = port in prefill
        await loop.create_server(lambda p=prefills: Connection(clock, p), "127.0.0.1", port, backlog=4096)  # type: ignore[misc]
    await clock.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prefill", type=int, nargs="+", required=True, metavar="PORT")
    parser.add_argument("--decode", type=int, nargs="+", required=True, metavar="PORT")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.prefill, arguments.decode))


if __name__ == "__main__":
    main()

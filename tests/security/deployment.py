"""The router as a process of its own, as `balanceroute serve` makes it, in front of two workers of the test's.

The workers answer at once and remember every request that reached them: what a smuggled request would be seen by.
"""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml

from scripts.chaos_run.aftermath import held_by_router
from scripts.proc import resident_bytes
from tests.processes import Running, forked_process, listening_port
from tests.security.wire import Answer, Connection, completion, request
from tests.unit.proxy.servers import CHUNKED_HEAD, chunked, plain, read_request, worker
from tests.waiting import PATIENCE_S, block_until

HOLD = "hold"  # a prompt whose stream has one event and then no other, until its client leaves
FLOOD = "flood"  # a prompt whose every event is of `FLOOD_BYTES`
FLOOD_BYTES = 4096
TEXT = "x"  # all that the workers ever say
_METRICS = b'vllm:kv_cache_usage_perc{engine="0"} 0\n'  # of more, nothing of ours would be the cause: a warning
_ESTABLISHED, _CLOSE_WAIT = "01", "08"  # in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as a worker got it; the head in lower case."""

    head: bytes
    body: bytes

    @property
    def prompt(self) -> str:
        """The prompt of a completion."""
        try:
            return str(orjson.loads(self.body).get("prompt"))
        except ValueError:
            return ""


@dataclass(slots=True)
class Workers:
    """A prefiller and a decoder."""

    urls: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    left: int = 0  # connections that the router closed while an answer was under way

    def prompts(self) -> list[str]:
        """What was asked for, once for each request to any worker."""
        return [seen.prompt for seen in self.seen if b" /v1/" in seen.head.split(b"\r\n")[0]]

    def of(self, prompt: str) -> list[Seen]:
        """The requests with this prompt."""
        return [seen for seen in self.seen if seen.body and seen.prompt == prompt]

    async def script(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the router to a worker."""
        while True:
            head, body = await read_request(reader)
            if not head.startswith(b"POST "):
                models = b" /v1/models" in head.split(b"\r\n")[0]
                answer = _whole({"object": "list", "data": []}) if models else plain(_METRICS)
                writer.write(answer[: answer.find(b"\r\n\r\n") + 4] if head.startswith(b"HEAD ") else answer)
                continue
            self.seen.append(Seen(head.lower(), body))
            try:
                asked = orjson.loads(body)
            except ValueError:
                writer.write(plain(b"no JSON", b"400 Bad Request"))
                continue
            if not head.startswith(b"POST /v1/"):
                writer.write(_whole({"count": 1, "tokens": [1]}))
            elif not asked.get("stream"):
                writer.write(_whole(_answered(asked, _id_of(head, asked))))
            else:
                try:
                    await self._stream(reader, writer, asked, _id_of(head, asked))
                except ConnectionError:
                    self.left += 1
                    raise
            await writer.drain()

    async def _stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[str, Any], identity: str
    ) -> None:
        chat, prompt = "messages" in asked, asked.get("prompt")
        text = "x" * FLOOD_BYTES if prompt == FLOOD else TEXT
        writer.write(CHUNKED_HEAD)
        tokens = min(asked.get("max_tokens", 16), 100_000 if prompt == FLOOD else 100)
        for token in range(tokens):
            finish = "length" if token == tokens - 1 else None
            writer.write(chunked(_event(identity, chat, text, token, finish), last=False))
            await writer.drain()
            if prompt == HOLD:
                await reader.read(1)
                self.left += 1
                return
        writer.write(chunked(b"data: [DONE]\n\n"))


def _id_of(head: bytes, asked: dict[str, Any]) -> str:
    """The id of an answer, as vLLM makes it of the header."""
    found = re.search(rb"\r\nx-request-id: *(\S+)", head, re.IGNORECASE)
    return f"{'chatcmpl' if 'messages' in asked else 'cmpl'}-{found[1].decode() if found else 'none'}"


def _whole(answer: dict[str, Any]) -> bytes:
    return plain(json.dumps(answer).encode()).replace(b"text/plain", b"application/json", 1)


def _answered(asked: dict[str, Any], identity: str) -> dict[str, Any]:
    chat = "messages" in asked
    part = {"message": {"role": "assistant", "content": TEXT}} if chat else {"text": TEXT}
    choice = {"index": 0, "finish_reason": "length", "token_ids": [1], **part}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    answer = {"id": identity, "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return {**answer, "kv_transfer_params": {"remote_block_ids": [1]}}


def _event(identity: str, chat: bool, text: str, token: int, finish: str | None) -> bytes:
    part = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, "logprobs": None, "finish_reason": finish, "token_ids": [token], **part}
    return b"data: %s\n\n" % json.dumps({"id": identity, "created": 1, "model": "m", "choices": [choice]}).encode()


@contextmanager
def serving_workers() -> Iterator[Workers]:
    """Both workers on free ports, on a loop in a thread of its own."""
    workers = Workers()
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def run() -> None:
        async with worker(workers.script) as prefiller, worker(workers.script) as decoder:
            workers.urls = [prefiller.url, decoder.url]
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield workers
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE_S)
        loop.close()


class Edge:
    """A running router, seen from outside."""

    def __init__(self, running: Running, log: Path, workers: Workers) -> None:
        self.process, self._log, self.workers = running, log, workers
        self._opened: list[Connection] = []
        self.port = listening_port(log, running)
        block_until(lambda: self.get("/ready").status == 200, "not ready")
        self._looked = len(self.log())

    def connect(self, **options: Any) -> Connection:
        """A new connection; it ends with the test at the latest."""
        connection = Connection(self.port, **options)
        self._opened.append(connection)
        return connection

    def disconnect(self) -> None:
        """Close every connection that was made here."""
        for connection in self._opened:
            connection.close()
        self._opened.clear()

    def ask(self, data: bytes, method: str = "POST") -> Answer:
        """One request on a connection of its own."""
        with self.connect() as connection:
            connection.send(data)
            return connection.answer(method)

    def get(self, target: str) -> Answer:
        """What an operator would see, asked properly."""
        return self.ask(request("GET", target), "GET")

    def serves(self) -> bool:
        """Whether an honest request gets its answer."""
        answer = self.ask(completion())
        return answer.status == 200 and answer.json()["choices"][0]["text"] == TEXT

    def held(self) -> dict[str, int]:
        """What `/state` says is held."""
        return held_by_router(self.get("/state").json())

    def log(self) -> str:
        """Everything logged."""
        text = self._log.read_text()
        return text[: text.rfind("\n") + 1]  # what is written just now may be seen in part

    def new_log_lines(self) -> list[str]:
        """What was logged since this was asked last, without the lines of requests and workers."""
        text = self.log()
        lines, self._looked = text[self._looked :].splitlines(), len(text)
        return [line for line in lines if '"level":"info"' not in line]

    def rss_bytes(self) -> int:
        """Resident memory."""
        return resident_bytes([self.process.pid])

    def clients(self) -> int:
        """Connections of clients that it has open."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        states = [state for _, local, _, state, *_ in rows if int(local.rpartition(":")[2], 16) == self.port]
        return states.count(_ESTABLISHED) + states.count(_CLOSE_WAIT)


@contextmanager
def serving(workers: Workers, folder: Path, limits: dict[str, Any]) -> Iterator[Edge]:
    """`balanceroute serve` with these limits."""
    tree = {
        "prefill": {"workers": [{"url": workers.urls[0]}]},
        "decode": {"workers": [{"url": workers.urls[1]}], "max_num_seqs": 512},
        "routing": {"policy": "br_0"},
        "predictor": {"kind": "none"},
        "limits": limits,
        # the workers share their process with the test, which may keep them waiting
        "health": {"timeout_s": PATIENCE_S},
    }
    config, log = folder / "router.yaml", folder / "router.log"
    config.write_text(yaml.safe_dump(tree))
    with forked_process("serve", "--config", str(config), "--host", "127.0.0.1", "--port", "0", log=log) as running:
        yield Edge(running, log, workers)

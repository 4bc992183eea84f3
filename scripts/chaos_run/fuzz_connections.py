"""Random sequences of requests on many connections at once to a whole router; no answer may be another request's.

    scripts/fuzz_connections [--cases N] [--seed N] [--seconds N]

A case is 5 to 60 clients at the same time. Each says one to six requests on one raw socket: good ones of every route,
ones that are refused, chunked ones, ones that wait for 100 Continue, and ones with another request in their body. It
says them in pieces, reads fast, slowly or not at all, and leaves when it likes: it closes, half-closes or resets. The
workers behind the router are scripts that answer late, with errors, in floods, or die. What `scripts/fuzz_http` does to
one connection without sockets and without workers, this does to all that share a router. It looks whether

* every connection is answered in well-formed HTTP, request by request in their order, each under its X-Request-Id;
* an answer holds text of its own request alone, and one that is complete holds all of it, each token once;
* no worker sees a request that was the body of another one, or two requests as one;
* the router logs no error and, when all clients have left, holds nothing: no connection, request, slot, KV or byte.

The seed of a case makes the same clients, not the same interleaving: repeat one that failed with `--seed S --cases 20
--same`.
"""

import argparse
import asyncio
import json
import logging
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import uvloop

from balanceroute.config import validate
from balanceroute.proxy.app import RouterApp, create_app
from balanceroute.proxy.client.relay_loads import Load, RelayLoads
from balanceroute.proxy.server import Server
from scripts.arguments import count
from tests.security.wire import body, chunked, completion, request
from tests.unit.proxy.servers import CHUNKED_HEAD, plain, read_request, worker
from tests.unit.proxy.servers import chunked as part
from tests.waiting import until

SETTLE_S: Final = 30.0
FLOOD_TOKENS: Final = 2000
_METRICS: Final = b'vllm:kv_cache_usage_perc{engine="0"} 0.1\n'
_MODES: Final = ("good", "good", "slow", "dying", "cut", "failing", "held", "flood", "slow flood")
_POISON: Final = completion("poison")  # is the body of other requests, and no request
_RESET: Final = struct.pack("ii", 1, 0)
_NAME: Final = re.compile(r"r\d+")
_MARK: Final = re.compile(rb"<(r\d+)>")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as it is said; `tokens`, of a whole answer, 0 where these are not counted.

    `name` is its X-Request-Id; empty: it has none that could be read. `cut`: its body does not come whole, so that what
    follows would become part of it.
    """

    data: bytes
    name: str = ""
    tokens: int = 0
    head_only: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What came for one of them."""

    status: int
    name: str
    body: bytes
    whole: bool


class Asks:
    """Makes requests, each under a name of its own."""

    def __init__(self) -> None:
        self._count = 0

    def some(self, draw: random.Random) -> list[Ask]:
        """What one connection says."""
        asks: list[Ask] = []
        for _ in range(draw.choice([1, 1, 2, 3, 6])):
            asks.append(self._one(draw))
            if asks[-1].cut:
                break
        return asks

    def _one(self, draw: random.Random) -> Ask:
        self._count += 1
        name, mode = f"r{self._count}", draw.choice(_MODES)
        kinds: tuple[Callable[[random.Random, str, str], Ask], ...] = (_completes, _chats, _asks_others, _is_odd)
        return draw.choices(kinds, (10, 4, 6, 8))[0](draw, name, mode)


def _completes(draw: random.Random, name: str, mode: str) -> Ask:
    tokens = FLOOD_TOKENS if "flood" in mode else draw.choice([1, 2, 20, 80])
    n = 1 if "flood" in mode else draw.choice([1, 1, 1, 2, 3])
    headers = [f"X-Request-Id: {name}"]
    headers += draw.choices(("Expect: 100-continue", "Connection: close", "Upgrade: h2c"), k=draw.random() < 0.15)
    fields = {"max_tokens": tokens, "n": n, "stream": draw.random() < 0.7}
    if draw.random() < 0.7:
        return Ask(completion(f"{mode} {name}", *headers, **fields), name, tokens * n)
    content = body(f"{mode} {name}", **fields)
    cuts = sorted(draw.randrange(1, len(content)) for _ in range(draw.randrange(4)))
    chunks = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True) if a < b]
    head = request("POST", "/v1/completions", *headers, "Transfer-Encoding: chunked")
    return Ask(head + chunked(*chunks, trailers=draw.choice([b"", b"x: y\r\n"])), name, tokens * n)


def _chats(draw: random.Random, name: str, mode: str) -> Ask:
    target = draw.choice(["/v1/chat/completions", "/v1/messages"])
    messages = [{"role": "user", "content": f"{mode} {name}"}]
    asked = {"model": "m", "max_tokens": 5, "messages": messages, "stream": draw.random() < 0.5}
    return Ask(request("POST", target, f"X-Request-Id: {name}", body=json.dumps(asked).encode()), name, 5)


def _asks_others(draw: random.Random, name: str, mode: str) -> Ask:
    header = f"X-Request-Id: {name}"
    if draw.random() < 0.3:
        text = f"{mode} {name} " + "x" * draw.choice([10, 70_000, 300_000])
        return Ask(request("POST", "/tokenize", header, body=body(text)), name)
    method = draw.choice(["GET", "GET", "HEAD", "OPTIONS"])
    target = draw.choice(["/health", "/metrics", "/state", "/v1/models", "/nowhere", "/ready", "/dashboard/data"])
    return Ask(request(method, target, header), name, head_only=method == "HEAD")


def _is_odd(draw: random.Random, name: str, mode: str) -> Ask:
    header = f"X-Request-Id: {name}"
    hidden_in = draw.choice(["/health", "/nowhere", "/metrics", "/v1/completions", "/v1/responses", "/instances/add"])
    good, coding = ("POST", "/v1/completions", header), "Transfer-Encoding:"
    return draw.choice(
        (
            Ask(request(draw.choice(["GET", "POST", "PUT"]), hidden_in, header, body=_POISON), name),
            Ask(request(*good, f"{coding} chunked") + chunked(_POISON), name),
            Ask(request(*good, f"{coding} chunked, gzip") + chunked(_POISON), name),
            Ask(request(*good, "Content-Length: 999999999") + _POISON, name),
            Ask(request(*good, "Content-Length: 4", f"{coding} chunked") + chunked(_POISON), name),
            Ask(
                request(*good, "Content-Length: 500000") + b" " * draw.choice([0, 100, 70_000, 400_000]), name, cut=True
            ),
            Ask(request("GET", "/health", header, "Content-Length: 0") + b"\r\n", name),
            Ask(b"GET /health HTTP/1.0\r\nX-Request-Id: %b\r\n\r\n" % name.encode(), name),
            Ask(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
            Ask(b"garbage\x00\r\n\r\n"),
        )
    )


class Workers:
    """What prefillers and decoders say, and what they must not have seen."""

    def __init__(self) -> None:
        self.draw = random.Random()
        self.wrong: list[str] = []

    async def script(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the router to one of them."""
        while True:
            head, content = await read_request(reader)
            if not await self._answer(head, content, writer):
                writer.transport.abort()
                return
            await writer.drain()

    async def _answer(self, head: bytes, content: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False: the worker dies over it."""
        if head.startswith(b"GET "):
            writer.write(_json({"object": "list", "data": []}) if b" /v1/models" in head else plain(_METRICS))
            return True
        asked: dict[str, Any] = json.loads(content)
        prompt = str(asked.get("prompt") or asked.get("messages"))
        name = self._name(head, prompt)
        if "slow" in prompt:
            await asyncio.sleep(self.draw.random() * 0.05)
        if "failing" in prompt and self.draw.random() < 0.4:
            status = self.draw.choice([b"500 E", b"503 E", b"400 E", b"429 E"])
            writer.write(plain(b'{"error": {"message": "no", "code": 500}}', status))
            return True
        if "dying" in prompt and self.draw.random() < 0.4:
            return False
        if not head.startswith(b"POST /v1/"):
            writer.write(_json({"count": 1, "tokens": [1]}))
            return True
        if not asked.get("stream"):
            writer.write(_json(_whole(asked, _id_of(head, asked), name)))
            return True
        return await self._stream(asked, prompt, _id_of(head, asked), name, writer)

    async def _stream(
        self, asked: dict[str, Any], prompt: str, identity: str, name: str, writer: asyncio.StreamWriter
    ) -> bool:
        count: int = asked["max_tokens"]
        writer.write(CHUNKED_HEAD)
        for place in range(count):
            choice = _choice(asked, name, 1, "delta")
            choice["finish_reason"] = "length" if place == count - 1 else None
            event = {"id": identity, "created": 1, "model": "m", "choices": [choice]}
            writer.write(part(b"data: %b\n\n" % json.dumps(event).encode(), last=False))
            await writer.drain()
            if "cut" in prompt and self.draw.random() < 0.1:
                return False
            if "held" in prompt and place == 1:
                await asyncio.sleep(self.draw.random() * 0.3)
        writer.write(part(b"data: [DONE]\n\n"))
        return True

    def _name(self, head: bytes, prompt: str) -> str:
        """Of the request that this one serves. What is no such request, or two, is noted."""
        by_header = _NAME.search(head.decode("latin-1").lower().partition("x-request-id: ")[2])
        by_prompt = set(_NAME.findall(prompt))
        name = by_header[0] if by_header else ""
        if "poison" in prompt or (by_prompt and by_prompt != {name} and head.startswith(b"POST /v1/")):
            self.wrong.append(f"a worker saw {head!r} with {prompt[:200]!r}")
        return name


def _json(answer: dict[str, Any]) -> bytes:
    return plain(json.dumps(answer).encode()).replace(b"text/plain", b"application/json", 1)


def _id_of(head: bytes, asked: dict[str, Any]) -> str:
    found = re.search(rb"\r\nx-request-id: *(\S+)", head, re.IGNORECASE)
    return f"{'chatcmpl' if 'messages' in asked else 'cmpl'}-{found[1].decode() if found else ''}"


def _choice(asked: dict[str, Any], name: str, count: int, chat: str) -> dict[str, Any]:
    text = f"<{name}>" * count
    says = {chat: {"content": text}} if "messages" in asked else {"text": text}
    return {"index": 0, "logprobs": None, "finish_reason": "length", "token_ids": [7] * count, **says}


def _whole(asked: dict[str, Any], identity: str, name: str) -> dict[str, Any]:
    count, prompt = asked["max_tokens"], asked.get("prompt")
    ids = prompt if isinstance(prompt, list) else (asked["kv_transfer_params"] or {}).get("prompt_token_ids") or [1, 2]
    usage = {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count}
    choice = {**_choice(asked, name, count, "message"), "prompt_token_ids": ids}
    answer = {"id": identity, "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return {**answer, "kv_transfer_params": {"remote_block_ids": [1]}}


@dataclass(slots=True)
class Client:
    """One connection, what it says and what it hears."""

    draw: random.Random
    asks: list[Ask]
    got: bytes = b""
    sent_bytes: int = 0
    over: bool = False
    _socket: socket.socket = field(default_factory=socket.socket)
    _receiving: "asyncio.Task[bytes] | None" = None

    async def run(self, port: int) -> None:
        """Say all of it, or some, hear what comes, and leave."""
        draw, loop = self.draw, asyncio.get_running_loop()
        self._socket.setblocking(False)
        if draw.random() < 0.3:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(self._socket, ("127.0.0.1", port))
        await self._say(b"".join(ask.data for ask in self.asks))
        if draw.random() < 0.3:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        patient, slow = draw.random() < 0.6, draw.random() < 0.2
        end_s = loop.time() + (1.0 if patient else draw.choice([0, 0.01, 0.05, 0.2]))
        while not self.over and loop.time() < end_s:
            await self._receive(0.3, 100 if slow else 65536)
            if patient and not slow and len(answers_in(self)) == len(self.asks):
                break
        if draw.random() < 0.4:
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait({self._receiving})
        self._socket.close()

    async def _say(self, data: bytes) -> None:
        draw, loop = self.draw, asyncio.get_running_loop()
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice([0, 0, 1, 4])))
        for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
            self.sent_bytes = b
            try:
                async with asyncio.timeout(0.3):
                    await loop.sock_sendall(self._socket, data[a:b])
            except (OSError, TimeoutError):  # how much of it has gone nobody knows
                return
            what = draw.random()
            if what < 0.4:
                await self._receive(0.02)
            elif what < 0.5:
                await asyncio.sleep(draw.random() * 0.05)
            elif what < 0.53:
                return

    async def _receive(self, patience_s: float, most_bytes: int = 65536) -> None:
        loop = asyncio.get_running_loop()
        if self._receiving is None:  # one that was cancelled may have taken bytes that nobody would get
            self._receiving = loop.create_task(loop.sock_recv(self._socket, most_bytes))
        if not (await asyncio.wait({self._receiving}, timeout=patience_s))[0]:
            return
        task, self._receiving = self._receiving, None
        data = b"" if task.exception() else task.result()
        self.over = not data
        self.got += data


# -- what must hold


def answers_in(client: Client) -> list[Answer]:
    """What a client has got; the last one may be incomplete. Raises: ValueError: it is no HTTP."""
    answers: list[Answer] = []
    rest, left_bytes = client.got, client.sent_bytes
    while (end := rest.find(b"\r\n\r\n")) >= 0:
        line, *lines = rest[:end].decode("latin-1").split("\r\n")
        rest = rest[end + 4 :]
        found = re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Za-z -]*", line)
        if found is None or len(answers) == len(client.asks):
            raise ValueError(f"a status line {line!r} behind {len(answers)} answers")
        headers = dict(field_line.split(": ", 1) for field_line in lines)
        if found[1] == "100":
            continue
        ask = client.asks[len(answers)]
        left_bytes -= len(ask.data)  # one that is cut off may not be known as HEAD
        content, rest, whole = _body_in(rest, headers, bodiless=ask.head_only and left_bytes >= 0)
        answers.append(Answer(int(found[1]), headers.get("x-request-id", ""), content, whole))
    if rest and not b"HTTP/1.1 ".startswith(rest[:9]):
        raise ValueError(f"bytes that are no answer: {rest[:200]!r}")
    return answers


def _body_in(data: bytes, headers: dict[str, str], *, bodiless: bool) -> tuple[bytes, bytes, bool]:
    """The body at the beginning of `data`, what follows, and whether it is complete. Raises: ValueError."""
    if bodiless:
        return b"", data, True
    if "transfer-encoding" not in headers:
        length = int(headers["content-length"])
        return data[:length], data[length:], len(data) >= length
    content = b""
    while (end := data.find(b"\r\n")) >= 0:
        size = int(data[:end], 16)
        content += data[end + 2 : end + 2 + size]
        if len(data) < end + size + 4:
            break
        if data[end + 2 + size : end + size + 4] != b"\r\n":
            raise ValueError("a chunk without its end")
        data = data[end + size + 4 :]
        if not size:
            return content, data, True
    return content, b"", False


def check(client: Client) -> None:
    """Raises: ValueError: an answer is wrong, or another request's."""
    sent_bytes = 0
    for ask, answer in zip(client.asks, answers_in(client), strict=False):
        sent_bytes += len(ask.data)
        if ask.name and answer.name != ask.name and sent_bytes <= client.sent_bytes:
            raise ValueError(f"{ask.name} was answered as {answer.name!r}, {answer.status}")
        marks = _MARK.findall(answer.body)
        if set(marks) - {ask.name.encode()}:
            raise ValueError(f"{ask.name} got {set(marks)}")
        if answer.status == 200 and answer.whole and ask.tokens and len(marks) != ask.tokens:
            raise ValueError(f"{ask.name} got {len(marks)} tokens, not {ask.tokens}: {answer.body[-300:]!r}")


def held(app: RouterApp, server: Server, loads: RelayLoads) -> dict[str, int]:
    """Everything that the router holds, by name; only what is not zero."""
    services = app.services
    snapshot = services.ledger.scheduler.snapshot
    snapshot.check_invariants()
    found = {
        "connections": loads.cells[0],
        "incoming bytes": loads.cells[1],
        "served bytes": loads.cells[2],
        "tasks": len(server.server_state.tasks),
        "tickets": len(services.tickets.by_id),
        "legs": len(services.legs),
        "exchanges": services.exchanges,
        "drains": services.drainer.pending,
        "requests": len(snapshot.requests),
        "at prefillers": sum(each.inflight + each.pinned for each in snapshot.prefillers),
        "requests to workers": sum(each.in_use for each in services.fleet),
        "busy connections": sum(each.upstream.busy_connections for each in services.fleet),
    }
    return {name: count for name, count in found.items() if count}


class Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(self.format(record))


class Arena:
    """A running router with its workers; cases are run on it one after the other."""

    def __init__(self, app: RouterApp, server: Server, loads: RelayLoads, workers: Workers, errors: Errors) -> None:
        self._app, self._server, self._loads, self._workers, self._errors = app, server, loads, workers, errors
        self._port: int = server.servers[0].sockets[0].getsockname()[1]
        self.statuses: Counter[int] = Counter()

    async def case(self, seed: int) -> list[str]:
        """What is wrong after this one."""
        draw, asks = random.Random(seed), Asks()
        self._workers.draw.seed(seed)
        clients = [
            Client(random.Random(draw.getrandbits(60)), asks.some(draw)) for _ in range(draw.choice([5, 20, 60]))
        ]
        await asyncio.gather(*(client.run(self._port) for client in clients))
        wrong: list[str] = []
        for client in clients:
            try:
                check(client)
                self.statuses.update(answer.status for answer in answers_in(client))
            except ValueError as error:
                sent = b"".join(ask.data for ask in client.asks)[: client.sent_bytes]
                wrong.append(f"{error}\n    sent {sent[:3000]!r}\n    received {client.got[-1000:]!r}")
        with suppress(AssertionError):
            await until(lambda: not held(self._app, self._server, self._loads), within_s=SETTLE_S)
        if left := held(self._app, self._server, self._loads):
            wrong.append(f"left behind: {left}")
        wrong += self._workers.wrong + self._errors.lines
        self._workers.wrong.clear()
        self._errors.lines.clear()
        return wrong


@asynccontextmanager
async def arena() -> AsyncIterator[Arena]:
    """A router of this process in front of two prefillers and two decoders."""
    workers, errors, loads = Workers(), Errors(), RelayLoads(1)
    logging.getLogger("balanceroute").addHandler(errors)
    logging.getLogger("asyncio").addHandler(errors)
    async with AsyncExitStack() as stack:
        urls = [(await stack.enter_async_context(worker(workers.script))).url for _ in range(4)]
        app = create_app(
            validate(
                {
                    "listen": {"host": "127.0.0.1", "port": 0},
                    "prefill": {"workers": [{"url": url} for url in urls[:2]], "poll_interval_s": 0.2},
                    "decode": {"workers": [{"url": url} for url in urls[2:]], "max_num_seqs": 16},
                    "predictor": {"kind": "none"},
                    "retry": {"base_delay_s": 0.001, "max_delay_s": 0.01},
                    "health": {"interval_s": 0.2, "open_for_s": 0.05, "timeout_s": 30},
                    "limits": {"max_body_bytes": 2**20},
                }
            ),
            strict=False,
        )
        server = Server(app, app.config)
        server.load = Load(loads, 0)
        running = asyncio.get_running_loop().create_task(server._serve())
        await until(lambda: server.started or running.done())
        try:
            yield Arena(app, server, loads, workers, errors)
        finally:
            server.should_exit = True
            await running


async def main(arguments: argparse.Namespace) -> int:
    """Run the cases; returns the exit code."""
    started = time.monotonic()
    async with arena() as stage:
        for number in range(arguments.cases):
            seed = arguments.seed if arguments.same else arguments.seed + number
            if wrong := await stage.case(seed):
                print(f"fuzz_connections: wrong in case {number} of seed {seed}:", *wrong[:5], sep="\n  ")
                return 1
            if time.monotonic() - started > arguments.seconds:
                break
        print(
            f"fuzz_connections: {number + 1} cases from seed {arguments.seed} in {time.monotonic() - started:.1f} s, "
            f"nothing wrong; answers by status: {dict(sorted(stage.statuses.items()))}"
        )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/fuzz_connections", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=count, default=1000, help="(1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next has the next (0)")
    parser.add_argument("--same", action="store_true", help="all cases have this seed, to meet a rare interleaving")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no case after this (3600)")
    sys.exit(uvloop.run(main(parser.parse_args())))

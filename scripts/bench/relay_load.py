"""One measurement for `relay.py`: load on one router for some seconds, and what it cost that router.

unary   a closed loop of connections, each asking for short whole answers
paced   so many short streams per second, at random times, whatever the answers take
stream  so many SSE streams at once, each replaced by the next when it ends; the first ones are of all lengths, so
        that streams begin and end evenly from the start
hold    as many streams as asked for, opened once, for their memory

Prints one JSON object. CPU is that of `--pid` and its children while the window is open.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any, cast

import httptools
import uvloop

from scripts.bench.processes import allow_many_sockets
from scripts.proc import cpu_s, resident_bytes, tree

SAMPLE = 8  # the way of one read in so many is timed
PROMPT_BYTES = 1000


class Tally:
    """What was seen while the window was open."""

    def __init__(self) -> None:
        self.requests = self.events = self.failures = 0
        self.hops_ns: list[int] = []
        self.latencies_s: list[float] = []


class Client(asyncio.Protocol):
    """One connection to the router, one request at a time."""

    def __init__(self, load: "Load") -> None:
        self.load = load
        self.reads = 0
        self.answer: asyncio.Future[bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(False)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        tally = self.load.tally
        tally.events += body.count(b'"@')
        self.started.set()
        self.reads += 1
        if self.reads % SAMPLE == 0:
            at = body.find(b'"@') + 2
            if at > 1 and body[at : at + 19].isdigit():
                tally.hops_ns.append(time.monotonic_ns() - int(body[at : at + 19]))

    def on_message_complete(self) -> None:
        self._end(self.parser.get_status_code() == 200)

    def _end(self, good: bool) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(good)

    def ask(self, message: bytes) -> "asyncio.Future[bool]":
        self.parser = httptools.HttpResponseParser(self)
        self.started = asyncio.Event()
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        return self.answer


class Load:
    """The clients of one measurement."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.a = arguments
        self.tally = Tally()

    def message(self, tokens: int, number: int) -> bytes:
        content = (f"{number:08d} " + "word " * PROMPT_BYTES)[:PROMPT_BYTES]
        request: dict[str, Any] = {"model": "bench", "max_tokens": tokens}
        request["messages"] = [{"role": "user", "content": content}]
        if self.a.mode != "unary":
            request["stream"] = True
        body = json.dumps(request).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {self.a.key}\r\n" if self.a.key else ""
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def connect(self) -> Client:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: Client(self), "127.0.0.1", self.a.port))[1]

    async def client(self, number: int) -> None:
        client = await self.connect()
        tokens = self.a.tokens
        if self.a.mode == "stream":
            tokens = max(1, tokens * (number + 1) // self.a.clients)
        while True:
            asked_s = time.monotonic()
            good = await client.ask(self.message(tokens, number))
            self.tally.requests += good
            self.tally.failures += not good
            self.tally.latencies_s.append(time.monotonic() - asked_s)
            tokens = self.a.tokens
            if client.transport.is_closing():
                client = await self.connect()

    async def pace(self) -> None:
        """Requests at random times, each on a connection that is free."""
        source, free, number = random.Random(self.a.clients), list[Client](), 0
        due = time.monotonic()

        async def ask(number: int) -> None:
            while free and free[-1].transport.is_closing():  # the router closes those that were idle for long
                free.pop()
            client = free.pop() if free else await self.connect()
            good = await client.ask(self.message(self.a.tokens, number))
            self.tally.requests += good
            self.tally.failures += not good
            if not client.transport.is_closing():
                free.append(client)

        async with asyncio.TaskGroup() as group:
            while True:
                due = max(due + source.expovariate(self.a.rate), time.monotonic() - 1.0)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                number += 1
                group.create_task(ask(number))

    async def measure(self) -> dict[str, Any]:
        async with asyncio.TaskGroup() as group:
            if self.a.mode == "paced":
                tasks = [group.create_task(self.pace())]
            else:
                tasks = [group.create_task(self.client(number)) for number in range(self.a.clients)]
            await asyncio.sleep(self.a.warmup)
            pids = tree(self.a.pid) if self.a.pid else []
            self.tally, cpu, started_s = Tally(), cpu_s(pids), time.monotonic()
            await asyncio.sleep(self.a.seconds)
            found, cpu, took_s = self.tally, cpu_s(pids) - cpu, time.monotonic() - started_s
            for task in tasks:
                task.cancel()
        return {
            "requests": found.requests,
            "failures": found.failures,
            "events": found.events,
            "per_s": round((found.events if self.a.mode == "stream" else found.requests) / took_s, 1),
            "cpu_us_per_request": round(cpu * 1e6 / max(1, found.requests), 2),
            "cpu_us_per_event": round(cpu * 1e6 / max(1, found.events), 2),
            "cpus": round(cpu / took_s, 3),
            "hop_ms_p50": round(statistics.median(found.hops_ns or [0]) / 1e6, 3),
            "latency_ms_p50": round(statistics.median(found.latencies_s or [0]) * 1e3, 3),
        }

    async def hold(self) -> dict[str, Any]:
        pids = tree(self.a.pid)
        before = resident_bytes(pids)
        clients = []
        for number in range(self.a.clients):
            client = await self.connect()
            clients.append(client)
            client.ask(self.message(self.a.tokens, number))
            if number % 50 == 49:
                await client.started.wait()
        async with asyncio.timeout(60):
            for client in clients:
                await client.started.wait()
        await asyncio.sleep(self.a.seconds)
        held = sum(not client.transport.is_closing() for client in clients)
        return {"streams": held, "kib_per_stream": round((resident_bytes(pids) - before) / 1024 / held, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("mode", choices=["unary", "paced", "stream", "hold"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, default=0, help="the router's process")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--key", help="sent as Authorization")
    parser.add_argument("--rate", type=float, default=100.0, help="of `paced`: requests per second")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warmup", type=float, default=1.0)
    allow_many_sockets()
    load = Load(parser.parse_args())
    print(json.dumps(uvloop.run(load.hold() if load.a.mode == "hold" else load.measure())))


if __name__ == "__main__":
    main()

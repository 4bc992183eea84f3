"""The hot path between a scripted worker and a client that may not read."""

import asyncio
from typing import Any

import pytest

from balanceroute.errors import BadUpstreamReply, UpstreamError
from balanceroute.proxy.life.streaming import stream_events
from balanceroute.proxy.wire.sse import EventScanner, StreamEnd
from balanceroute.proxy.workers.reply import Reply
from balanceroute.proxy.workers.upstream import Upstream
from tests.unit.proxy.servers import CHUNKED_HEAD, Script, answering, chunked, on_both_loops, read_request, worker
from tests.unit.proxy.wire.test_sse import DONE, completion, event, texts
from tests.waiting import pace, until

EVENTS = [event(completion(f"{i} ", [i])) for i in range(200)]
LAST = event(completion("end", [999], finish_reason="length"))


class Client:
    """A client's response that takes parts while `open` is set."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.parts: list[bytes] = []
        self.ended = self.refused = False

    def write(self, body: bytes) -> bool:
        assert body and not self.ended
        if self.open.is_set():
            self.parts.append(body)
        self.refused = self.refused or not self.open.is_set()
        return self.open.is_set()

    def end(self, body: bytes) -> None:
        assert not self.ended
        self.parts.append(body)
        self.ended = True

    async def drained(self) -> None:
        await self.open.wait()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


class Leaving(Client):
    """A client to whom nothing can be written."""

    def write(self, body: bytes) -> bool:
        raise OSError("client")


class Relayed:
    """What one stream did."""

    def __init__(self) -> None:
        self.client = Client()
        self.scanner = EventScanner()
        self.tokens = 0
        self.error: UpstreamError | None = None
        self.reply: Reply | None = None

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    async def run(self, upstream: Upstream) -> None:
        reply = self.reply = await upstream.request("POST", "/", b"{}")
        chunk = await reply.next_chunk()
        assert chunk is not None
        first = self.scanner.feed(chunk)
        self.count(self.scanner.tokens)
        self.error = await stream_events(reply, self.scanner, self.client, self.count, first=first)


@on_both_loops
async def test_every_event_is_relayed_counted_and_ended_in_one_response() -> None:
    async with worker(answering(CHUNKED_HEAD + chunked(*EVENTS, LAST, DONE))) as server:
        upstream = Upstream(server.url)
        for _ in range(2):
            done = Relayed()
            await done.run(upstream)
            assert done.tokens == len(done.scanner.generated.ids) == 201
            assert texts(done.client.body) == "".join(f"{i} " for i in range(200)) + "end"
            assert done.client.body.endswith(DONE)
            assert done.client.ended
            await until(lambda: not upstream.busy_connections)
        assert server.connections == 1
        upstream.close()


def one_by_one(parts: list[bytes]) -> Script:
    """A worker that sends each part in a chunk and a packet of its own."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED_HEAD)
        for part in parts:
            writer.write(chunked(part, last=False))
            await pace(0.01)
        writer.write(b"0\r\n\r\n")
        await reader.read()

    return script


@on_both_loops
async def test_events_that_arrive_one_by_one_are_sent_one_by_one() -> None:
    async with worker(one_by_one([*EVENTS[:5], LAST, DONE])) as server:
        upstream = Upstream(server.url)
        done = Relayed()
        await done.run(upstream)
        assert len(done.client.parts) == 7
        assert done.scanner.end is StreamEnd.DONE
        upstream.close()


def endless(sent: list[int]) -> Script:
    """A worker that streams until the connection closes; `sent[0]` counts its events."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED_HEAD)
        while True:
            writer.write(chunked(event(completion("x" * 20_000, [1])), last=False))
            await writer.drain()
            sent[0] += 1

    return script


@on_both_loops
async def test_a_client_that_stops_reading_pauses_only_its_own_worker_stream() -> None:
    sent = [0]
    async with (
        worker(endless(sent)) as server,
        worker(answering(CHUNKED_HEAD + chunked(LAST, DONE))) as other,
    ):
        slow = Relayed()
        stuck = Upstream(server.url)
        relaying = asyncio.ensure_future(slow.run(stuck))
        await until(lambda: slow.tokens)
        slow.client.open.clear()
        await until(lambda: slow.reply is not None and slow.reply.paused)
        before = sent[0]
        quick = Relayed()
        await quick.run(Upstream(other.url))
        assert quick.scanner.end is StreamEnd.DONE
        slow.client.open.set()
        await until(lambda: sent[0] >= before + 200)
        relaying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await relaying
        await server.closed.wait()
        assert stuck.busy_connections == 0
        assert texts(slow.client.body) == "x" * len(texts(slow.client.body))


@on_both_loops
async def test_a_client_that_pauses_gets_every_event_in_order() -> None:
    async with worker(one_by_one([*EVENTS[:20], LAST, DONE])) as server:
        done = Relayed()
        done.client.open.clear()
        relaying = asyncio.ensure_future(done.run(Upstream(server.url)))
        await until(lambda: done.client.refused)
        assert done.client.parts == []
        done.client.open.set()
        await relaying
        assert texts(done.client.body) == "".join(f"{i} " for i in range(20)) + "end"
        assert done.client.ended


@on_both_loops
async def test_a_broken_worker_stream_leaves_the_response_open_and_raises_the_reason() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED_HEAD + chunked(*EVENTS[:3], last=False) + b"ff\r\ndata: {")

    async with worker(script) as server:
        done = Relayed()
        await done.run(Upstream(server.url))
        assert isinstance(done.error, BadUpstreamReply)
        assert done.scanner.end is StreamEnd.UNFINISHED
        assert done.tokens == 3
        assert texts(done.client.body) == "0 1 2 "
        assert not done.client.ended


@on_both_loops
async def test_a_recomputed_stream_ends_the_relay_with_the_response_open() -> None:
    marker = event(completion("", [], finish_reason="stop", stop_reason="recomputed"))
    async with worker(answering(CHUNKED_HEAD + chunked(*EVENTS[:3], marker, DONE))) as server:
        done = Relayed()
        await done.run(Upstream(server.url))
        assert done.error is None
        assert done.scanner.end is StreamEnd.RECOMPUTED
        assert done.scanner.generated.ids.tolist() == [0, 1, 2]
        assert not done.client.ended


@on_both_loops
async def test_a_failed_write_ends_only_its_own_stream() -> None:
    async def fails(upstream: Upstream) -> None:
        reply = await upstream.request("POST", "/", b"{}")
        with pytest.raises(OSError, match="client"):
            await stream_events(reply, EventScanner(), Leaving(), lambda n: None)

    async with worker(one_by_one([*EVENTS[:20], LAST, DONE])) as server:
        upstream = Upstream(server.url)
        others = [Relayed() for _ in range(4)]
        await asyncio.gather(*(task for other in others for task in (fails(upstream), other.run(upstream))))
        assert [other.tokens for other in others] == [21] * 4
        assert all(other.scanner.end is StreamEnd.DONE for other in others)
        upstream.close()


class ScriptedReply:
    """A worker's reply whose bytes the test hands over itself."""

    def __init__(self) -> None:
        self.sink: Any = None
        self.undelivered = False
        self.loop = asyncio.get_running_loop()

    def attach(self, sink: Any) -> None:
        self.sink = sink

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...

    def discard(self, grace_s: float) -> None: ...


@pytest.mark.parametrize("open_client", [True, False], ids=["reading", "not reading"])
@on_both_loops
async def test_bytes_read_after_a_cancellation_are_relayed_or_reported_as_lost(open_client: bool) -> None:
    done, reply = Relayed(), ScriptedReply()
    task = asyncio.get_running_loop().create_task(
        stream_events(reply, done.scanner, done.client, done.count)  # type: ignore[arg-type]
    )
    await asyncio.sleep(0)
    if not open_client:
        done.client.open.clear()
    task.cancel()
    reply.sink.chunk(EVENTS[0] + LAST)  # in the same turn of the loop, as sockets are read after timers
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.tokens == 2
    assert bool(done.client.body) is open_client
    assert reply.undelivered is not open_client

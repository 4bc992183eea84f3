"""Instructions that the router executes per event of a stream, or per request: the same on a busy machine.

    .venv/bin/python scripts/count_instructions.py                      # the hot path as it is installed
    .venv/bin/python scripts/count_instructions.py --route messages     # or chat; completions if none is named
    BALANCEROUTE_PURE_PYTHON=1 .venv/bin/python scripts/count_instructions.py
    .venv/bin/python scripts/count_instructions.py --requests

Valgrind counts. Two runs of different length are subtracted, so imports and the start do not count. What the kernel
does is not counted; the script's own share is.

**Events**: sixteen streams on a real uvloop. What stands for their workers writes one event to each per turn, and each
goes through worker connection, scanner, token count and client response to a socket. The script's share is mostly the
sixteen writes of a turn.

**Requests**: the whole router, as `serve` runs it, serves streams of one token one after the other, from a client's
socket through prefill probe, policy and decode. Its prefiller and its decode worker are a few lines in the same
process and count, too.
"""

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
from typing import Any

STREAMS = 16
TURNS = (40, 140)
REQUESTS = (30, 80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", action="store_true", help="count per request instead of per event")
    parser.add_argument("--events-per-read", type=int, default=1, help="events that come in one read")
    parser.add_argument("--python", default="", help="classes of the hot path, by commas, that run uncompiled")
    parser.add_argument("--route", choices=("completions", "chat", "messages"), default="completions")
    parser.add_argument("--times", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.times is not None:
        _run(options)
        return
    given = ["--events-per-read", str(options.events_per_read), "--python", options.python, "--route", options.route]
    if options.requests:
        short, long = (_instructions(times, [*given, "--requests"]) for times in REQUESTS)
        print(f"{(long - short) / (REQUESTS[1] - REQUESTS[0]):,.0f} instructions per request")
        return
    short, long = (_instructions(times, given) for times in TURNS)
    per_event = (long - short) / ((TURNS[1] - TURNS[0]) * STREAMS * options.events_per_read)
    print(f"{per_event:,.0f} instructions per event of {options.route}, {options.events_per_read} events per read")


def _run(options: argparse.Namespace) -> None:
    """What is counted."""
    import uvloop

    from balanceroute.proxy import hotpath
    from balanceroute.proxy.hotpath import events

    for name in filter(None, options.python.split(",")):
        setattr(hotpath, name, getattr(events, name))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.requests:
            runner.run(_serve_requests(options.times))
        else:
            runner.run(_relay_events(options.times, options.events_per_read, options.route))


def _instructions(times: int, given: list[str]) -> int:
    with tempfile.NamedTemporaryFile() as out:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out.name}", sys.executable, __file__]
        environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.getcwd()}
        ran = subprocess.run([*command, "--times", str(times), *given], env=environ, capture_output=True, text=True)
    collected = re.search(r"Collected : (\d+)", ran.stderr)
    if ran.returncode or collected is None:
        sys.exit(ran.stderr)
    return int(collected[1])


class _Ticket:
    """Counts as `admission.tickets.Ticket` does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, unsettled: list["_Ticket"]) -> None:
        self._now, self._unsettled = loop.time, unsettled
        self.last_token_s, self.unreported_tokens = 0.0, 0
        self._at_once = False

    def progress(self, tokens: int) -> None:
        self.last_token_s = self._now()
        if self._at_once:
            raise AssertionError("this ticket's brain is in this process")
        if not self.unreported_tokens:
            self._unsettled.append(self)
        self.unreported_tokens += tokens


class _Client(asyncio.Protocol):
    """A connection of a client, as far as a response knows it."""

    write_paused = receiving = False
    date_line = b""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.loop = transport, asyncio.get_running_loop()

    async def drained(self) -> None:
        raise AssertionError("the client's socket is full")

    def response_done(self, keep_alive: bool) -> None:
        pass

    def close(self) -> None:
        self.transport.close()


def _event(route: str, token: int) -> bytes:
    if route != "completions":
        return (
            b'data: {"id":"chatcmpl-3f2a91c07b5e4d1e9a6c","object":"chat.completion.chunk","created":1780000000,'
            b'"model":"deepseek","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
            b'"finish_reason":null,"token_ids":[%d]}],"usage":null}\n\n' % token
        )
    return (
        b'data: {"id":"cmpl-3f2a91c07b5e4d1e9a6c","object":"text_completion","created":1780000000,"model":"deepseek",'
        b'"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null,"stop_reason":null,'
        b'"token_ids":[%d],"prompt_logprobs":null,"prompt_token_ids":null}],"usage":null}\n\n' % token
    )


def _scanner(route: str) -> Any:
    from balanceroute.proxy.wire.message_answers import Counts, MessageStream
    from balanceroute.proxy.wire.sse import EventScanner

    def translation() -> MessageStream:
        return MessageStream("msg_1", "deepseek", lambda: Counts(900, None, 0))

    return EventScanner(translation=translation if route == "messages" else None)


async def _asked(upstream: Any, listener: socket.socket) -> tuple[socket.socket, Any]:
    """A worker's end of a connection that it has answered on, and the reply."""
    before = upstream.busy_connections
    asking = asyncio.get_running_loop().create_task(upstream.request("POST", "/v1/completions", b"{}"))
    while upstream.busy_connections == before:  # noqa: ASYNC110 - the pool has no event to wait for
        await asyncio.sleep(0)
    worker, _ = listener.accept()
    worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    worker.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    return worker, await asking


async def _connected() -> tuple[socket.socket, Any]:
    """A client's end of a connection, and the router's."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    ours.setblocking(False)
    _, client = await asyncio.get_running_loop().create_connection(_Client, sock=ours)
    return theirs, client


async def _relay_events(turns: int, events_per_read: int, route: str) -> None:
    from balanceroute.proxy.client.response import Response
    from balanceroute.proxy.life.streaming import stream_events
    from balanceroute.proxy.workers.upstream import Upstream

    loop = asyncio.get_running_loop()
    unsettled: list[_Ticket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        upstream = Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}")
        workers, clients, scanners, relays = [], [], [], []
        for _ in range(STREAMS):
            worker, reply = await _asked(upstream, listener)
            theirs, client = await _connected()
            response = Response(client, head_only=False, http_1_0=False, keep_alive=True)
            response.start(200, [])
            scanner = _scanner(route)
            relays.append(loop.create_task(stream_events(reply, scanner, response, _Ticket(loop, unsettled).progress)))
            workers.append(worker)
            clients.append(theirs)
            scanners.append(scanner)
        events = _event(route, 48_213) * events_per_read
        read = b"%x\r\n%b\r\n" % (len(events), events)
        for turn in range(turns):
            for worker in workers:
                worker.send(read)
            counted = (turn + 1) * events_per_read
            while scanners[-1].tokens < counted or scanners[0].tokens < counted:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for ticket in unsettled:
                ticket.unreported_tokens = 0
            unsettled.clear()
            if turn % 20 == 19:
                await asyncio.sleep(0)
                for theirs in clients:
                    theirs.recv(1 << 20)
        assert all(scanner.generated.exact and scanner.tokens == turns * events_per_read for scanner in scanners)
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        upstream.close()


class _Worker(asyncio.Protocol):
    """A worker's connection: answers a probe with parameters, anything else with a stream of one token."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.received = transport, b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if not found or (length is not None and len(body) < int(length[1])):
            return
        self.received = b""
        named = re.search(rb"x-request-id: (\S+)", head, re.IGNORECASE)
        if named is None:
            self._answer(b"{}")
        elif b'do_remote_decode":true' in body:
            self._answer(_PROBE_REPLY % named[1])
        else:
            event = _event("completions", 48_213).replace(b"3f2a91c07b5e4d1e9a6c", named[1])
            finished = event.replace(b'"finish_reason":null', b'"finish_reason":"length"')
            answer = finished + b"data: [DONE]\n\n"
            self.transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (_STREAM_HEAD, len(answer), answer))

    def _answer(self, body: bytes) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_PROBE_REPLY = (
    b'{"id":"cmpl-%b","object":"text_completion","created":1780000000,"model":"deepseek","choices":[{"index":0,'
    b'"text":" a","logprobs":null,"finish_reason":"length","token_ids":[48213]}],"usage":{"prompt_tokens":9,'
    b'"total_tokens":10,"completion_tokens":1},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,'
    b'"remote_engine_id":"engine","remote_block_ids":[1],"remote_host":"127.0.0.1","remote_port":5600}}'
)


async def _serve_requests(times: int) -> None:
    from balanceroute.config import validate
    from balanceroute.proxy.app import create_app
    from balanceroute.proxy.life import pool_reaper
    from balanceroute.proxy.server import Server

    pool_reaper.PERIOD_S = 3600.0  # type: ignore[misc]  # it looks the more often, the slower this runs
    loop = asyncio.get_running_loop()
    workers = [await loop.create_server(_Worker, "127.0.0.1", 0) for _ in range(2)]
    prefiller, decoder = (f"http://127.0.0.1:{worker.sockets[0].getsockname()[1]}" for worker in workers)
    config = validate(
        {
            "listen": {"port": 0},
            "prefill": {"workers": [{"url": prefiller}], "poll_interval_s": 3600},
            "decode": {"workers": [{"url": decoder}]},
            "health": {"interval_s": 3600, "timeout_s": 3600},  # requests wait for an answer, slow here
        }
    )

    done = asyncio.Event()

    class Unhurried(Server):
        """uvicorn's own loop looks ten times per second, so it would count the more, the slower this runs."""

        async def main_loop(self) -> None:
            await done.wait()

    server = Unhurried(create_app(config), config)
    serving = loop.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
    body = b'{"model":"deepseek","prompt":"one two three","max_tokens":1,"stream":true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    for _ in range(times):
        writer.write(head % len(body) + body)
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer, answer
    writer.close()
    done.set()
    await serving
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()

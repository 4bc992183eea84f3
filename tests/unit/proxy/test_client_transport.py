"""A head waits for its body, never longer than the loop's turn; a stream's parts go straight to the socket."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from balanceroute.proxy.client_transport import ClientConnection, HeadAndBody, Watches

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Socket:
    """Writes and a close, in order."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.seen.append(data)

    def close(self) -> None:
        self.seen.append(b"<closed>")

    def is_closing(self) -> bool:
        return bool(self.seen) and self.seen[-1] == b"<closed>"

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str) -> None: ...


def a_transport() -> tuple[Socket, HeadAndBody]:
    socket = Socket()
    return socket, HeadAndBody(socket, asyncio.get_running_loop())  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_head_and_the_body_that_follows_are_one_write() -> None:
    socket, transport = a_transport()
    transport.write(HEAD)
    transport.write(b"ok")
    transport.write(b"more")
    await asyncio.sleep(0)
    assert socket.seen == [HEAD + b"ok", b"more"]


@pytest.mark.anyio
async def test_a_head_without_a_body_leaves_within_the_turn() -> None:
    socket, transport = a_transport()
    transport.write(HEAD)
    assert socket.seen == []
    await asyncio.sleep(0)
    assert socket.seen == [HEAD]


@pytest.mark.anyio
async def test_closing_sends_a_head_that_waits_first() -> None:
    socket, transport = a_transport()
    transport.write(HEAD)
    transport.close()
    await asyncio.sleep(0)
    assert socket.seen == [HEAD, b"<closed>"]
    assert transport.is_closing()


@pytest.mark.anyio
@pytest.mark.parametrize("data", [HEAD + b"ok", b"2\r\nok\r\n", b"\r\n\r\n"], ids=["whole", "chunk", "blank"])
async def test_what_is_no_head_is_written_at_once(data: bytes) -> None:
    socket, transport = a_transport()
    transport.write(data)
    assert socket.seen == [data]


def a_client(watches: Watches | None = None, **state: bool) -> tuple[Socket, ClientConnection]:
    socket, transport = a_transport()
    flow = SimpleNamespace(write_paused=state.pop("write_paused", False), resume_reading=lambda: None)
    usual = {"disconnected": False, "chunked_encoding": True, "response_started": True, "response_complete": False}
    cycle: Any = SimpleNamespace(transport=transport, flow=flow, **usual | state)
    return socket, ClientConnection(cycle, {} if watches is None else watches)


@pytest.mark.anyio
async def test_a_part_of_a_stream_is_written_as_one_chunk() -> None:
    socket, client = a_client()
    assert client.write(b"data: {}\n\n" * 2)
    assert socket.seen == [b"14\r\n" + b"data: {}\n\n" * 2 + b"\r\n"]


@pytest.mark.anyio
async def test_the_first_part_of_a_stream_takes_the_head_along() -> None:
    transport, socket = a_transport()[::-1]
    flow = SimpleNamespace(write_paused=False)
    usual = {"disconnected": False, "chunked_encoding": True, "response_complete": False}
    client = ClientConnection(SimpleNamespace(transport=transport, flow=flow, **usual), {})  # type: ignore[arg-type]
    transport.write(HEAD)
    assert client.write(b"data: {}\n\n") and client.write(b"data: 1\n\n")
    await asyncio.sleep(0)
    assert socket.seen == [HEAD + b"a\r\ndata: {}\n\n\r\n", b"9\r\ndata: 1\n\n\r\n"]


@pytest.mark.parametrize(
    "state",
    [{"write_paused": True}, {"disconnected": True}],
    ids=lambda state: next(iter(state)),
)
@pytest.mark.anyio
async def test_what_send_would_not_simply_write_is_left_to_send(state: dict[str, bool]) -> None:
    socket, client = a_client(**state)
    assert not client.write(b"data: {}\n\n")
    assert socket.seen == []


@pytest.mark.anyio
async def test_a_client_that_left_before_the_watch_is_told_at_once_and_a_watch_that_ended_never() -> None:
    gone: list[str] = []
    watches: Watches = {}
    a_client(watches, disconnected=True)[1].watch(lambda: gone.append("early"))
    assert gone == ["early"]
    _, late = a_client(watches)
    late.watch(lambda: gone.append("late"))
    assert late in watches
    late.unwatch()
    late.unwatch()
    assert not watches


def an_answering_client(**state: Any) -> tuple[Socket, ClientConnection, Any]:
    socket, transport = a_transport()
    flow = SimpleNamespace(write_paused=state.pop("write_paused", False))
    usual = {"disconnected": False, "response_started": False, "response_complete": False, "keep_alive": True}
    cycle: Any = SimpleNamespace(
        transport=transport, flow=flow, default_headers=[(b"date", b"today")], more_body=False, ended=0, **usual | state
    )

    def on_response() -> None:
        cycle.ended += 1

    cycle.on_response = on_response
    return socket, ClientConnection(cycle, {}), cycle


@pytest.mark.anyio
async def test_a_whole_response_is_one_write_and_ends_the_cycle() -> None:
    socket, client, cycle = an_answering_client()
    assert client.respond(200, [(b"content-length", b"2")], b"ok")
    assert socket.seen == [b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\n\r\nok"]
    assert cycle.response_started and cycle.response_complete and cycle.ended == 1
    assert not client.respond(200, [(b"content-length", b"2")], b"ok")
    assert len(socket.seen) == 1


@pytest.mark.anyio
async def test_a_response_follows_a_100_continue_that_is_still_kept_back() -> None:
    socket, client, cycle = an_answering_client()
    cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert client.respond(200, [(b"content-length", b"2")], b"ok")
    await asyncio.sleep(0)
    assert b"".join(socket.seen).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.anyio
async def test_a_response_on_a_connection_that_is_not_kept_says_so_and_closes_it() -> None:
    socket, client, _ = an_answering_client(keep_alive=False)
    assert client.respond(503, [(b"content-length", b"0")], b"")
    head = b"HTTP/1.1 503 Service Unavailable\r\ndate: today\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    assert socket.seen == [head, b"<closed>"]


@pytest.mark.anyio
@pytest.mark.parametrize("state", [{"write_paused": True}, {"disconnected": True}], ids=lambda state: next(iter(state)))
async def test_a_response_that_send_would_not_simply_write_is_left_to_send(state: dict[str, bool]) -> None:
    socket, client, cycle = an_answering_client(**state)
    assert not client.respond(200, [], b"ok")
    assert socket.seen == [] and not cycle.response_started


@pytest.mark.anyio
async def test_a_body_that_has_come_is_taken_at_once_and_only_then() -> None:
    _, client, _ = an_answering_client(body=bytearray(b"{}"))
    assert (client.body(), client.body()) == (b"{}", b"")
    _, late, _ = an_answering_client(body=bytearray(b"{"), disconnected=True)
    assert late.body() is None
    _, _, cycle = an_answering_client(body=bytearray(b"{"))
    cycle.more_body = True
    assert ClientConnection(cycle, {}).body() is None

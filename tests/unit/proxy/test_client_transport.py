"""A head waits for its body, never longer than the loop's turn."""

import asyncio

import pytest

from balanceroute.proxy.client_transport import HeadAndBody

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

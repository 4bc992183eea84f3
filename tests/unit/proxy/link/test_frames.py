"""Frames are whole, in order, and bounded, however the bytes come."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.messages import MAX_FRAME_BYTES, Beat, LinkError, PutBack, frame, read_from_relay


class Wire(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.aborted = True


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=4), max_size=6), st.lists(st.integers(1, 40), max_size=40))
def test_frames_arrive_complete_and_in_order_for_any_split_of_the_bytes(
    numbers_by_frame: list[list[int]], cuts: list[int]
) -> None:
    async def test() -> None:
        received: list[list[Any]] = []
        frames: Frames[Any] = Frames(
            asyncio.get_running_loop(), lambda _, body: received.append(read_from_relay(body)), lambda *_: None
        )
        frames.connection_made(Wire())
        sent = [[PutBack(number) for number in numbers] for numbers in numbers_by_frame]
        data = b"".join(map(frame, sent))
        for cut in (*cuts, len(data)):
            part, data = data[:cut], data[cut:]
            frames.data_received(part)
        assert received == sent

    asyncio.run(test())


def test_messages_of_one_turn_are_one_frame() -> None:
    async def test() -> None:
        frames: Frames[Any] = Frames(asyncio.get_running_loop(), lambda *_: None, lambda *_: None)
        wire = Wire()
        frames.send(Beat())  # before there is a connection: nowhere to go
        frames.connection_made(wire)
        for number in range(3):
            frames.send(PutBack(number))
        assert wire.written == []
        await asyncio.sleep(0)
        assert [read_from_relay(written[4:]) for written in wire.written] == [[PutBack(0), PutBack(1), PutBack(2)]]

    asyncio.run(test())


def test_a_frame_that_is_too_large_or_makes_no_sense_ends_the_connection() -> None:
    async def test() -> None:
        for data in ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\x01\xc1"):
            received: list[bytes] = []
            lost: list[str] = []
            frames: Frames[Any] = Frames(
                asyncio.get_running_loop(),
                lambda _, body, received=received: received.append(read_from_relay(body)),  # type: ignore[misc]
                lambda _, reason, lost=lost: lost.append(reason),  # type: ignore[misc]
            )
            wire = Wire()
            frames.connection_made(wire)
            frames.data_received(data)
            assert wire.aborted and received == []
            frames.connection_lost(None)
            assert len(lost) == 1 and not frames.open

    asyncio.run(test())


def test_why_a_connection_was_lost_is_told_without_the_number_of_the_error() -> None:
    async def test() -> None:
        lost: list[str] = []
        frames: Frames[Any] = Frames(asyncio.get_running_loop(), lambda *_: None, lambda _, reason: lost.append(reason))
        for error in (ConnectionResetError(104, "Connection reset by peer"), None):
            frames.connection_made(Wire())
            frames.connection_lost(error)
        assert lost == ["Connection reset by peer", "the connection was closed"]

    asyncio.run(test())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("refuses", [False, True])
def test_what_a_peer_sent_before_it_closed_is_read_although_it_reads_no_more(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], refuses: bool
) -> None:
    async def test() -> None:
        received: list[Any] = []

        def take(_: Frames[Any], body: bytes) -> None:
            received.append(read_from_relay(body))
            if refuses:
                raise LinkError("it leaves")

        loop = asyncio.get_running_loop()
        lost: asyncio.Future[str] = loop.create_future()
        near, peer = socket.socketpair()
        frames: Frames[Any] = Frames(loop, take, lambda _, reason: lost.set_result(reason))
        await loop.create_unix_connection(lambda: frames, sock=near)
        peer.sendall(frame([PutBack(1)]) + frame([PutBack(2)]))
        peer.close()
        frames.send(Beat())
        frames.flush()  # before the loop reads
        reason = await lost
        assert received == ([[PutBack(1)]] if refuses else [[PutBack(1)], [PutBack(2)]])
        assert (reason == "it leaves") is refuses and not frames.open

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(test())

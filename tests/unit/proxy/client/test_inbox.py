"""What a client has sent and is not parsed yet, without a socket."""

import asyncio

import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.client.inbox import MAX_WAITING_BYTES, Inbox
from tests.unit.proxy.client.listening import an_edge
from tests.unit.proxy.virtual_time import with_virtual_time

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Socket(asyncio.Transport):
    """Notes whether it is read."""

    reads = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


@with_virtual_time
async def test_a_head_is_taken_once_it_has_come_whole_and_what_follows_it_stays() -> None:
    inbox = Inbox(an_edge(), Socket())
    sent = b"\r\n" + HEAD + b"GET /next"
    for at in range(len(HEAD) + 1):
        inbox.raw += sent[at : at + 1]
        assert inbox.take_head() is None
    inbox.raw += sent[len(HEAD) + 1 :]
    request = inbox.take_head()
    assert request is not None and request.path == "/health"
    assert inbox.raw == b"GET /next" and inbox.take_head() is None


@with_virtual_time
async def test_bytes_that_can_not_become_a_head_are_refused_before_it_is_whole() -> None:
    inbox = Inbox(an_edge(), Socket())
    inbox.raw = b"\x16\x03\x01\x00"
    with pytest.raises(InvalidRequest):
        inbox.take_head()


@with_virtual_time
async def test_the_socket_is_read_while_no_more_bytes_wait_than_may() -> None:
    socket = Socket()
    inbox = Inbox(an_edge(), socket)
    for size in (MAX_WAITING_BYTES, MAX_WAITING_BYTES + 1, 2 * MAX_WAITING_BYTES, MAX_WAITING_BYTES, 0):
        inbox.raw = b"x" * size
        inbox.bound()
        assert socket.reads is (size <= MAX_WAITING_BYTES) is not inbox.many


@with_virtual_time
async def test_bytes_that_are_dropped_are_no_longer_counted_and_the_socket_is_read_on() -> None:
    edge, socket = an_edge(), Socket()
    inbox, other = Inbox(edge, socket), Inbox(edge, Socket())
    inbox.raw, other.raw = b"x" * 2 * MAX_WAITING_BYTES, b"abc"
    for each in (inbox, other, inbox):
        each.count(len(each.raw))
    inbox.bound()
    assert edge.incoming_bytes == 2 * MAX_WAITING_BYTES + 3 and not socket.reads
    inbox.drop()
    assert edge.incoming_bytes == 3 and socket.reads and inbox.dropping and not inbox.raw

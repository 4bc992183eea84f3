"""What the brain knows of the requests that one relay holds, and of the tokens that these have generated."""

import asyncio
import logging
import os
import socket
from contextlib import closing

import pytest

from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.members import Member, token_counts_of
from balanceroute.proxy.link.messages import VERSION, FromBrain, Hello
from balanceroute.proxy.link.token_counts import ReadCounts, WrittenCounts


def a_connection(loop: asyncio.AbstractEventLoop) -> Frames[FromBrain]:
    return Frames(loop, lambda frames, body: None, lambda frames, reason: None)


def a_member(written: WrittenCounts | None = None) -> Member:
    with closing(asyncio.new_event_loop()) as loop:  # nothing is sent: the connection needs no more than its clock
        member = Member(1, "relay-0", os.getpid(), a_connection(loop))
    if written is not None:
        member.counts = ReadCounts(os.getpid(), written.fd)
    return member


def test_tokens_that_a_relay_has_written_are_new_once() -> None:
    written = WrittenCounts()
    member, first, second = a_member(written), written.number(), written.number()
    member.hold(first, "a", 1)
    member.hold(second, "b", 1)
    written.write(first, 3)
    written.write(second, 5)
    assert member.read() == (["a", "b"], [3, 5])
    written.write(second, 6)
    assert member.read() == (["b"], [1])
    assert member.read() == ([], [])


def test_tokens_that_came_in_a_message_are_not_counted_again_when_they_are_read() -> None:
    written = WrittenCounts()
    member, number = a_member(written), written.number()
    member.hold(number, "a", 1)
    assert member.tickets[number].grow(4) == 4
    written.write(number, 3)
    assert member.read() == ([], [])
    written.write(number, 6)
    assert member.read() == (["a"], [2])


def test_tokens_written_for_a_finished_request_do_not_count_for_the_next_one_in_its_place() -> None:
    written = WrittenCounts()
    member, last = a_member(written), written.number()
    member.hold(last, "a", 1)
    written.write(last, 9)
    written.leave(last)
    following = written.number()
    member.hold(following, "b", 1)  # at the same place, before the former is released
    member.release(last)
    assert member.read() == ([], [])
    written.write(following, 2)
    assert member.read() == (["b"], [2])


def test_a_relay_that_sends_its_tokens_is_not_read() -> None:
    member = a_member()
    member.hold(1, "a", 1)
    assert member.read() == ([], [])


def test_unreadable_token_counts_are_logged_and_sent_by_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    ours, theirs = socket.socketpair()
    written = WrittenCounts()

    async def joined() -> None:
        loop = asyncio.get_running_loop()
        frames = a_connection(loop)
        transport, _ = await loop.create_unix_connection(lambda: frames, sock=ours)
        for token_file, read in ((written.fd, True), (None, False), (10**6, False)):
            hello = Hello(VERSION, "relay-0", os.getpid(), 0, (), token_file)
            assert (token_counts_of(frames, hello) is not None) == read
        transport.close()

    asyncio.run(joined())
    theirs.close()
    assert [record.message for record in caplog.records] == ["token counts of a relay cannot be read"]

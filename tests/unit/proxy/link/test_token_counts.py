"""Tokens that one process writes and another one reads."""

import os
import socket

import pytest

from balanceroute.proxy.link.token_counts import (
    NOWHERE,
    PLACES,
    ReadCounts,
    WrittenCounts,
    peer_pid,
    place_of,
    same_serial,
    serial_of,
    tokens_of,
)


def changes_in(read: ReadCounts, used: int) -> list[tuple[int, int, int]]:
    """Place, serial and tokens of each place whose value is new."""
    changed = read.changed(used)
    return [
        (place, serial_of(value), tokens_of(value)) for place, value in zip(changed[::2], changed[1::2], strict=True)
    ]


def test_a_written_count_is_read_once() -> None:
    written = WrittenCounts()
    first, second = written.number(), written.number()
    read = ReadCounts(os.getpid(), written.fd)
    written.write(first, 7)
    written.write(second, 2**32 - 1)
    used = place_of(second) + 1
    assert [(place, tokens) for place, _, tokens in changes_in(read, used)] == [
        (place_of(first), 7),
        (place_of(second), 2**32 - 1),
    ]
    assert changes_in(read, used) == []
    written.write(first, 8)
    ((place, serial, tokens),) = changes_in(read, used)
    assert place == place_of(first) and same_serial(first, serial) and tokens == 8


def test_another_process_reads_what_is_written_after_it_was_made() -> None:
    written = WrittenCounts()
    number = written.number()
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(ours[0], 1)
            written.write(number, 5)
            os.write(theirs[1], b"x")
            os.read(ours[0], 1)
        finally:
            os._exit(0)
    read = ReadCounts(child, written.fd)
    os.write(ours[1], b"x")
    os.read(theirs[0], 1)
    assert [tokens for _, _, tokens in changes_in(read, place_of(number) + 1)] == [5]
    os.write(ours[1], b"x")
    os.waitpid(child, 0)
    for end in (*ours, *theirs):
        os.close(end)


def test_a_reused_place_distinguishes_its_next_ticket_from_the_last() -> None:
    written = WrittenCounts()
    last = written.number()
    written.leave(last)
    following = written.number()
    assert place_of(following) == place_of(last) and following != last
    read = ReadCounts(os.getpid(), written.fd)
    written.write(following, 3)
    ((_, serial, _),) = changes_in(read, place_of(following) + 1)
    assert same_serial(following, serial) and not same_serial(last, serial)


def test_a_ticket_without_a_place_is_not_written() -> None:
    written = WrittenCounts()
    numbers = [written.number() for _ in range(PLACES + 1)]
    assert [place_of(number) for number in numbers] == [*range(1, PLACES), NOWHERE, NOWHERE]
    assert [written.write(number, 1) for number in numbers] == [*[True] * (PLACES - 1), False, False]
    for number in reversed(numbers):
        written.leave(number)
    assert sorted(place_of(written.number()) for _ in range(PLACES)) == [NOWHERE, *range(1, PLACES)]


def test_a_file_of_another_kind_is_not_read() -> None:
    ours, theirs = os.pipe()
    with pytest.raises(OSError, match="counts no tokens"):
        ReadCounts(os.getpid(), ours)
    os.close(ours)
    os.close(theirs)
    with pytest.raises(OSError, match="No such file"):
        ReadCounts(os.getpid(), 10**6)


def test_only_the_end_of_a_unix_socket_has_a_process() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_pid(ours) == os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert peer_pid(client) is None

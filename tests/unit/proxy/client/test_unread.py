"""Whether a client reads what is written to it, without a socket."""

import asyncio

import pytest

from balanceroute.proxy.client.edge import ClientLimits
from balanceroute.proxy.client.unread import Unread

LIMITS = ClientLimits(stall_timeout_s=10.0, min_rate_bytes_per_s=100)


class Written(asyncio.Transport):
    """Has so many bytes that its socket has not taken."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def get_write_buffer_size(self) -> int:
        return self.size


@pytest.mark.parametrize(("read", "stalled"), [(0, True), (999, True), (1000, False)])
def test_a_client_must_read_the_least_rate_over_the_time_that_it_has(read: int, stalled: bool) -> None:
    transport = Written(5000)
    unread = Unread(transport, None)
    assert not unread.stalled(0.0, LIMITS)
    transport.size -= read
    assert not unread.stalled(9.9, LIMITS)
    assert unread.stalled(10.0, LIMITS) is stalled


def test_a_client_that_has_read_everything_or_was_in_time_is_judged_anew() -> None:
    transport = Written(5000)
    unread = Unread(transport, None)
    assert not unread.stalled(0.0, LIMITS)
    transport.size = 0
    assert not unread.stalled(5.0, LIMITS)
    transport.size = 5000
    assert not unread.stalled(11.0, LIMITS)
    unread.in_time()
    assert not unread.stalled(21.0, LIMITS)
    assert unread.stalled(31.0, LIMITS)


def test_unread_bytes_are_those_above_and_below_tls_and_none_once_they_are_dropped() -> None:
    unread = Unread(Written(3), Written(4))
    assert unread.size == 7
    unread.drop()
    assert unread.size == 0

"""The bytes of one request and its answer, as the edge counts them."""

from typing import Any, cast

import pytest

from balanceroute.errors import EdgeFull, InvalidRequest
from balanceroute.proxy.client.edge import Edge
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.turn import LARGE_BODY_BYTES, Turn
from tests.unit.proxy.client.connections import Connection
from tests.unit.proxy.client.listening import an_edge
from tests.unit.proxy.virtual_time import with_virtual_time

LARGE = 2 * LARGE_BODY_BYTES


def a_turn(edge: Edge, length: int | None, limit: int = 10 * LARGE) -> Turn:
    """Of a POST of so many bytes (None: chunked), whose head has come."""
    request = Request("POST", b"/v1/completions", [(b"host", b"x")], http_1_0=False)
    request.length, request.peer = length, ("10.0.0.1", 1)
    turn = Turn(edge, request, Connection().response(), cast(Any, None), hot=True)
    turn.expect_body(limit)
    return turn


@with_virtual_time
async def test_a_body_counts_as_incoming_then_with_its_answer_as_served_then_not_at_all() -> None:
    edge = an_edge()
    turn = a_turn(edge, LARGE)
    assert turn.feed(b"x" * (LARGE - 1)) == b"" and not turn.take_complete_body()
    assert (edge.incoming_bytes, edge.served_bytes, edge.held) == (LARGE - 1, 0, {"10.0.0.1": LARGE - 1})
    assert turn.feed(b"xNEXT") == b"NEXT" and turn.take_complete_body()
    turn.end_receiving()
    turn.keep(1000)
    turn.keep(-400)
    assert (edge.incoming_bytes, edge.served_bytes, edge.held) == (0, LARGE + 600, {"10.0.0.1": LARGE + 600})
    assert turn.request.body == b"x" * LARGE and not turn.receiving
    turn.release()
    turn.release()
    assert (edge.incoming_bytes, edge.served_bytes, edge.held) == (0, 0, {})


@with_virtual_time
async def test_a_body_that_is_refused_or_left_is_no_longer_counted() -> None:
    edge = an_edge()
    refused, left = a_turn(edge, None, limit=10), a_turn(edge, LARGE)
    with pytest.raises(InvalidRequest):
        refused.feed(b"b\r\n")
    refused.end_receiving()
    left.feed(b"x" * (LARGE - 1))
    left.release()
    assert (edge.incoming_bytes, edge.served_bytes, edge.held) == (0, 0, {})


@with_virtual_time
async def test_a_small_body_is_not_counted_for_its_client_and_needs_room_all_the_same() -> None:
    edge = an_edge(max_held_bytes=3000)
    first, second = a_turn(edge, 2000), a_turn(edge, 2000)
    first.take_whole(b"x" * 2000)
    assert edge.served_bytes == 2000 and not edge.held
    with pytest.raises(EdgeFull):
        second.take_whole(b"x" * 2000)
    second.release()
    assert edge.served_bytes == 2000

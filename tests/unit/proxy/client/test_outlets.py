"""What a client gets of one leg, of several legs that share its response, and of one whose answer is kept."""

import asyncio

import pytest

from balanceroute.errors import EdgeFull
from balanceroute.proxy.client.outlets import LARGE_BYTES, PartAnswer, PartStream, StreamOutlet
from balanceroute.proxy.life.outlet import write_last
from balanceroute.proxy.life.streaming import write_part
from tests.unit.proxy.client.connections import Connection
from tests.unit.proxy.life.legs import a_request, events
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time


def keeping_nothing(more_bytes: int) -> None:
    raise EdgeFull("no room")


@with_virtual_time
async def test_a_stream_begins_with_its_first_events_and_ends_in_one_write_with_the_last() -> None:
    connection = Connection()
    outlet = StreamOutlet(connection.response(), [(b"x-request-id", b"r")])
    assert outlet.forget()
    outlet.start()
    assert not outlet.forget()
    await write_last(outlet, b"data: [DONE]\n\n")
    status, headers, body = connection.answer
    assert (status, headers["x-request-id"]) == (200, "r") and "event-stream" in headers["content-type"]
    assert body.endswith(b"0\r\n\r\n") and connection.done == [True]


@with_virtual_time
async def test_legs_that_share_a_response_start_it_once_and_none_of_them_ends_it() -> None:
    connection = Connection()
    shared = StreamOutlet(connection.response(), [])
    legs = [PartStream(shared), PartStream(shared)]
    for leg in legs:
        leg.start()
        await write_last(leg, b'data: {"model":"m"}\n\n')
    assert not connection.done
    shared.end(b"data: [DONE]\n\n")
    assert connection.done == [True] and connection.transport.written.count(b"HTTP/1.1 200") == 1


@with_virtual_time
async def test_each_leg_waits_for_a_client_that_reads_too_slowly() -> None:
    connection = Connection()
    connection.write_paused = True
    response = connection.response()
    shared = StreamOutlet(response, [])
    legs = [PartStream(shared), PartStream(shared)]
    for leg in legs:
        leg.start()
    tasks = [asyncio.ensure_future(write_part(leg, b'data: {"model":"m"}\n\n')) for leg in legs]
    await let_pass(1.0)
    assert not any(task.done() for task in tasks)
    connection.write_paused = False
    response.allow()
    connection.room.set()
    await asyncio.gather(*tasks)
    assert connection.transport.written.count(b'"model"') == 2


def test_an_answer_that_is_kept_may_begin_anew_until_it_is_complete() -> None:
    outlet = PartAnswer(a_request(stream=False))
    for _ in range(2):
        outlet.start()
        assert outlet.write(events(20))
        assert outlet.forget() and not outlet.started


def test_an_answer_that_is_kept_tells_its_bytes_once_they_are_many_and_when_it_drops_them() -> None:
    told: list[int] = []
    outlet = PartAnswer(a_request(stream=False), told.append)
    part = events(20, text="x" * 20_000)
    for _ in range(4):
        assert not told
        outlet.write(part)
    assert len(told) == 1 and told[0] >= 80_000
    outlet.forget()
    assert sum(told) == 0
    outlet.prompt_came(2 * LARGE_BYTES)
    assert sum(told) == 2 * LARGE_BYTES
    outlet.whole(b"x" * 2 * LARGE_BYTES)
    assert sum(told) == 4 * LARGE_BYTES
    assert outlet.forget() and sum(told) == 2 * LARGE_BYTES  # what was said of the prompt stays


def test_an_answer_without_room_is_refused() -> None:
    outlet = PartAnswer(a_request(stream=False), keeping_nothing)
    with pytest.raises(EdgeFull):
        outlet.whole(b"x" * 2 * LARGE_BYTES)
    outlet = PartAnswer(a_request(stream=False), keeping_nothing)
    with pytest.raises(EdgeFull):
        outlet.write(events(20, text="x" * 2 * LARGE_BYTES))


@with_virtual_time
async def test_a_stream_has_what_a_prefiller_has_told_counted_with_the_bytes_of_its_request() -> None:
    connection = Connection()
    whole = StreamOutlet(connection.response(), [])
    for stream in (whole, PartStream(whole)):
        stream.prompt_came(LARGE_BYTES)  # too small to count
        stream.prompt_came(2 * LARGE_BYTES)
    assert connection.kept_bytes == 4 * LARGE_BYTES


@pytest.mark.parametrize("kind", [StreamOutlet, PartStream])
@with_virtual_time
async def test_a_stream_is_refused_for_what_a_prefiller_has_told_only_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, kind: type[StreamOutlet]
) -> None:
    """Decode first, or with several choices, a prefiller's answer may come later than the first tokens."""
    connection = Connection()
    monkeypatch.setattr(connection, "keep", keeping_nothing)
    whole = StreamOutlet(connection.response(), [])
    stream = whole if kind is StreamOutlet else PartStream(whole)
    with pytest.raises(EdgeFull):
        stream.prompt_came(2 * LARGE_BYTES)
    whole.start()
    stream.prompt_came(2 * LARGE_BYTES)

"""The text format of event streams: where events end, and what of an event is its data."""

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.wire.event_stream import (
    MAX_RELAXED_BYTES,
    EventSplitter,
    known_lines,
    payload_of,
    payloads_of,
    relaxed,
)

lines = st.sampled_from([b"data: 1", b"data: 2", b": comment", b"id: 3", b"event: x"])
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.lists(lines, min_size=1, max_size=3), max_size=4), ends, st.data())
def test_events_are_the_same_with_any_line_ends_and_in_any_pieces(
    events_lines: list[list[bytes]], end: bytes, data: st.DataObject
) -> None:
    stream = b"".join(end.join([*event, b"", b""]) for event in events_lines)
    cuts = sorted({0, len(stream), *data.draw(st.lists(st.integers(0, len(stream)), max_size=8))})
    splitter = EventSplitter()
    events = [event for start, stop in pairwise(cuts) for event in splitter.events(stream[start:stop])]
    assert [event.strip(b"\n") for event in events] == [b"\n".join(event) for event in events_lines]
    assert not splitter.partial


def test_an_event_that_has_not_ended_is_kept_until_it_is_dropped() -> None:
    splitter = EventSplitter()
    assert list(splitter.events(b"data: 1\n\ndata: ")) == [b"data: 1\n\n"]
    assert splitter.partial
    splitter.drop()
    assert not splitter.partial


@pytest.mark.parametrize("size", [1, 7, 40])
def test_an_event_above_the_limit_is_told_and_its_bytes_are_dropped(size: int) -> None:
    splitter = EventSplitter(max_event_bytes=20)
    for _ in range(0, 40, size):
        assert list(splitter.events(b"x" * size)) == []
    assert splitter.oversized


def test_an_event_in_small_pieces_takes_no_more_memory_than_its_bytes() -> None:
    """A piece of two bytes is an object of 35 in a list: 32 MiB of them took 700 MB."""
    event = b"data: %b\n\n" % (b"ab" * 50_000)
    splitter = EventSplitter()
    tracemalloc.start()
    try:
        for start in range(0, len(event) - 2, 2):
            assert not list(splitter.events(event[start : start + 2]))
        assert tracemalloc.get_traced_memory()[0] < 1.5 * len(event)
    finally:
        tracemalloc.stop()
    assert list(splitter.events(event[-2:])) == [event]


def test_the_limit_is_of_one_event_and_not_of_all_that_came_in_pieces() -> None:
    splitter = EventSplitter(max_event_bytes=20)
    came = [event for _ in range(9) for piece in (b"data: 123", b"456\n\n") for event in splitter.events(piece)]
    assert came == [b"data: 123456\n\n"] * 9 and not splitter.oversized


@pytest.mark.parametrize(
    ("event", "payload"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"data: a\nid: 1\ndata: b\n\n", b"a\nb"),
        (b": comment\n\n", None),
        (b"\n", None),
    ],
)
def test_the_data_of_an_event_are_its_data_lines_joined(event: bytes, payload: bytes | None) -> None:
    assert payload_of(event) == payload


def test_the_data_of_several_events_come_in_order_without_comments() -> None:
    assert list(payloads_of(b"data: 1\n\n: comment\n\nid: 5\ndata: 2\n\n")) == [b"1", b"2"]


def test_lines_that_are_no_field_or_no_text_are_left_out() -> None:
    assert known_lines(b"data: 1\nnonsense\ndata: \xff\n\n") == b"data: 1\n\n"
    assert known_lines("data: é\n\n".encode()) == "data: é\n\n".encode()


@pytest.mark.parametrize(
    "payload", [b"not json", b'{"a": NaN', b"", b"[" * 5000 + b"NaN" + b"]" * 5000, b"[" + b"9" * 5000 + b"]"]
)
def test_what_is_no_json_for_python_either_has_no_value(payload: bytes) -> None:
    assert relaxed(payload) == (None, b"")


@pytest.mark.parametrize("more", [0, 1])
def test_json_that_only_python_reads_is_read_up_to_a_size_which_takes_it_milliseconds(more: int) -> None:
    payload = b'["%b",NaN]' % (b"x" * (MAX_RELAXED_BYTES - 8 + more))
    assert len(payload) == MAX_RELAXED_BYTES + more
    assert relaxed(payload) == (
        (None, b"") if more else (["x" * (MAX_RELAXED_BYTES - 8), None], payload[:-4] + b"null]")
    )

"""Heads that are too large: 414 for the request line, 431 for the fields, and never more of them kept than allowed."""

import pytest

from tests.security.deployment import Edge
from tests.security.wire import Answer, completion, request

pytestmark = pytest.mark.e2e

LINE_BYTES = 8 * 1024
HEAD_BYTES = 64 * 1024
FIELDS = 128
MIB = 2**20


def fields(count: int, size: int = 10) -> list[str]:
    """Fields of `size` bytes each, line end and all."""
    return [f"X-{number:04}: ".ljust(size - 2, "a") for number in range(count)]


def refusal(edge: Edge, head: bytes, *, bytewise: bool = False) -> Answer:
    """The one answer to a head that is too large; a request behind it is none."""
    with edge.connect() as connection:
        (connection.send_bytewise if bytewise else connection.send)(head)
        connection.send(completion("behind"))
        answer = connection.answer("POST")
        assert answer.error() and answer.closes
        assert connection.has_ended()
    assert edge.serves() and not edge.workers.of("behind")
    return answer


def test_a_request_line_above_its_limit_is_a_414(edge: Edge) -> None:
    target = "/health?" + "a" * LINE_BYTES
    assert refusal(edge, request("GET", target)).status == 414


def test_a_request_line_that_has_no_end_is_a_414(edge: Edge) -> None:
    assert refusal(edge, b"GET /" + b"a" * 2 * LINE_BYTES).status == 414


def test_a_request_line_that_comes_byte_by_byte_is_a_414(edge: Edge) -> None:
    assert refusal(edge, request("GET", "/?" + "a" * LINE_BYTES), bytewise=True).status == 414


def test_a_request_line_just_within_its_limit_is_served(edge: Edge) -> None:
    target = "/health?" + "a" * (LINE_BYTES - len("GET /health? HTTP/1.1\r\n"))
    assert edge.ask(request("GET", target), "GET").status == 200


def test_one_field_too_many_is_a_431(edge: Edge) -> None:
    assert refusal(edge, request("GET", "/health", *fields(FIELDS))).status == 431  # and Host


def test_as_many_fields_as_are_allowed_are_served(edge: Edge) -> None:
    assert edge.ask(request("GET", "/health", *fields(FIELDS - 1)), "GET").status == 200


def test_empty_fields_without_number_are_a_431(edge: Edge) -> None:
    assert refusal(edge, request("GET", "/health", *["a:"] * 10_000)).status == 431


def test_a_head_above_its_limit_in_few_fields_is_a_431(edge: Edge) -> None:
    assert refusal(edge, request("GET", "/health", *fields(100, HEAD_BYTES // 100 + 1))).status == 431


def test_a_head_just_within_its_limit_is_served(edge: Edge) -> None:
    assert edge.ask(request("GET", "/health", *fields(100, HEAD_BYTES // 100 - 1)), "GET").status == 200


def test_one_field_larger_than_a_head_may_be_is_a_431(edge: Edge) -> None:
    assert refusal(edge, request("GET", "/health", f"X-A: {'a' * HEAD_BYTES}")).status == 431


def test_a_field_name_larger_than_a_head_may_be_is_a_431(edge: Edge) -> None:
    assert refusal(edge, request("GET", "/health", f"{'a' * HEAD_BYTES}: b")).status == 431


def test_a_limit_holds_for_a_later_request_of_a_connection_too(edge: Edge) -> None:
    with edge.connect() as connection:
        for _ in range(3):
            connection.send(request("GET", "/health", *fields(100, 600)))
            assert connection.answer().status == 200
        connection.send(request("GET", "/health", *fields(100, 700)))
        answer = connection.answer()
        assert answer.status == 431 and answer.closes
        assert connection.has_ended()


def test_a_limit_holds_for_pipelined_requests_too(edge: Edge) -> None:
    with edge.connect() as connection:
        connection.send(request("GET", "/health") + request("GET", "/health?" + "a" * LINE_BYTES))
        assert [answer.status for answer in connection.answers(2)] == [200, 414]
        assert connection.has_ended()


@pytest.mark.parametrize(
    "start",
    [b"GET /health HTTP/1.1\r\nX-A: ", b"GET /health HTTP/1.1\r\n", b"GET /", b""],
    ids=["value", "name", "target", "method"],
)
def test_a_head_that_never_ends_is_cut_off_before_it_takes_memory(edge: Edge, start: bytes) -> None:
    before = edge.rss_bytes()
    with edge.connect() as connection:
        connection.send(start)
        connection.send_until_stuck(b"A" * 100_000, 64 * MIB)
        rest = connection.rest()
        assert rest == b"" or rest.startswith(b"HTTP/1.1 4"), rest[:100]
    assert edge.rss_bytes() - before < 8 * MIB


def test_a_hundred_half_heads_take_no_more_memory_than_they_are_allowed(edge: Edge) -> None:
    before = edge.rss_bytes()
    connections = [edge.connect() for _ in range(100)]
    for connection in connections:
        connection.send(b"GET /health HTTP/1.1\r\nHost: router\r\nX-A: " + b"a" * (HEAD_BYTES - 100))
    assert edge.serves()
    assert edge.rss_bytes() - before < 100 * 4 * HEAD_BYTES + 8 * MIB
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("blank_lines", [1, 2])
def test_a_few_blank_lines_before_a_request_are_ignored(edge: Edge, blank_lines: int) -> None:
    """RFC 9112, 2.2: what some old clients send after a body."""
    with edge.connect() as connection:
        connection.send(b"\r\n" * blank_lines + request("GET", "/health"))
        assert connection.answer().status == 200


def test_blank_lines_without_number_take_no_memory(edge: Edge) -> None:
    before = edge.rss_bytes()
    with edge.connect() as connection:
        connection.send_until_stuck(b"\r\n" * 50_000, 16 * MIB)
        assert edge.rss_bytes() - before < 8 * MIB
        assert edge.serves()

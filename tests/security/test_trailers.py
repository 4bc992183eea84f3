"""Trailers: dropped, whatever they say, and bounded."""

import pytest

from tests.security.deployment import Edge
from tests.security.wire import body, chunked, completion, request

pytestmark = pytest.mark.e2e

MIB = 2**20


def with_trailers(trailers: bytes, target: str = "/v1/completions") -> bytes:
    head = request("POST", target, "Content-Type: application/json", "Transfer-Encoding: chunked")
    return head + chunked(body("trailed"), trailers=trailers)


@pytest.mark.parametrize("target", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize(
    "field",
    [
        "Authorization: Bearer stolen",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "X-Request-Id: evil",
        "User-Agent: evil",
        "Content-Length: 3",
        "Transfer-Encoding: chunked",
        "Host: evil",
        "Connection: close",
    ],
    ids=lambda field: field.partition(":")[0].lower(),
)
def test_a_trailer_is_not_taken_for_a_header(edge: Edge, field: str, target: str) -> None:
    with edge.connect() as connection:
        connection.send(with_trailers(field.encode() + b"\r\n", target=target) + completion("next"))
        first = connection.answer("POST")
        if first.status != 200:  # refusing is a way, too
            assert first.status == 400 and connection.has_ended()
            return
        assert "evil" not in first.headers.get("x-request-id", "")
        assert connection.answer("POST").status == 200
    name, _, value = field.lower().partition(": ")
    seen = edge.workers.of("trailed")
    assert seen
    for one in seen:
        assert f"{name}: {value}".encode() not in one.head


@pytest.mark.parametrize("count", [1, 50])
def test_a_few_trailers_are_ignored(edge: Edge, count: int) -> None:
    assert edge.ask(with_trailers(b"x-checksum: abc\r\n" * count)).status == 200


@pytest.mark.parametrize(
    "field", [b"a:\r\n", b"x-long: %b\r\n" % (b"a" * 1000), b"x"], ids=["empty", "long", "endless"]
)
def test_endless_trailers_are_refused_before_they_take_memory(edge: Edge, field: bytes) -> None:
    before = edge.rss_bytes()
    with edge.connect() as connection:
        connection.send(with_trailers(b"")[:-2])
        connection.send_until_stuck(field * (100_000 // len(field)), 64 * MIB)
        rest = connection.rest()
        assert rest == b"" or rest.startswith(b"HTTP/1.1 4"), rest[:100]
    assert edge.rss_bytes() - before < 8 * MIB
    assert not edge.workers.of("trailed")


@pytest.mark.parametrize(
    "trailer",
    [b"no colon\r\n", b": no name\r\n", b"x : y\r\n", b"x: \x00\r\n", b"x: y\n", b"x: y\r", b"x: y\r\n folded\r\n"],
    ids=["no-colon", "no-name", "space-before-colon", "nul", "bare-lf", "bare-cr", "folded"],
)
def test_a_malformed_trailer_is_refused_and_nothing_behind_it_is_read(edge: Edge, trailer: bytes) -> None:
    with edge.connect() as connection:
        connection.send(with_trailers(trailer) + completion("behind"))
        connection.half_close()
        answer = connection.answer("POST")
        assert answer.status in (400, 431) and answer.error() and answer.closes
        assert connection.has_ended()
    assert edge.serves() and not edge.workers.of("behind") and not edge.workers.of("trailed")

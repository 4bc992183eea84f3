"""Request smuggling: every shape that two parsers could frame differently is refused, and nothing after it is read.

Behind each attack stands a second request; a router that took the attack for less than it is, or for more, would pass
it on to a worker.
"""

import itertools
from contextlib import suppress

import pytest

from tests.security.deployment import Edge
from tests.security.wire import Ended, body, chunked, completion, request
from tests.waiting import block_until

pytestmark = pytest.mark.e2e

BODY = body("attack")
START = b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKS = b"Transfer-Encoding: chunked\r\n"
PLAIN = BODY
CHUNKED = chunked(BODY)
_numbers = itertools.count()


def framed(fields: bytes, content: bytes = CHUNKED) -> bytes:
    return START + fields + b"\r\n" + content


TWO_FRAMINGS = {
    "length-and-chunked": framed(LENGTH + CHUNKS),
    "chunked-and-length": framed(CHUNKS + LENGTH),
    "length-0-and-chunked": framed(b"Content-Length: 0\r\n" + CHUNKS),
    "two-lengths": framed(LENGTH + b"Content-Length: 0\r\n", PLAIN),
    "two-lengths-other-order": framed(b"Content-Length: 0\r\n" + LENGTH, PLAIN),
    "list-of-lengths": framed(b"Content-Length: %d, 0\r\n" % len(BODY), PLAIN),
    "chunked-twice": framed(CHUNKS + CHUNKS),
    "chunked-list-twice": framed(b"Transfer-Encoding: chunked, chunked\r\n"),
    "chunked-then-identity": framed(CHUNKS + b"Transfer-Encoding: identity\r\n"),
    "identity-then-chunked": framed(b"Transfer-Encoding: identity\r\n" + CHUNKS),
    "chunked-not-last": framed(b"Transfer-Encoding: chunked, gzip\r\n"),
    "chunked-in-http-1.0": framed(CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "length-and-unknown-coding": framed(LENGTH + b"Transfer-Encoding: x\r\n", PLAIN),
}
LENGTHS = {
    "plus": b"+%d" % len(BODY),
    "minus": b"-1",
    "hexadecimal": b"0x%x" % len(BODY),
    "underscore": b"1_0",
    "fraction": b"%d.0" % len(BODY),
    "exponent": b"1e1",
    "empty": b"",
    "two-words": b"%d 0" % len(BODY),
    "text": b"many",
    "vertical-tab": b"\x0b%d" % len(BODY),
    "form-feed": b"%d\x0c" % len(BODY),
    "no-break-space": b"\xa0%d" % len(BODY),
    "other-digits": "٣".encode(),
    "semicolon": b"%d; 0" % len(BODY),
    "trailing-comma": b"%d," % len(BODY),
    "above-64-bits": b"%d" % (2**64 + len(BODY)),
    "400-digits": b"9" * 400,
}
CODINGS = {
    "misspelt": b"xchunked",
    "prefix": b"chunk",
    "with-more": b"chunkedx",
    "vertical-tab": b"\x0bchunked",
    "form-feed": b"chunked\x0c",
    "nul": b"chunked\x00",
    "quoted": b'"chunked"',
    "single-quoted": b"'chunked'",
    "parameter": b"chunked;q=0",
    "identity": b"identity",
    "gzip": b"gzip",
    "gzip-chunked": b"gzip, chunked",
    "empty": b"",
    "comma": b",",
    "leading-comma": b", chunked, identity",
    "no-break-space": b"\xa0chunked",
}
FIELDS = {
    "space-before-colon": b"Transfer-Encoding : chunked\r\n",
    "tab-before-colon": b"Transfer-Encoding\t: chunked\r\n",
    "space-before-colon-of-length": b"Content-Length : %d\r\n" % len(BODY),
    "leading-space": b" Transfer-Encoding: chunked\r\n",
    "folded-name": b"X-A: b\r\n Transfer-Encoding: chunked\r\n",
    "folded-value": b"Transfer-Encoding:\r\n chunked\r\n",
    "folded-length": LENGTH[:-2] + b"\r\n\t0\r\n",
    "bare-lf": LENGTH + b"X-A: b\nTransfer-Encoding: chunked\r\n",
    "bare-cr": LENGTH + b"X-A: b\rTransfer-Encoding: chunked\r\n",
    "bare-lf-ends-head": LENGTH + b"X-A: b\n\n",
    "nul-in-value": LENGTH + b"X-A: b\x00c\r\n",
    "nul-in-name": LENGTH + b"X-\x00A: b\r\n",
    "delete-in-name": LENGTH + b"X-\x7f: b\r\n",
    "control-in-value": LENGTH + b"X-A: \x01\r\n",
    "latin-1-in-name": LENGTH + b"X-\xe9: b\r\n",
    "no-colon": LENGTH + b"X-A\r\n",
    "no-name": LENGTH + b": b\r\n",
    "brackets-in-name": LENGTH + b"X[A]: b\r\n",
    "space-in-name": LENGTH + b"X A: b\r\n",
    "cr-cr-lf": LENGTH[:-2] + b"\r\r\n",
}
CHUNK_SHAPES = {
    "minus": b"-%x\r\n%b\r\n0\r\n\r\n",
    "plus": b"+%x\r\n%b\r\n0\r\n\r\n",
    "hexadecimal-prefix": b"0x%x\r\n%b\r\n0\r\n\r\n",
    "leading-space": b" %x\r\n%b\r\n0\r\n\r\n",
    "trailing-space": b"%x \r\n%b\r\n0\r\n\r\n",
    "underscore": b"0_%x\r\n%b\r\n0\r\n\r\n",
    "bare-lf-after-size": b"%x\n%b\r\n0\r\n\r\n",
    "bare-cr-after-size": b"%x\r%b\r\n0\r\n\r\n",
    "bare-lf-after-data": b"%x\r\n%b\n0\r\n\r\n",
    "nothing-after-data": b"%x\r\n%b0\r\n\r\n",
    "more-data-than-said": b"%x\r\n%bxx\r\n0\r\n\r\n",
    "bare-lf-after-last": b"%x\r\n%b\r\n0\n\n",
    "cr-in-extension": b"%x;a\rb\r\n%b\r\n0\r\n\r\n",
    "lf-in-extension": b"%x;a\nb\r\n%b\r\n0\r\n\r\n",
    "nul-in-extension": b"%x;\x00\r\n%b\r\n0\r\n\r\n",
    "comma-for-semicolon": b"%x,a\r\n%b\r\n0\r\n\r\n",
}
SIZES = {
    "empty": b"",
    "text": b"zz",
    "17-digits": b"1%016x" % len(BODY),
    "400-digits": b"f" * 400,
    "latin-1": b"\xb2",
}


def refused(edge: Edge, attack: bytes) -> None:
    """The one answer is an error, the connection ends, and the request behind the attack was never one."""
    behind = f"smuggled {next(_numbers)}"
    with edge.connect() as connection:
        connection.send(attack + completion(behind))
        answer = connection.answer("POST")
        assert answer.status in (400, 413, 431), answer
        assert answer.error() and answer.closes
        assert connection.has_ended()
    assert edge.serves()  # whatever came before it has reached the workers by now
    assert not edge.workers.of(behind) and not edge.workers.of("attack")


@pytest.mark.parametrize("attack", TWO_FRAMINGS.values(), ids=TWO_FRAMINGS)
def test_a_message_with_two_framings_is_refused(edge: Edge, attack: bytes) -> None:
    refused(edge, attack)


@pytest.mark.parametrize("value", LENGTHS.values(), ids=LENGTHS)
def test_a_content_length_that_is_no_plain_number_is_refused(edge: Edge, value: bytes) -> None:
    refused(edge, framed(b"Content-Length: %b\r\n" % value, PLAIN))


@pytest.mark.parametrize("value", CODINGS.values(), ids=CODINGS)
def test_a_transfer_coding_other_than_chunked_is_refused(edge: Edge, value: bytes) -> None:
    refused(edge, framed(b"Transfer-Encoding: %b\r\n" % value))


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_field_that_parsers_read_differently_is_refused(edge: Edge, fields: bytes) -> None:
    refused(edge, framed(fields, PLAIN))


@pytest.mark.parametrize("shape", CHUNK_SHAPES.values(), ids=CHUNK_SHAPES)
def test_a_chunk_that_parsers_read_differently_is_refused(edge: Edge, shape: bytes) -> None:
    refused(edge, framed(CHUNKS, shape % (len(BODY), BODY)))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_chunk_size_that_is_no_bounded_number_is_refused(edge: Edge, size: bytes) -> None:
    refused(edge, framed(CHUNKS, b"%b\r\n%b\r\n0\r\n\r\n" % (size, BODY)))


def test_chunk_extensions_without_end_are_refused(edge: Edge) -> None:
    refused(edge, framed(CHUNKS, b"%x;%b\r\n%b\r\n0\r\n\r\n" % (len(BODY), b"a" * 200_000, BODY)))


def test_chunk_extensions_cannot_outweigh_their_data_without_bound(edge: Edge) -> None:
    """A byte per chunk, each with a long extension: work without end for a body that is never too large."""
    chunk = b"1;%b\r\n \r\n" % (b"a" * 2000)
    with edge.connect() as connection:
        assert connection.send(START + CHUNKS + b"\r\n")
        connection.send(chunk * 4000)
        assert connection.answer("POST").status in (400, 413, 431)
        assert connection.has_ended()


ACCEPTED = {
    "length": framed(LENGTH, PLAIN),
    # a tab behind the length is right, too (RFC 9110 5.5), but httptools before 0.8 refuses it
    "length-with-spaces": framed(b"Content-Length: \t %d  \r\n" % len(BODY), PLAIN),
    "chunked": framed(CHUNKS),
    "chunked-in-capitals": framed(b"TRANSFER-ENCODING: CHUNKED\r\n"),
    "chunks-of-a-byte": framed(CHUNKS, chunked(*(BODY[at : at + 1] for at in range(len(BODY))))),
    "size-in-capitals": framed(CHUNKS, b"%X\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "size-with-zeros": framed(CHUNKS, b"000%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "short-extension": framed(CHUNKS, b"%x;a=b\r\n%b\r\n0;c\r\n\r\n" % (len(BODY), BODY)),
    "quoted-extension": framed(CHUNKS, b'%x;a="b c"\r\n%b\r\n0\r\n\r\n' % (len(BODY), BODY)),
}


@pytest.mark.parametrize("bytewise", [False, True], ids=["at-once", "bytewise"])
@pytest.mark.parametrize("message", ACCEPTED.values(), ids=ACCEPTED)
def test_a_message_that_is_framed_properly_is_served_and_so_is_the_next(
    edge: Edge, message: bytes, bytewise: bool
) -> None:
    with edge.connect() as connection:
        (connection.send_bytewise if bytewise else connection.send)(message)
        assert connection.answer("POST").status == 200
        connection.send(completion("next"))
        assert connection.answer("POST").status == 200
    assert len(edge.workers.of("attack")) == len(edge.workers.of("next")) == 2  # to a prefiller and a decoder


def test_the_same_length_twice_is_one_request_or_none(edge: Edge) -> None:
    """RFC 9112, 6.3: may be taken for one; never for two requests."""
    with edge.connect() as connection:
        connection.send(framed(LENGTH + LENGTH, PLAIN))
        connection.half_close()
        assert connection.answer("POST").status in (200, 400)
        assert connection.has_ended()


def test_a_body_that_a_route_does_not_read_is_not_the_next_request(edge: Edge) -> None:
    """To a route that takes no body, and to one that does not exist."""
    for target in ("/health", "/nowhere", "/metrics"):
        with edge.connect() as connection:
            connection.send(request("GET", target, body=completion("hidden")) + completion("next"))
            assert connection.answer().status in (200, 400, 404)
            with suppress(Ended):  # hanging up on such a client is one way
                assert connection.answer("POST").status == 200
    assert not edge.workers.of("hidden")


def test_a_message_cut_off_anywhere_is_no_request(edge: Edge) -> None:
    message = completion("cut")
    for length in range(1, len(message), 7):
        with edge.connect() as connection:
            connection.send(message[:length])
            connection.half_close()
            rest = connection.rest()
            assert rest == b"" or rest.startswith(b"HTTP/1.1 400 "), (length, rest)
    block_until(lambda: not edge.held(), "cut requests are held")
    assert not edge.workers.of("cut")


def test_bytes_behind_an_answer_that_closes_are_no_request(edge: Edge) -> None:
    with edge.connect() as connection:
        connection.send(completion("first", "Connection: close") + completion("behind"))
        assert connection.answer("POST").closes
        assert connection.has_ended()
    assert edge.serves() and not edge.workers.of("behind")


def test_an_invalid_request_on_one_connection_does_not_affect_another(edge: Edge) -> None:
    with edge.connect() as honest:
        honest.send(completion("honest")[:60])
        refused(edge, TWO_FRAMINGS["length-and-chunked"])
        honest.send(completion("honest")[60:])
        assert honest.answer("POST").status == 200

"""Clients that send slowly: a request has one deadline, from its first byte to its last; and clients that read slowly.

The times are short ones (`conftest.py`); what is slower than that is met by order, not by a watch: who began first has
to be turned out first, however little is still missing.
"""

import pytest

from tests.security.conftest import SHORT_S
from tests.security.deployment import FLOOD, Edge
from tests.security.wire import Connection, Ended, body, completion, first_heard, request
from tests.waiting import block_pace, block_until

pytestmark = pytest.mark.e2e

DRIP_S = SHORT_S / 10
ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/instances/add", "/health", "/nowhere")
LARGE = "/dashboard/assets/uPlot.iife.min.js"  # 50 kB; /metrics is made only a few times per second
LATE = b"x" * 100  # of such a rest, at one byte per `DRIP_S`, little has come when the time is up


def head_of(target: str, length: int = 100, *headers: str) -> bytes:
    """A head that promises a body."""
    return request(
        "GET" if target == "/health" else "POST",
        target,
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *headers,
    )


def turned_out(connection: Connection) -> None:
    """The client is told 408 and hung up on."""
    answer = connection.answer("POST")
    assert answer.status == 408, answer
    assert answer.error() and answer.closes
    assert connection.has_ended()


def test_a_silent_connection_is_closed(hasty: Edge) -> None:
    with hasty.connect() as connection:
        rest = connection.rest()
        assert rest == b"" or rest.startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_is_silent_after_an_answer_is_closed_without_a_response(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(request("GET", "/health"))
        assert connection.answer().status == 200
        assert connection.has_ended()


@pytest.mark.parametrize("target", ROUTES)
def test_a_body_that_never_comes_is_a_408_on_every_route(hasty: Edge, target: str) -> None:
    """Where the route needs the body to answer; where it does not, an answer may come at once, and then the end."""
    with hasty.connect() as connection:
        connection.send(head_of(target))
        answer = connection.answer("POST")
        assert answer.status == 408 or target in ("/health", "/nowhere", "/instances/add"), answer
        assert connection.has_ended()


def test_a_chunked_body_that_never_arrives_is_a_408(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(request("POST", "/v1/completions", "Transfer-Encoding: chunked"))
        turned_out(connection)


def test_a_head_that_stops_is_a_408(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(completion()[:40])
        turned_out(connection)


def test_a_head_sent_byte_by_byte_is_a_408(hasty: Edge) -> None:
    with hasty.connect() as connection:
        assert connection.send_until_answered(b"GET /health?" + LATE, DRIP_S)
        turned_out(connection)


def test_a_body_sent_byte_by_byte_is_a_408(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(head_of("/v1/completions"))
        assert connection.send_until_answered(LATE, DRIP_S)
        turned_out(connection)


def test_chunks_sent_byte_by_byte_are_a_408(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(request("POST", "/v1/completions", "Transfer-Encoding: chunked"))
        assert connection.send_until_answered(b"1\r\nx\r\n" * 20, DRIP_S)
        turned_out(connection)


def test_a_chunk_of_18_exabytes_is_not_waited_for(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(request("POST", "/v1/completions", "Transfer-Encoding: chunked") + b"f" * 16 + b"\r\nxx")
        assert connection.answer("POST").status in (400, 408, 413)
        assert connection.has_ended()


def test_trailers_sent_byte_by_byte_are_a_408(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(request("POST", "/v1/completions", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n")
        assert connection.send_until_answered(b"x: y\r\n" * 20, DRIP_S)
        turned_out(connection)


def test_slowly_sent_blank_lines_do_not_extend_the_deadline(hasty: Edge) -> None:
    with hasty.connect() as connection:
        assert connection.send_until_answered(b"\r\n" * 50, DRIP_S)
        rest = connection.rest()
        assert rest == b"" or rest.startswith(b"HTTP/1.1 4"), rest


@pytest.mark.parametrize("target", ["/v1/completions", "/tokenize"])
def test_head_and_body_share_one_deadline_from_the_first_byte(hasty: Edge, target: str) -> None:
    """The younger client begins while the elder's head is under way: a body with time of its own would be the last."""
    with hasty.connect() as elder:
        head = head_of(target)
        elder.send_until_answered(head[:3], DRIP_S)  # some 0.3 of the time
        assert hasty.get("/health").status == 200  # these bytes have been read
        with hasty.connect() as younger:
            younger.send(head)
            elder.send_until_answered(head[3:6], DRIP_S)
            elder.send(head[6:])
            assert elder in first_heard(elder, younger)
            turned_out(elder)
            turned_out(younger)


def test_a_later_request_of_a_connection_has_a_deadline_too(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(request("GET", "/health"))
        assert connection.answer().status == 200
        assert connection.send_until_answered(b"GET /health?" + LATE, DRIP_S)
        turned_out(connection)


def test_a_pipelined_request_that_stops_has_a_deadline_too(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(request("GET", "/health") + completion()[:-5])
        assert connection.answer().status == 200
        turned_out(connection)


def test_a_body_that_expects_100_continue_and_never_arrives_is_a_408(hasty: Edge) -> None:
    with hasty.connect() as connection:
        connection.send(head_of("/v1/completions", 100, "Expect: 100-continue"))
        turned_out(connection)


def test_slow_bodies_do_not_block_other_clients(hasty: Edge) -> None:
    """230 heads without a body once held every place of the router for ever."""
    attackers = []
    for _ in range(230):
        attackers.append(hasty.connect())
        attackers[-1].send(head_of("/v1/completions", 1000))  # who says nothing for long is not even told 408
    for _ in range(5):
        assert hasty.serves()
    for attacker in attackers:
        turned_out(attacker)
        attacker.close()


def test_a_client_that_pauses_between_its_requests_is_not_disconnected(hasty: Edge) -> None:
    with hasty.connect() as connection:
        for _ in range(5):  # together longer than a request may take
            block_pace(SHORT_S / 4)
            connection.send(completion())
            assert connection.answer("POST").status == 200


def test_an_answer_may_take_longer_than_a_request(hasty: Edge) -> None:
    """The deadline ends with the request's last byte."""
    with hasty.connect() as connection:
        connection.send(completion("hold", stream=True))
        assert connection.head()[0] == 200
        with hasty.connect() as late:
            late.send(head_of("/v1/completions", 1000))
            turned_out(late)  # it came after the other one, and its time is up
        assert not connection.hears_end()


# -- clients that read slowly


def flood(edge: Edge) -> Connection:
    """A connection by which 400 MB are asked for."""
    connection = edge.connect(receive_buffer_bytes=4096)
    connection.send(completion(FLOOD, stream=True, max_tokens=100_000))
    return connection


def test_a_client_that_reads_nothing_is_disconnected(hasty: Edge) -> None:
    with flood(hasty):
        block_until(lambda: hasty.workers.left, "the worker's stream goes on")
        block_until(lambda: not hasty.held(), "the request is held")


def test_a_client_that_reads_a_byte_now_and_then_is_disconnected(hasty: Edge) -> None:
    """Any byte is no progress: such a client would hold its decode slot for years."""
    with flood(hasty) as connection:
        block_until(lambda: connection.reads_a_byte(DRIP_S) and hasty.workers.left, "the worker's stream goes on")


def test_a_client_that_reads_no_unstreamed_answer_is_disconnected(hasty: Edge) -> None:
    """Of a route that streams nothing: as many as the sockets' buffers do not take."""
    with hasty.connect(receive_buffer_bytes=4096) as connection:
        connection.send_until_stuck(request("GET", LARGE), 8 * 2**20)
        block_until(lambda: hasty.clients() == 0, "the connection is kept")
        with pytest.raises(Ended):
            while True:
                connection.answer()


def test_a_client_that_reads_steadily_gets_all_of_a_long_answer(edge: Edge) -> None:
    tokens = 2000
    with edge.connect() as connection:
        connection.send(completion(FLOOD, stream=True, max_tokens=tokens))
        assert connection.head()[0] == 200
        text = b"".join(connection.events())
    assert text.endswith(b"data: [DONE]\n\n") and text.count(b"data: ") == tokens + 1


def test_a_body_that_arrives_in_pieces_in_time_is_served(edge: Edge) -> None:
    content = body("pieces" * 100)
    with edge.connect() as connection:
        connection.send(head_of("/v1/completions", len(content)))
        for at in range(0, len(content), 100):
            connection.send(content[at : at + 100])
            block_pace(0.005)
        assert connection.answer("POST").status == 200

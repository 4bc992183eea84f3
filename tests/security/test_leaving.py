"""Clients that leave, in every way and at every point: nothing stays behind, and nothing is logged about it."""

import pytest

from tests.security.deployment import HOLD, Edge
from tests.security.wire import Connection, body, chunked, completion, request
from tests.waiting import block_until

pytestmark = pytest.mark.e2e

LEAVE = {"close": Connection.close, "reset": Connection.reset}


@pytest.mark.parametrize(
    "data", [request("GET", "/metrics"), request("POST", "/tokenize", body=body())], ids=["get", "post"]
)
def test_a_client_that_half_closes_after_its_request_gets_the_whole_answer(edge: Edge, data: bytes) -> None:
    with edge.connect() as connection:
        connection.send(data)
        connection.half_close()
        assert connection.answer("POST").status == 200
        assert connection.has_ended()


def test_a_client_that_half_closes_behind_pipelined_requests_gets_all_answers(edge: Edge) -> None:
    with edge.connect() as connection:
        connection.send(request("GET", "/health") * 50)
        connection.half_close()
        assert [answer.status for answer in connection.answers(50)] == [200] * 50
        assert connection.has_ended()


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"\0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (request("FROBNICATE", "/health"), 405),
        (request("POST", "/v1/completions", "Content-Length: 99999999999") + b"{}", 413),
        (request("POST", "/v1/completions", "Transfer-Encoding: chunked") + b"x\r\n", 400),
    ],
    ids=["bytes", "no-host", "method", "too-large", "chunks"],
)
def test_a_client_that_half_closes_after_a_refused_request_is_refused_once(
    edge: Edge, behind: bytes, status: int
) -> None:
    """It once kept the router busy with nothing else, for ever."""
    with edge.connect() as connection:
        connection.send(request("GET", "/v1/models") + behind)  # a worker is asked, and meanwhile the end comes
        connection.half_close()
        assert [connection.answer().status for _ in range(2)] == [200, status]
        assert connection.has_ended()
    assert edge.serves()


def test_a_client_that_closes_its_sending_side_cancels_its_completion(edge: Edge) -> None:
    """It is all that is seen of an SDK that gives up; a slot is too dear to find out by writing to nobody."""
    edge.new_log_lines()
    with edge.connect() as connection:
        connection.send(completion(HOLD, stream=True))
        assert connection.head()[0] == 200
        connection.half_close()
        block_until(lambda: edge.workers.left == 1, "the worker's stream goes on")
        assert b"[DONE]" not in connection.rest()
    assert edge.new_log_lines() == []


def test_a_client_that_half_closes_behind_a_large_chunked_body_gets_its_answer(edge: Edge) -> None:
    with edge.connect() as connection:
        head = request("POST", "/tokenize", "Content-Type: application/json", "Transfer-Encoding: chunked")
        connection.send(head + chunked(body("x" * 200_000)))
        connection.half_close()
        assert connection.answer("POST").status == 200
        assert connection.has_ended()


def test_an_end_of_input_cancels_a_pipelined_completion_that_has_not_begun(edge: Edge) -> None:
    edge.new_log_lines()
    with edge.connect() as connection:
        connection.send(request("GET", "/v1/models") + completion(HOLD, stream=True))  # a worker is asked for the first
        connection.half_close()
        assert connection.answer().status == 200
        assert b"[DONE]" not in connection.rest()
    assert edge.new_log_lines() == []


@pytest.mark.parametrize("half", [completion()[:30], completion()[:-5]], ids=["head", "body"])
def test_a_client_that_half_closes_within_its_request_is_hung_up_on(edge: Edge, half: bytes) -> None:
    with edge.connect() as connection:
        connection.send(half)
        connection.half_close()
        rest = connection.rest()
        assert rest == b"" or rest.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
@pytest.mark.parametrize("sent", [0, 1, 30, -5], ids=["nothing", "a-byte", "half-a-head", "half-a-body"])
def test_a_client_that_leaves_within_its_request_is_forgotten(edge: Edge, sent: int, leave: object) -> None:
    edge.new_log_lines()
    for _ in range(20):
        connection = edge.connect()
        connection.send(completion("unsaid")[:sent])
        leave(connection)  # type: ignore[operator]
    block_until(lambda: edge.clients() == 0, "connections are kept")
    assert not edge.workers.of("unsaid") and edge.new_log_lines() == []


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_before_its_answer_is_forgotten(edge: Edge, stream: bool, leave: object) -> None:
    edge.new_log_lines()
    for _ in range(20):
        connection = edge.connect()
        connection.send(completion("unheard", stream=stream))
        leave(connection)  # type: ignore[operator]
    block_until(lambda: not edge.held(), "requests outlive their clients")
    assert edge.new_log_lines() == []


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
def test_a_client_that_leaves_its_stream_frees_the_worker(edge: Edge, leave: object) -> None:
    edge.new_log_lines()
    connections = [edge.connect() for _ in range(10)]
    for connection in connections:
        connection.send(completion(HOLD, stream=True))
        assert connection.head()[0] == 200
    for connection in connections:
        leave(connection)  # type: ignore[operator]
    block_until(lambda: edge.workers.left == 10, "workers' streams go on")
    assert edge.new_log_lines() == []


def test_two_hundred_clients_that_come_and_go_leave_no_socket_and_no_memory(edge: Edge) -> None:
    for _ in range(50):
        edge.connect().reset()
    before = edge.rss_bytes()
    for number in range(200):
        connection = edge.connect()
        connection.send(completion("churn", stream=bool(number % 2))[: None if number % 3 else 50])
        (connection.reset if number % 5 else connection.close)()
    block_until(lambda: edge.clients() == 0, "connections are kept")
    block_until(lambda: not edge.held(), "requests outlive their clients")
    assert edge.rss_bytes() - before < 16 * 2**20


def test_bytes_after_a_refusal_reach_no_worker(edge: Edge) -> None:
    with edge.connect() as connection:
        connection.send(request("POST", "/v1/completions", f"Content-Length: {2**30}"))
        assert connection.answer("POST").status == 413
        connection.send(body("late") * 1000)
    assert edge.serves() and not edge.workers.of("late")

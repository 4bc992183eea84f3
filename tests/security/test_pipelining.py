"""Requests that are sent before the answers to earlier ones: in order, one at a time, and in a bounded memory."""

import pytest

from tests.security.deployment import HOLD, Edge
from tests.security.wire import Ended, completion, request
from tests.waiting import block_until

pytestmark = pytest.mark.e2e

MIB = 2**20
HEALTH = request("GET", "/health")


def test_pipelined_requests_are_answered_in_order(edge: Edge) -> None:
    targets = ["/health", "/nowhere", "/ready", "/v1/completions", "/healthcheck"] * 20
    with edge.connect() as connection:
        connection.send(b"".join(request("GET", target) for target in targets))
        statuses = [answer.status for answer in connection.answers(len(targets))]
    assert statuses == [200, 404, 200, 405, 200] * 20


def test_pipelined_completions_are_answered_in_order(edge: Edge) -> None:
    names = [f"request-{number}" for number in range(20)]
    with edge.connect() as connection:
        connection.send(b"".join(completion("a", f"X-Request-Id: {name}") for name in names))
        assert [connection.answer("POST").headers["x-request-id"] for _ in names] == names


def test_pipelined_completions_of_one_client_run_one_at_a_time(edge: Edge) -> None:
    """A connection is not a way around a fair share."""
    with edge.connect() as connection:
        connection.send(completion(HOLD, stream=True) + completion("waits") * 50)
        assert connection.head()[0] == 200
        block_until(lambda: edge.held(), "the first request runs")
        assert edge.serves()
        assert edge.held()["exchanges"] == 1
        assert not edge.workers.of("waits")
    block_until(lambda: not edge.held(), "the first request runs on")
    assert edge.serves() and not edge.workers.of("waits")


def test_pipelined_requests_are_not_read_while_the_client_reads_no_answers(edge: Edge) -> None:
    """604,000 of them once took 1.3 GB."""
    before = edge.rss_bytes()
    with edge.connect(receive_buffer_bytes=4096) as connection:
        sent = connection.send_until_stuck(HEALTH * 1000, 128 * MIB)
        assert sent < 32 * MIB, "reading does not pause"
        assert edge.rss_bytes() - before < 16 * MIB
        assert edge.serves()


def test_endless_pipelined_requests_after_a_completion_take_no_memory(edge: Edge) -> None:
    """Nor do they hide that their client leaves: they are read, and dropped."""
    before = edge.rss_bytes()
    with edge.connect() as connection:
        connection.send(completion(HOLD, stream=True))
        assert connection.head()[0] == 200
        connection.send_until_stuck(HEALTH * 1000, 64 * MIB)
        assert edge.rss_bytes() - before < 16 * MIB
        assert edge.serves()
    block_until(lambda: not edge.held(), "the request outlives its client")


def test_a_body_pipelined_during_an_answer_is_not_buffered(edge: Edge) -> None:
    before = edge.rss_bytes()
    with edge.connect() as connection:
        connection.send(completion(HOLD, stream=True))
        assert connection.head()[0] == 200
        connection.send(request("POST", "/v1/completions", "Transfer-Encoding: chunked"))
        connection.send_until_stuck(b"10000\r\n" + b"x" * 65536 + b"\r\n", 64 * MIB)
        assert edge.rss_bytes() - before < 16 * MIB


def test_ten_thousand_pipelined_requests_are_all_answered(edge: Edge) -> None:
    """Reading goes on as answers leave."""
    count, batch = 10_000, 500
    with edge.connect() as connection:
        for _ in range(0, count, batch):
            connection.send(HEALTH * batch)
            assert all(answer.status == 200 for answer in connection.answers(batch))


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_a_client_that_leaves_between_pipelined_requests_logs_nothing(edge: Edge, leave: str) -> None:
    edge.new_log_lines()
    for _ in range(10):
        connection = edge.connect()
        connection.send((HEALTH + completion("pipelined") + request("POST", "/instances/nowhere", body=b"{}")) * 30)
        assert connection.answer().status == 200
        getattr(connection, leave)()
    assert edge.serves()
    block_until(lambda: not edge.held(), "requests outlive their client")
    assert edge.new_log_lines() == []


def test_a_client_that_leaves_during_a_stream_with_pipelined_requests_frees_the_worker(edge: Edge) -> None:
    connection = edge.connect()
    connection.send(completion(HOLD, stream=True) + HEALTH * 100)
    assert connection.head()[0] == 200
    connection.close()
    block_until(lambda: edge.workers.left == 1, "the worker's stream goes on")
    assert edge.new_log_lines() == []


def test_a_refused_request_ends_the_pipeline(edge: Edge) -> None:
    with edge.connect() as connection:
        connection.send(HEALTH + b"GET / HTTP/9.9\r\n\r\n" + completion("behind"))
        assert connection.answer().status == 200
        assert connection.answer().status in (400, 505)
        with pytest.raises(Ended):
            connection.answer()
    assert edge.serves() and not edge.workers.of("behind")


def test_a_request_with_a_wrong_body_does_not_end_the_pipeline(edge: Edge) -> None:
    """An answer about the content says nothing of the framing."""
    with edge.connect() as connection:
        connection.send(request("POST", "/v1/completions", body=b"{") + completion())
        assert connection.answer("POST").status == 400
        assert connection.answer("POST").status == 200

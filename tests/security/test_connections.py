"""Too many connections: the limit holds, an operator still sees the router, and who says nothing gives way."""

import pytest

from tests.security.conftest import LIMITS
from tests.security.deployment import HOLD, Edge
from tests.security.wire import Connection, completion, request
from tests.waiting import block_until

pytestmark = pytest.mark.e2e

MOST = LIMITS["narrow"]["max_connections"]


def busy(edge: Edge) -> list[Connection]:
    """As many connections as there may be, each with a stream under way.

    One after the other: who has said nothing yet would give way to the next, or be closed if this process is late.
    """
    connections = []
    for number in range(MOST):
        connection = edge.connect(source=f"127.0.0.{2 + number % 3}")
        connection.send(completion(HOLD, stream=True))
        assert connection.head()[0] == 200
        connections.append(connection)
    return connections


def test_above_max_connections_a_request_gets_503_with_retry_after(narrow: Edge) -> None:
    kept = busy(narrow)
    answer = narrow.ask(completion("one too many"))
    assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
    assert answer.error() and answer.closes
    assert not narrow.workers.of("one too many")
    assert not any(connection.hears_end() for connection in kept)
    for connection in kept:
        connection.close()
    block_until(narrow.serves, "the limit stays although the clients have gone")


def test_at_max_connections_operators_routes_are_still_served(narrow: Edge) -> None:
    kept = busy(narrow)
    for target in ("/health", "/ready", "/metrics"):
        assert narrow.get(target).status == 200
    for connection in kept:
        connection.close()


def test_at_max_connections_no_body_is_read(narrow: Edge) -> None:
    kept = busy(narrow)
    with narrow.connect() as connection:
        connection.send(request("POST", "/v1/completions", f"Content-Length: {2**20}"))
        assert connection.answer("POST").status == 503
        assert connection.has_ended()
    for connection in kept:
        connection.close()


def test_idle_connections_give_way_to_new_ones(narrow: Edge) -> None:
    for _ in range(3 * MOST):
        connection = narrow.connect()
        connection.send(request("GET", "/health"))
        assert connection.answer().status == 200
        assert narrow.serves()


def test_silent_connections_do_not_block_new_clients(narrow: Edge) -> None:
    """Three times as many as fit, from several addresses, some with half a request."""
    silent = [narrow.connect(source=f"127.0.0.{2 + number % 5}") for number in range(3 * MOST)]
    for connection in silent[::2]:
        connection.send(completion()[:50])
    for _ in range(MOST):
        assert narrow.serves()
    for connection in silent:
        connection.rest()
        connection.close()


def test_many_times_max_connections_does_no_harm(narrow: Edge) -> None:
    for _ in range(10):
        crowd = [narrow.connect() for _ in range(5 * MOST)]
        assert narrow.get("/health").status == 200
        for number, connection in enumerate(crowd):
            (connection.reset if number % 2 else connection.close)()
    block_until(lambda: narrow.clients() == 0, "connections are kept")
    block_until(narrow.serves, "the limit stays although the clients have gone")

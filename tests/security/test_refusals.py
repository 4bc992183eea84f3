"""What is refused by the edge itself: under the client's own id where it can be read, counted, and bounded."""

import re

import pytest

from tests.security.deployment import Edge
from tests.security.wire import completion, request
from tests.waiting import block_until

pytestmark = pytest.mark.e2e

MINE = "X-Request-Id: mine-7"
HEAD_END = b"\r\n\r\n"
REFUSED = {
    "malformed": (400, b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\nX-Request-Id: mine-7\r\n\r\n"),
    "method": (405, request("FROBNICATE", "/health", MINE)),
    "body_too_large": (413, request("POST", "/v1/completions", MINE, "Content-Length: 99999999999")),
    "line_too_long": (414, request("GET", "/" + "a" * 9000, MINE)),
    "expectation": (417, request("POST", "/v1/completions", MINE, "Expect: more")),
    "head_too_large": (431, request("GET", "/health", MINE, *(f"X-{i}: y" for i in range(200)))),
    "version": (505, request("GET", "/health", MINE).replace(b"HTTP/1.1", b"HTTP/3.7")),
}


def counted(edge: Edge, reason: str) -> float:
    found = re.search(
        rf'^balanceroute_edge_refusals_total\{{reason="{reason}"\}} (\S+)', edge.get("/metrics").body.decode(), re.M
    )
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_has_the_clients_id_a_log_line_and_a_count(edge: Edge, reason: str) -> None:
    status, sent = REFUSED[reason]
    before, lines = counted(edge, reason), edge.log().count('"mine-7')
    answer = edge.ask(sent)
    assert (answer.status, answer.headers["x-request-id"]) == (status, "mine-7")
    assert answer.error()
    assert counted(edge, reason) == before + 1
    block_until(lambda: edge.log().count('"mine-7') > lines, "no line")


def test_a_request_that_arrives_too_slowly_is_counted_and_answered_with_its_id(hasty: Edge) -> None:
    before = counted(hasty, "slow")
    with hasty.connect() as connection:
        connection.send(completion("slow", MINE).partition(HEAD_END)[0] + b"\r\nX-Rest: ")
        answer = connection.answer("POST")
    assert (answer.status, answer.headers["x-request-id"]) == (408, "mine-7")
    assert counted(hasty, "slow") == before + 1


@pytest.mark.parametrize(
    "lines",
    [
        b"X-Request-Id: one\r\nX-Request-Id: two\r\n",
        b"X-Request-Id:\r\n",
        b"X-Request-Id: \x01\x7f<>\r\n",
        b"Y: a\nX-Request-Id: smuggled\r\n",
    ],
    ids=["two", "empty", "odd", "lone-lf"],
)
def test_an_id_that_cannot_be_read_is_replaced_by_one_of_ours(edge: Edge, lines: bytes) -> None:
    answer = edge.ask(b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n" + lines + b"\r\n")
    assert answer.status == 400 and re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])


def test_a_client_that_leaves_inside_its_request_is_no_refusal(edge: Edge) -> None:
    before = counted(edge, "malformed")
    with edge.connect() as connection:
        connection.send(completion()[:-3])
        connection.half_close()
        connection.rest()
    assert counted(edge, "malformed") == before


@pytest.mark.parametrize("behind", ["refusal", "completion"])
def test_unwanted_input_is_read_only_up_to_a_limit(edge: Edge, behind: str) -> None:
    """A refused body, or what is pipelined behind a completion, is read and dropped: for so long, and so much of it."""
    with edge.connect() as connection:
        if behind == "refusal":
            connection.send(request("POST", "/v1/completions", "Content-Length: 9999999999"))
        else:
            connection.send(completion("hold", stream=True))
            assert connection.head()[0] == 200
        sent = 0
        while connection.send(b"x" * 2**20) and sent < 2**29:
            sent += 2**20
        assert sent < 2**28
    block_until(lambda: not edge.held(), "the completion is held")

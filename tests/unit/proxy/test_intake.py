"""What is read of a request before anything is decided."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.intake import ClientGone, read_body, read_head


def receiving(*messages: dict[str, Any], forever: bool = False) -> Callable[[], Awaitable[dict[str, Any]]]:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left and forever:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_only_identity_and_trace_headers_are_forwarded() -> None:
    headers = [
        (b"authorization", b"Bearer a"),
        (b"traceparent", b"00-1"),
        (b"connection", b"close"),
        (b"transfer-encoding", b"chunked"),
        (b"x-data-parallel-rank", b"3"),
        (b"cookie", b"c"),
        (b"accept-encoding", b"gzip"),
    ]
    head = read_head(headers, None, None)
    assert head.forwarded == [(b"authorization", b"Bearer a"), (b"traceparent", b"00-1")]


def test_the_workers_key_is_used_only_without_a_client_s_own() -> None:
    assert read_head([], None, b"k").forwarded == [(b"authorization", b"Bearer k")]
    own = [(b"authorization", b"Bearer mine")]
    assert read_head(own, None, b"k").forwarded == own


def test_a_client_s_id_is_the_base_of_ours_without_what_could_break_a_header_or_a_log() -> None:
    head = read_head([(b"x-request-id", b'a/b\x7f"c d-' + b"e" * 200)], None, None)
    assert head.client_id is not None and head.client_id.startswith("abcd-eee")
    assert len(head.client_id) <= 96
    assert head.request_id.startswith(f"{head.client_id}-")


def test_two_requests_with_one_client_id_have_different_ids() -> None:
    headers = [(b"x-request-id", b"same")]
    assert read_head(headers, None, None).request_id != read_head(headers, None, None).request_id


@pytest.mark.parametrize("value", [b"0", b"-1", b"soon", b"nan", b"inf", b""])
def test_a_deadline_that_is_no_positive_number_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_head([(b"x-request-timeout", value)], None, None)
    assert refused.value.param == "X-Request-Timeout"


def test_a_deadline_and_the_predictor_s_key_are_read() -> None:
    head = read_head([(b"x-request-timeout", b"2.5"), (b"x-kind", b"summary")], b"x-kind", None)
    assert head.timeout_s == 2.5 and head.key == "summary"
    assert read_head([], b"x-kind", None).timeout_s == math.inf


def test_a_body_in_parts_is_joined() -> None:
    receive = receiving(part(b"ab", True), part(b"", True), part(b"c"))
    assert asyncio.run(read_body(receive, 10, 5.0)) == b"abc"


@pytest.mark.parametrize(
    ("messages", "length"),
    [((), 11), ((part(b"x" * 11),), None), ((part(b"x" * 6, True), part(b"x" * 6, True)), None)],
    ids=["announced", "whole", "in-parts"],
)
def test_a_body_over_the_limit_is_413(messages: tuple[dict[str, Any], ...], length: int | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(read_body(receiving(*messages), 10, 5.0, length))
    assert refused.value.status == 413


def test_a_body_that_does_not_come_is_408() -> None:
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(read_body(receiving(part(b"x", True), forever=True), 10, 0.01))
    assert refused.value.status == 408


@pytest.mark.parametrize("before", [[], [part(b"x", True)]], ids=["at-once", "half-way"])
def test_a_client_that_leaves_while_sending_is_gone(before: list[dict[str, Any]]) -> None:
    with pytest.raises(ClientGone):
        asyncio.run(read_body(receiving(*before, {"type": "http.disconnect"}), 10, 5.0))

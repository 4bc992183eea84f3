"""Errors as a client sees them."""

import orjson
import pytest

from balanceroute.errors import (
    AccessDenied,
    BadUpstreamReply,
    BalanceRouteError,
    ConnectFailed,
    DecodersLost,
    Draining,
    InvalidRequest,
    NoHealthyWorkers,
    QueueFull,
    QueueTimeout,
    UpstreamStatus,
    UpstreamTimeout,
)
from balanceroute.proxy.wire.responses import body_of, error_event, extra_headers, status_of

AT = {"worker": "d0", "tier": "decode"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("x"), 400),
        (InvalidRequest("x", status=413), 413),
        (QueueFull("x"), 429),
        (QueueTimeout("x"), 503),
        (NoHealthyWorkers("x"), 503),
        (Draining("x"), 503),
        (ConnectFailed("x", **AT), 502),
        (BadUpstreamReply("x", **AT), 502),
        (UpstreamTimeout("x", **AT), 504),
        (UpstreamStatus("x", status=418, body=b"teapot", **AT), 418),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_status_and_an_openai_body(error: BalanceRouteError, status: int) -> None:
    assert status_of(error) == status
    error_body = orjson.loads(body_of(error))["error"]
    assert set(error_body) == {"message", "type", "param", "code"}
    assert error_body["code"] == status and error_body["message"]


def test_a_workers_own_error_body_is_passed_on_unchanged() -> None:
    body = b'{"error":{"message":"no such model","code":404}}'
    assert body_of(UpstreamStatus("x", status=404, body=body, **AT)) == body


def test_a_workers_html_is_wrapped_in_an_error_body() -> None:
    body = orjson.loads(body_of(UpstreamStatus("x", status=502, body=b"<html>\xff", **AT)))
    assert "<html>" in body["error"]["message"]


def test_a_missing_key_is_openai_s_own_error() -> None:
    error = AccessDenied("no key", status=401, reason="no_key", code="invalid_api_key")
    assert orjson.loads(body_of(error))["error"] == {
        "message": "no key",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    assert extra_headers(error) == [(b"www-authenticate", b"Bearer")]


def test_an_error_says_which_tier_s_worker_failed() -> None:
    assert orjson.loads(body_of(BadUpstreamReply("cut", **AT)))["error"]["message"] == "decode worker: cut"
    assert orjson.loads(body_of(BadUpstreamReply("cut", worker="", tier="")))["error"]["message"] == "cut"


def test_an_error_event_is_one_line_of_data() -> None:
    event = error_event(InvalidRequest("two\nlines"))
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n") and event.count(b"\n") == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "decode worker answered 404: {}"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"object":"error","message":"too long","code":404}', "too long"),
        (b'{"error":{},"message":"m"}', "m"),
        (b'{"error":{"message":"own","code":7}}', "own"),
    ],
)
def test_an_error_event_has_an_error_in_it_whatever_shape_the_worker_s_own_has(body: bytes, message: str) -> None:
    """Clients take an event without one for a part of the answer, and never hear that it was cut off."""
    event = error_event(UpstreamStatus("x", status=404, body=body, **AT))
    assert orjson.loads(event.removeprefix(b"data: "))["error"]["message"] == message


def test_a_request_that_may_have_killed_decoders_is_not_to_be_sent_again() -> None:
    error = DecodersLost("x", **AT)
    assert extra_headers(error) == [(b"x-should-retry", b"false")]


def test_retry_after_is_what_the_error_says_or_a_second() -> None:
    assert extra_headers(QueueFull("x", retry_after_s=2.0)) == [(b"retry-after", b"2")]
    assert extra_headers(QueueFull("x", retry_after_s=0.1)) == [(b"retry-after", b"1")]
    assert extra_headers(QueueFull("x")) == [(b"retry-after", b"1")]


@pytest.mark.parametrize("error", [QueueFull("x", retry_after_s=2.4), UpstreamStatus("x", status=503, body=b"", **AT)])
def test_retry_after_is_never_so_early_that_the_next_try_is_refused_too(error: QueueFull | UpstreamStatus) -> None:
    error.retry_after_s = 2.4
    assert extra_headers(error) == [(b"retry-after", b"3")]

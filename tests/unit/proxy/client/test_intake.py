"""What is read of a request before anything is decided."""

import math
import os

import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.client import intake
from balanceroute.proxy.client.intake import read_head


def test_only_identity_and_trace_headers_are_forwarded() -> None:
    headers = [
        (b"authorization", b"Bearer a"),
        (b"traceparent", b"00-1"),
        (b"connection", b"close"),
        (b"transfer-encoding", b"chunked"),
        (b"x-data-parallel-rank", b"3"),
        (b"cookie", b"c"),
        (b"accept-encoding", b"gzip"),
        (b"x-session-id", b"s1"),
    ]
    head = read_head(headers, None, None)
    assert head.forwarded == [(b"authorization", b"Bearer a"), (b"traceparent", b"00-1"), (b"x-session-id", b"s1")]


@pytest.mark.parametrize(
    ("authorization", "seen"),
    [(None, [b"Bearer mine"]), (b"", []), (b"Bearer k", [b"Bearer k"])],
    ids=["as-it-came", "none", "the-workers-key"],
)
def test_workers_get_the_clients_authorization_only_without_a_configured_key(
    authorization: bytes | None, seen: list[bytes]
) -> None:
    own = [(b"authorization", b"Bearer mine"), (b"x-api-key", b"mine")]
    assert [value for _, value in read_head(own, None, authorization).forwarded] == seen
    assert [value for _, value in read_head([], None, b"Bearer k").forwarded] == [b"Bearer k"]


def test_a_clients_request_id_is_sanitised_and_extended() -> None:
    head = read_head([(b"x-request-id", b'a/b\x7f"c d-' + b"e" * 200)], None, None)
    assert head.client_id is not None and head.client_id.startswith("abcd-eee")
    assert len(head.client_id) <= 96
    assert head.request_id.startswith(f"{head.client_id}-")


def test_two_requests_with_one_client_id_have_different_ids() -> None:
    headers = [(b"x-request-id", b"same")]
    assert read_head(headers, None, None).request_id != read_head(headers, None, None).request_id


def test_ids_with_a_client_id_have_as_many_random_bits_as_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [0x12345678_00000001, 0x12345678_00000002]
    monkeypatch.setattr(intake._ids, "getrandbits", lambda bits: drawn.pop())
    headers = [(b"x-request-id", b"same")]
    assert read_head(headers, None, None).request_id != read_head(headers, None, None).request_id


@pytest.mark.parametrize("value", [b"0", b"-1", b"soon", b"nan", b"inf", b""])
def test_a_deadline_that_is_no_positive_number_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_head([(b"x-request-timeout", value)], None, None).check()
    assert refused.value.param == "X-Request-Timeout"


def test_a_deadline_and_the_predictor_s_key_are_read() -> None:
    head = read_head([(b"x-request-timeout", b"2.5"), (b"x-kind", b"summary")], b"x-kind", None)
    assert head.timeout_s == 2.5 and head.key == "summary"
    assert read_head([], b"x-kind", None).timeout_s == math.inf


def test_two_forked_processes_generate_different_ids() -> None:
    def two_children() -> list[str]:
        ids: list[str] = []
        for _ in range(2):
            reader, writer = os.pipe()
            if not (pid := os.fork()):
                os.write(writer, read_head([], None, None).request_id.encode())
                os._exit(0)
            os.waitpid(pid, 0)
            ids.append(os.read(reader, 100).decode())
            os.close(reader), os.close(writer)
        return ids

    first, second = two_children()
    assert first != second and len(first) == len(second) > 0

"""Request lines, hosts and what else RFC 9110 and 9112 have to say about a head."""

import pytest

from tests.security.deployment import Edge
from tests.security.wire import Answer, body, completion, request

pytestmark = pytest.mark.e2e


def raw(edge: Edge, head: str, method: str = "GET") -> Answer:
    """The answer to exactly this."""
    return edge.ask(head.encode("latin-1"), method)


# -- what is no request

NO_REQUESTS = {
    "tls-hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100 + b"\r\n\r\n",
    "http-2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http-0.9": b"GET /health\r\n\r\n",
    "http-2": b"GET /health HTTP/2.0\r\nHost: router\r\n\r\n",
    "http-1.2": b"GET /health HTTP/1.2\r\nHost: router\r\n\r\n",
    "http-1.10": b"GET /health HTTP/1.10\r\nHost: router\r\n\r\n",
    "http-01.1": b"GET /health HTTP/01.1\r\nHost: router\r\n\r\n",
    "http-1": b"GET /health HTTP/1\r\nHost: router\r\n\r\n",
    "lower-case-version": b"GET /health http/1.1\r\nHost: router\r\n\r\n",
    "other-protocol": b"GET /health ICE/1.0\r\nHost: router\r\n\r\n",
    "rtsp": b"DESCRIBE /health RTSP/1.0\r\nHost: router\r\n\r\n",
    "two-spaces": b"GET  /health HTTP/1.1\r\nHost: router\r\n\r\n",
    "space-in-target": b"GET /hea lth HTTP/1.1\r\nHost: router\r\n\r\n",
    "space-at-end": b"GET /health HTTP/1.1 \r\nHost: router\r\n\r\n",
    "leading-space": b" GET /health HTTP/1.1\r\nHost: router\r\n\r\n",
    "tab": b"GET\t/health\tHTTP/1.1\r\nHost: router\r\n\r\n",
    "no-target": b"GET HTTP/1.1\r\nHost: router\r\n\r\n",
    "nul-in-target": b"GET /health\x00 HTTP/1.1\r\nHost: router\r\n\r\n",
    "latin-1-in-target": b"GET /h\xe9alth HTTP/1.1\r\nHost: router\r\n\r\n",
    "delete-in-target": b"GET /health\x7f HTTP/1.1\r\nHost: router\r\n\r\n",
    "no-slash": b"GET health HTTP/1.1\r\nHost: router\r\n\r\n",
    "bare-lf": b"GET /health HTTP/1.1\nHost: router\n\n",
    "bare-cr": b"GET /health HTTP/1.1\rHost: router\r\r",
    "lower-case-method": b"get /health HTTP/1.1\r\nHost: router\r\n\r\n",
    "empty-method": b" /health HTTP/1.1\r\nHost: router\r\n\r\n",
    "method-of-a-kilobyte": b"G" * 1024 + b" /health HTTP/1.1\r\nHost: router\r\n\r\n",
    "connect": b"CONNECT worker:8100 HTTP/1.1\r\nHost: worker:8100\r\n\r\n",
    "authority-form": b"GET worker:8100 HTTP/1.1\r\nHost: router\r\n\r\n",
    "ftp": b"GET ftp://router/health HTTP/1.1\r\nHost: router\r\n\r\n",
    "absolute-with-user": b"GET http://user:password@router/health HTTP/1.1\r\nHost: router\r\n\r\n",
    "absolute-without-host": b"GET http:///health HTTP/1.1\r\nHost: router\r\n\r\n",
    "a-response": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "smtp": b"EHLO router\r\n\r\n",
    "redis": b"*1\r\n$4\r\nPING\r\n\r\n",
    "nothing-but-nul": b"\x00" * 100 + b"\r\n\r\n",
}


@pytest.mark.parametrize("attack", NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_input_that_is_not_http_1_is_refused(edge: Edge, attack: bytes) -> None:
    with edge.connect() as connection:
        connection.send(attack + completion("behind"))
        connection.half_close()
        answer = connection.answer()
        assert answer.status in (400, 404, 405, 505) and answer.error() and answer.closes
        assert connection.has_ended()
    assert edge.serves() and not edge.workers.of("behind")


# -- hosts

BAD_HOSTS = {
    "none": "",
    "two": "Host: router\r\nHost: router\r\n",
    "two-different": "Host: router\r\nhost: evil\r\n",
    "list": "Host: router, evil\r\n",
    "slash": "Host: router/evil\r\n",
    "user": "Host: user@router\r\n",
    "space": "Host: router evil\r\n",
    "port-of-text": "Host: router:http\r\n",
    "two-ports": "Host: router:1:2\r\n",
    "control": "Host: router\x01\r\n",
    "latin-1": "Host: r\xf6uter\r\n",
    "bracket": "Host: [::1\r\n",
    "scheme": "Host: http://router\r\n",
    "folded": "Host: router\r\n evil\r\n",
}


@pytest.mark.parametrize("fields", BAD_HOSTS.values(), ids=BAD_HOSTS)
def test_a_request_without_one_good_host_is_refused(edge: Edge, fields: str) -> None:
    answer = raw(edge, f"GET /health HTTP/1.1\r\n{fields}\r\n")
    assert answer.status == 400 and answer.error() and answer.closes


@pytest.mark.parametrize(
    "host", ["router", "router:8000", "127.0.0.1:1", "[::1]:8000", "xn--rter-5qa.example", "a_b.c"]
)
def test_a_request_with_one_good_host_is_served(edge: Edge, host: str) -> None:
    assert raw(edge, f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n").status == 200


def test_the_target_in_absolute_form_is_served_like_its_path(edge: Edge) -> None:
    assert raw(edge, "GET http://router:8000/health HTTP/1.1\r\nHost: router:8000\r\n\r\n").status == 200
    assert raw(edge, "GET HTTP://router/nowhere HTTP/1.1\r\nHost: router\r\n\r\n").status == 404
    assert edge.ask(completion().replace(b"POST /", b"POST http://router/")).status == 200


def test_the_target_in_absolute_form_still_needs_one_host(edge: Edge) -> None:
    """RFC 9112, 3.2: 400 to any request of HTTP/1.1 that lacks the field, or has it twice."""
    assert raw(edge, "GET http://router/health HTTP/1.1\r\n\r\n").status == 400
    assert raw(edge, "GET http://router/health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n").status == 400
    assert raw(edge, "GET http://router/health HTTP/1.0\r\n\r\n").status == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/state", "/v1/completions", "/dashboard", "/v1/models"])
def test_no_redirect_names_a_host_that_the_client_chose(edge: Edge, path: str, method: str) -> None:
    for host in ("evil.example", "[:::]", "a@evil.example"):
        asked = request(method, f"{path}/?a=1").replace(b"127.0.0.1", host.encode())
        answer = edge.ask(asked, method)
        assert answer.status in (307, 400, 404, 405)
        if answer.status == 307:
            assert answer.headers["location"] == f"{path}?a=1"


def test_options_asterisk_matches_no_route(edge: Edge) -> None:
    answer = raw(edge, "OPTIONS * HTTP/1.1\r\nHost: router\r\n\r\n", "OPTIONS")
    assert answer.status in (200, 204, 400, 404, 405)


@pytest.mark.parametrize("path", ["/v1//completions", "/v1/./completions", "/x/../v1/completions", "/v1/completions/"])
def test_another_spelling_of_a_route_reaches_no_worker(edge: Edge, path: str) -> None:
    answer = edge.ask(request("POST", path, body=body("respelt")))
    assert answer.status in (307, 308, 400, 404)
    assert edge.serves() and not edge.workers.of("respelt")


@pytest.mark.parametrize("target", ["/v1/models/%0d%0aX: y", "/v1/models/a%00b", "/v1/models/%zz", "/%2e%2e/metrics"])
def test_escapes_in_a_target_never_become_bytes_of_a_request_to_a_worker(edge: Edge, target: str) -> None:
    assert edge.ask(request("GET", target.replace(" ", "%20")), "GET").status < 500


# -- methods


@pytest.mark.parametrize("target", ["/health", "/ready", "/healthcheck", "/metrics", "/v1/models"])
def test_head_is_answered_at_once_and_without_a_body(edge: Edge, target: str) -> None:
    """Once it took 81 seconds."""
    with edge.connect() as connection:
        connection.send(request("HEAD", target) + request("GET", "/health"))
        answer = connection.answer("HEAD")
        assert answer.status == 200 and answer.body == b""
        assert connection.answer().json() == {"status": "ok"}


@pytest.mark.parametrize("target", ["/v1/completions", "/v1/chat/completions", "/instances/add", "/nowhere"])
def test_head_of_what_cannot_be_read_is_answered_at_once_too(edge: Edge, target: str) -> None:
    with edge.connect() as connection:
        connection.send(request("HEAD", target) + request("GET", "/health"))
        assert connection.answer("HEAD").status in (403, 404, 405)
        assert connection.answer().status == 200


def test_head_states_the_length_that_get_would_have(edge: Edge) -> None:
    length = edge.ask(request("GET", "/health"), "GET").headers["content-length"]
    assert edge.ask(request("HEAD", "/health"), "HEAD").headers["content-length"] == length


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "PURGE"])
def test_other_methods_are_refused_and_trace_echoes_nothing(edge: Edge, method: str) -> None:
    answer = edge.ask(request(method, "/v1/completions", "Cookie: secret", body=body("methodical")), method)
    assert answer.status in (400, 405) and answer.error()
    assert b"secret" not in answer.body
    assert edge.serves() and not edge.workers.of("methodical")


def test_an_unknown_method_is_refused(edge: Edge) -> None:
    answer = edge.ask(request("FROBNICATE", "/health"))
    assert answer.status in (400, 405) and answer.error()


# -- HTTP/1.0


def test_http_1_0_needs_no_host_and_is_closed(edge: Edge) -> None:
    with edge.connect() as connection:
        connection.send(b"GET /health HTTP/1.0\r\n\r\n")
        answer = connection.answer()
        assert answer.status == 200 and answer.closes and "transfer-encoding" not in answer.headers
        assert connection.has_ended()


def test_a_stream_to_http_1_0_has_no_chunks(edge: Edge) -> None:
    with edge.connect() as connection:
        connection.send(completion(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        status, headers = connection.head()
        assert status == 200 and "transfer-encoding" not in headers and headers["connection"] == "close"
        text = connection.rest()
    assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n")


def test_keep_alive_of_http_1_0_is_honoured_openly_or_not_at_all(edge: Edge) -> None:
    with edge.connect() as connection:
        connection.send(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = connection.answer()
        assert answer.status == 200
        if answer.headers.get("connection", "").lower() != "keep-alive":
            assert connection.has_ended()


def test_connection_close_ends_after_the_answer(edge: Edge) -> None:
    for spelling in ("close", "Close", "keep-alive, close", "close, te"):
        with edge.connect() as connection:
            connection.send(request("GET", "/health", f"Connection: {spelling}"))
            assert connection.answer().closes
            assert connection.has_ended()


# -- Expect


def test_a_client_that_expects_a_100_gets_it_before_it_sends_the_body(edge: Edge) -> None:
    content = body()
    head = completion("hello", "Expect: 100-continue")[: -len(content)]
    with edge.connect() as connection:
        connection.send(head)
        assert connection.head()[0] == 100
        connection.send(content)
        answer = connection.answer("POST")
        assert answer.status == 200 and answer.informational == []
        connection.send(completion())
        assert connection.answer("POST").status == 200


def test_a_body_that_comes_with_its_expectation_is_served(edge: Edge) -> None:
    assert edge.ask(completion("hello", "Expect: 100-continue")).status == 200


def test_no_100_comes_for_a_body_that_will_be_refused(edge: Edge) -> None:
    with edge.connect() as connection:
        head = request("POST", "/v1/completions", "Expect: 100-continue", f"Content-Length: {2**30}")
        connection.send(head)
        answer = connection.answer("POST")
        assert answer.status == 413 and answer.informational == [] and answer.closes


def test_http_1_0_gets_no_100(edge: Edge) -> None:
    answer = edge.ask(completion("hello", "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert answer.status == 200 and answer.informational == []


def test_an_unknown_expectation_is_a_417(edge: Edge) -> None:
    assert edge.ask(completion("hello", "Expect: 200-ok")).status == 417


# -- Upgrade

UPGRADES = {
    "h2c": ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"],
    "websocket": ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13"],
    "unknown": ["Connection: upgrade", "Upgrade: gopher/9"],
}


@pytest.mark.parametrize("fields", UPGRADES.values(), ids=UPGRADES)
def test_an_upgrade_header_is_ignored_and_the_connection_stays_open(edge: Edge, fields: list[str]) -> None:
    with edge.connect() as connection:
        connection.send(request("GET", "/health", *fields) + completion("hello", *fields) + completion("next"))
        assert connection.answer().status == 200
        assert connection.answer("POST").status == 200
        assert connection.answer("POST").status == 200
    assert len(edge.workers.of("next")) == 2


# -- answers


def test_no_answer_names_the_server_software(edge: Edge) -> None:
    for data in (completion(), request("GET", "/nowhere"), b"nonsense\r\n\r\n"):
        with edge.connect() as connection:
            connection.send(data)
            answer = connection.answer("POST")
        assert "server" not in answer.headers and b"uvicorn" not in answer.body.lower()


def test_a_client_cannot_put_a_line_into_an_answer(edge: Edge) -> None:
    answer = edge.ask(completion("hello", "X-Request-Id: a%0d%0aSet-Cookie: b"))
    assert "set-cookie" not in answer.headers
    answer = edge.ask(request("GET", "/nowhere%0d%0aSet-Cookie:%20b"), "GET")
    assert "set-cookie" not in answer.headers

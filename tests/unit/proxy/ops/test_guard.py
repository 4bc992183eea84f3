"""What stands before a route: who is let through, what the others get, and what the log says."""

import logging
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from balanceroute.proxy.ops.guard import add_log_fields, guarded, trusted, with_message_errors, with_request_id
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.telemetry.instruments import CounterFamily
from tests.unit.proxy.virtual_time import a_config

pytestmark = pytest.mark.anyio

TOKEN = "an-admin-token-of-some-length"
SEEN = Response("sign in here", 401)


async def handler(request: Request) -> Response:
    add_log_fields(request, did="something")
    if request.url.path == "/ready":

        async def parts() -> AsyncIterator[bytes]:
            yield b'{"status": "degraded", "workers_up": {"prefill": 1}, "workers_'
            yield b'down": {"d0": "no"}, "reasons": ["p0: no metrics"]}'

        return StreamingResponse(parts(), 503, {"x-request-id": "mine"})
    if "x-bug" in request.headers:
        raise RuntimeError("a bug")
    return JSONResponse({"path": request.url.path})


class Site:
    """Some guarded routes, as an application has them."""

    def __init__(self, sign_in: Response | None = None, **sections: Any) -> None:
        self.perimeter = Perimeter(a_config(**sections))
        self.refusals = CounterFamily("refusals", "x", ["reason"])
        routes = [
            guarded(Route(path, handler, methods=methods), lambda: self.perimeter, lambda: self.refusals, sign_in)
            for path, methods in (
                ("/health", ["GET"]),
                ("/ready", ["GET"]),
                ("/tokenize", ["POST"]),
                ("/state", ["GET"]),
                ("/routing/policy", ["POST"]),
            )
        ]
        self.app = Starlette(routes=routes)

    async def ask(self, method: str, path: str, peer: str = "127.0.0.1", **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **more)


async def test_an_open_route_is_served_to_everyone_without_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "balanceroute")
    site = Site(auth={"admin_token": TOKEN})
    assert (await site.ask("GET", "/health", "203.0.113.9")).status_code == 200
    assert not [record for record in caplog.records if record.message.endswith(" call")]


@pytest.mark.parametrize(
    ("public", "token", "named"),
    [(True, "", True), (False, TOKEN, True), (False, "", False), (False, "wrong", False)],
    ids=["public", "operator", "anybody", "wrong-token"],
)
async def test_without_access_to_metrics_ready_names_no_workers(public: bool, token: str, named: bool) -> None:
    site = Site(auth={"admin_token": TOKEN}, metrics={"public": public})
    headers = {"authorization": f"Bearer {token}"} if token else {}
    reply = await site.ask("GET", "/ready", "203.0.113.9", headers=headers)
    body = reply.json()
    assert (reply.status_code, reply.headers["x-request-id"]) == (503, "mine")
    assert (body.pop("status"), body.pop("workers_up")) == ("degraded", {"prefill": 1})
    assert bool(body) is named


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"authorization": f"Bearer {TOKEN}"}, 200), ({"authorization": "Bearer no"}, 401), ({}, 401)],
    ids=["token", "wrong", "none"],
)
async def test_an_operator_s_route_wants_the_token_and_refusals_are_counted(
    headers: dict[str, str], status: int
) -> None:
    site = Site(auth={"admin_token": TOKEN})
    reply = await site.ask("GET", "/state", "203.0.113.9", headers=headers)
    assert reply.status_code == status
    assert sum(sample.value for sample in site.refusals.family().samples) == (status != 200)
    assert status == 200 or reply.json()["error"]["message"]


async def test_a_browser_without_the_token_gets_the_page_where_it_can_sign_in() -> None:
    site = Site(sign_in=SEEN, auth={"admin_token": TOKEN})
    assert (await site.ask("GET", "/state", "203.0.113.9")).text == "sign in here"


async def test_a_call_of_a_guarded_route_is_one_log_line_with_peer_and_action(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "balanceroute")
    site = Site()
    await site.ask("GET", "/state?token=secret")
    (record,) = [record for record in caplog.records if record.message == "admin call"]
    fields = vars(record)
    assert (fields["method"], fields["path"], fields["status"], fields["did"]) == ("GET", "/state", 200, "something")
    assert fields["peer"] == "127.0.0.1" and "secret" not in str(fields)


async def test_a_trusted_call_is_logged_under_the_request_id_of_its_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "balanceroute")
    app = Starlette(routes=[trusted(Route("/instances/add", handler, methods=["POST"]))])

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, with_request_id(scope, send))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(named), base_url="http://brain") as client:
        assert (await client.post("/instances/add", headers={"x-request-id": "mine"})).status_code == 200
        assert (await client.get("/instances/add")).status_code == 405
    (record,) = [vars(record) for record in caplog.records if record.message == "operator's change"]
    assert (record["request"], record["path"], record["status"]) == ("mine", "/instances/add", 200)
    assert record["did"] == "something"


def keyed(folder: Path, limit: str) -> Site:
    """Routes for the one key `sk` with this limit."""
    keys = folder / "keys.yaml"
    keys.write_text(f"keys: [{{name: team, sha256: {sha256(b'sk').hexdigest()}, {limit}}}]")
    return Site(auth={"client_keys": str(keys)})


async def test_a_call_that_fails_by_a_bug_leaves_its_key_free(tmp_path: Path) -> None:
    site = keyed(tmp_path, "max_in_flight: 1")
    with pytest.raises(RuntimeError):
        await site.ask("POST", "/tokenize", headers={"x-api-key": "sk", "x-bug": ""}, json={})
    assert (await site.ask("POST", "/tokenize", headers={"x-api-key": "sk"}, json={})).status_code == 200


async def test_the_log_line_of_a_refused_call_names_the_reason_and_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "balanceroute")
    site = keyed(tmp_path, "requests_per_minute: 1")
    for key in ("sk", "sk", "other"):
        await site.ask("POST", "/tokenize", headers={"x-api-key": key}, json={})
    lines = [vars(record) for record in caplog.records if record.message == "client call"]
    assert [(line["status"], line.get("key"), line.get("refused")) for line in lines] == [
        (200, "team", None),
        (429, "team", "key_limit"),
        (401, None, "wrong_key"),
    ]


async def test_a_key_may_call_again_as_soon_as_it_has_the_last_bytes(tmp_path: Path) -> None:
    site = keyed(tmp_path, "max_in_flight: 1")
    assert site.perimeter.keys is not None
    (key,), in_flight = site.perimeter.keys, list[tuple[str, int]]()

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            in_flight.append((message["type"], key.in_flight))
            await send(message)

        await site.app(scope, receive, noted)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(watched), base_url="http://127.0.0.1:8000") as client:
        for _ in range(2):
            assert (await client.post("/tokenize", headers={"x-api-key": "sk"}, json={})).status_code == 200
    assert in_flight == [("http.response.start", 1), ("http.response.body", 0)] * 2


async def test_a_route_is_a_404_on_a_listener_of_another_class_for_every_method() -> None:
    site = Site(listen={"admin": "127.0.0.1:9000"})
    for method in ("GET", "POST", "OPTIONS"):
        assert (await site.ask(method, "/state")).status_code == 404


async def test_an_allowed_origin_gets_cors_headers_in_preflight_and_answer() -> None:
    origin = "https://chat.example"
    site = Site(auth={"allowed_origins": [origin]})
    asks = {"origin": origin, "access-control-request-method": "POST"}
    preflight = await site.ask("OPTIONS", "/tokenize", headers=asks)
    assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == origin
    reply = await site.ask("POST", "/tokenize", headers={"origin": origin}, json={})
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == origin


def test_a_route_that_is_in_no_class_cannot_be_guarded() -> None:
    with pytest.raises(KeyError):
        guarded(Route("/new", handler), lambda: Perimeter(a_config()), lambda: CounterFamily("x", "x", []))


# -- what is added to answers


async def sent(wrap: Callable[[dict[str, Any], Any], Any], scope: dict[str, Any], *messages: dict[str, Any]) -> Any:
    found: list[Any] = []

    async def send(message: Any) -> None:
        found.append(message)

    wrapped = wrap(scope, send)
    for message in messages:
        await wrapped(message)
    return found


def start(status: int, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


async def test_every_answer_has_one_request_id_and_keeps_the_clients_own() -> None:
    scope: dict[str, Any] = {"headers": [(b"x-request-id", b"mine")]}
    (answer,) = await sent(with_request_id, scope, start(200, (b"X-Request-Id", b"of the application")))
    assert [value for name, value in answer["headers"] if name.lower() == b"x-request-id"] == [b"mine"]


async def test_an_error_becomes_anthropic_s_for_its_clients_and_an_answer_stays_as_it_is() -> None:
    scope: dict[str, Any] = {"headers": []}
    await sent(with_request_id, scope)
    body = {"type": "http.response.body", "body": b'{"error": {"message": "no"}}'}
    head, error = await sent(with_message_errors, scope, start(400, (b"content-length", b"28")), body)
    sent_body = orjson.loads(error["body"])
    assert (sent_body["type"], sent_body["error"]["message"]) == ("error", "no")
    assert dict(head["headers"])[b"content-length"] == b"%d" % len(error["body"])
    head, same = await sent(with_message_errors, scope, start(200), body)
    assert same == body and b"request-id" in dict(head["headers"])

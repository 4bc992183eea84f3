"""What an ASGI application is told of a request, and what becomes of its answer."""

import asyncio
import logging
from typing import Any

import orjson
import pytest
import starlette.requests
from starlette.types import ASGIApp, Receive, Scope, Send

from balanceroute.errors import InvalidRequest, InvariantError
from balanceroute.proxy.client.asgi import AsgiHandler
from balanceroute.proxy.client.head import Request
from tests.unit.proxy.client.connections import Connection, a_request
from tests.unit.proxy.client.listening import listening
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time


@pytest.mark.anyio
async def test_asgi_routes_get_the_request_as_asgi_says() -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(b"PUT /a%20b?0 HTTP/1.1\r\nHost: x\r\nX-A: b\r\ncontent-length: 3\r\n\r\nabc")
        assert (await client.answer())[2] == b"abc"
        (scope,) = server.site.scopes
        assert (scope["method"], scope["path"], scope["raw_path"], scope["query_string"]) == (
            "PUT",
            "/a b",
            b"/a%20b",
            b"0",
        )
        assert scope["headers"] == [(b"host", b"x"), (b"x-a", b"b"), (b"content-length", b"3")]
        assert scope["client"][0] == "127.0.0.1" and scope["server"][1] == server.port
        client.send(b"GET /parts HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer())[2] == b"ab"


@pytest.mark.anyio
async def test_head_is_answered_at_once_and_without_a_body() -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\nHEAD /parts HTTP/1.1\r\nhost: x\r\n\r\n")
        for _ in range(2):
            assert (await client.answer(bodiless=True))[0] == 200
        client.post(b"after")
        assert (await client.answer())[2] == b"after"


async def called(app: ASGIApp, request: Request, connection: Connection) -> AsgiHandler:
    handler = AsgiHandler(app, {}, request, connection.response(), lambda: None)
    handler.check()
    await handler.run()
    return handler


@with_virtual_time
async def test_an_asgi_application_receives_a_disconnect_after_its_own_answer() -> None:
    received: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Length", b"2")]})
        await send({"type": "http.response.body", "body": b"hi"})
        received.append(await receive())

    connection = Connection()
    await called(app, a_request(b"abc", b"/any"), connection)
    assert connection.answer == (200, {"content-length": "2"}, b"hi")
    assert received == [
        {"type": "http.request", "body": b"abc", "more_body": False},
        {"type": "http.disconnect"},
    ]


@with_virtual_time
async def test_an_asgi_application_that_waits_for_a_disconnect_gets_none_before_its_answer_is_complete() -> None:
    """Starlette ends a stream at once that way."""
    told: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        waiting = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await let_pass(60.0)
        told.append(waiting.done())
        await send({"type": "http.response.body", "body": b"b"})
        told.append(await waiting)

    await called(app, a_request(b"", b"/any"), Connection())
    assert told == [False, {"type": "http.disconnect"}]


@with_virtual_time
async def test_an_asgi_application_starts_before_the_body_has_arrived_and_then_gets_it() -> None:
    continues_sent: list[bool] = []
    request, connection = a_request(b"", b"/any"), Connection()
    request.complete = False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    handler = AsgiHandler(app, {}, request, connection.response(), lambda: continues_sent.append(True))
    task = asyncio.ensure_future(handler.run())
    await let_pass(1.0)
    assert continues_sent == [True] and not task.done()
    request.body, request.complete = b"late", True
    handler.body_has_come()
    await task
    assert b"late" in connection.answer[2]


@with_virtual_time
async def test_an_asgi_application_whose_client_leaves_before_its_body_ends_without_an_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await starlette.requests.Request(scope, receive).body()

    request, connection = a_request(b"", b"/any"), Connection()
    request.complete = False
    handler = AsgiHandler(app, {}, request, connection.response(), lambda: None)
    task = asyncio.ensure_future(handler.run())
    await let_pass(1.0)
    handler.abandoned()
    await task
    assert connection.transport.written == b""


@with_virtual_time
async def test_a_refusal_of_the_edge_has_the_clients_id_and_the_applications_answer_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})

    request, connection = a_request(b"", b"/any", [(b"x-request-id", b"mine")]), Connection()
    request.complete = False
    handler = AsgiHandler(app, {}, request, connection.response(), lambda: None)
    task = asyncio.ensure_future(handler.run())
    await let_pass(1.0)
    handler.refuse(InvalidRequest("too large", status=413))
    await task
    status, headers, body = connection.answer
    assert (status, headers["x-request-id"]) == (413, "mine") and b"late" not in body
    (line,) = [vars(record) for record in caplog.records if record.message == "refused"]
    assert (line["request"], line["path"], line["error"]) == ("mine", "/any", "too large")


@pytest.mark.parametrize(
    "message",
    [
        {"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nset-cookie: y")]},
        {"type": "websocket.accept"},
    ],
    ids=["header", "type"],
)
@with_virtual_time
async def test_an_application_that_would_break_the_answer_is_a_bug(message: dict[str, Any]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(message)

    with pytest.raises(InvariantError):
        await called(app, a_request(b"", b"/any"), Connection())


@with_virtual_time
async def test_errors_of_anthropic_s_routes_have_anthropic_s_form() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("never called")

    connection = Connection()
    handler = AsgiHandler(app, {}, a_request(b"", b"/v1/messages/count_tokens"), connection.response(), lambda: None)
    handler.refuse(InvalidRequest("no"))
    assert orjson.loads(connection.answer[2])["type"] == "error"

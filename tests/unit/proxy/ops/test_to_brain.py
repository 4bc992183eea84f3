"""A relay's operators' routes before a brain that answers, or does not."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from balanceroute.proxy.client.asgi import REQUEST_ID
from balanceroute.proxy.ops import to_brain
from balanceroute.proxy.ops.guard import ERROR_HANDLERS
from balanceroute.proxy.ops.to_brain import ToBrain, through_socket
from tests.unit.proxy.servers import CHUNKED_HEAD, chunked, read_request
from tests.waiting import until

pytestmark = pytest.mark.anyio

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nx-mine: 1\r\nx-request-id: theirs\r\ncontent-length: 2\r\n\r\nok"
)

PAUSE = b""
TURN = b"the relay joins another brain"


class Named:
    """The route's application, with an id for each request as our server gives."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        scope[REQUEST_ID] = "named"
        await self._app(scope, receive, send)


Got = list[tuple[bytes, bytes]]


@asynccontextmanager
async def before_a_brain(*parts: bytes, joined: bool = True) -> AsyncIterator[tuple[httpx.AsyncClient, Got]]:
    """A client of a relay, and what the brain gets; it answers with these bytes, or is not there."""
    got: Got = []
    answering: Got = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await read_request(reader))
        answering.append(got[-1])
        for part in parts:
            if part is PAUSE:
                await reader.read()  # until the relay has gone
            if part is TURN:
                passes.switch_brain()
                continue
            writer.write(part)
            await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        answering.remove(got[-1])

    with tempfile.TemporaryDirectory(prefix="brain") as folder:
        path = f"{folder}/operators.sock"
        server = await asyncio.start_unix_server(serve, path) if parts else None
        passes = ToBrain(lambda: through_socket(path), lambda: joined)
        routes = [Route("/state", passes.answer, methods=["GET", "POST"]), Route("/ready", passes.shared("/ready"))]
        app = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(Named(app)), base_url="http://relay") as client:
                yield client, got
        finally:
            passes.close()
            await until(lambda: not answering)
            if server is not None:
                server.close()


async def test_a_request_and_its_answer_are_forwarded_without_hop_by_hop_headers() -> None:
    async with before_a_brain(HEAD) as (client, got):
        headers = {"authorization": "Bearer secret", "content-type": "application/json", "x-asked": "yes"}
        headers |= {"cookie": "balanceroute_session=secret", "x-api-key": "secret", "proxy-authorization": "secret"}
        answer = await client.post("/state?a=b%20c", content=b'{"x":1}', headers=headers)
        assert answer.status_code == 200 and answer.text == "ok"
        assert answer.headers["x-mine"] == "1" and "x-request-id" not in answer.headers
        head, body = got[0]
        assert head.startswith(b"POST /state?a=b%20c HTTP/1.1\r\n") and body == b'{"x":1}'
        assert b"x-request-id: named\r\n" in head and b"x-asked: yes" in head
        assert b"secret" not in head and head.count(b"host:") == 1


async def test_a_stream_is_forwarded_as_it_arrives() -> None:
    async with before_a_brain(CHUNKED_HEAD + chunked(b"data: 1\n\n", last=False), chunked(b"data: 2\n\n")) as (
        client,
        _,
    ):
        answer = await client.get("/state")
        assert answer.text == "data: 1\n\ndata: 2\n\n" and answer.headers["content-type"] == "text/event-stream"


async def test_concurrent_calls_of_an_open_route_cause_at_most_two_calls_of_the_brain() -> None:
    async with before_a_brain(HEAD) as (client, got):
        asking = (client.get("/ready?a=b", headers={"x-asked": "yes"}) for _ in range(20))
        for answer in await asyncio.gather(*asking):
            assert (answer.status_code, answer.text, answer.headers["x-mine"]) == (200, "ok", "1")
            assert answer.headers["content-length"] == "2" and "x-request-id" not in answer.headers
        assert len(got) <= 2
        assert got[0][0].startswith(b"GET /ready HTTP/1.1\r\n") and b"x-asked" not in got[0][0]


async def test_without_a_brain_all_concurrent_callers_of_an_open_route_get_503() -> None:
    async with before_a_brain() as (client, _):
        for answer in await asyncio.gather(*(client.get("/ready") for _ in range(20))):
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert "no brain can be reached" in answer.json()["error"]["message"]


async def test_a_brain_that_does_not_answer_is_a_503_that_reports_it_as_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_brain, "READ_S", 0.05)
    async with before_a_brain(PAUSE) as (client, _):
        answer = await client.get("/state")
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "late: no answer within 0.05 s" in answer.json()["error"]["message"]


async def test_a_relay_that_has_joined_no_brain_waits_for_one_for_two_seconds_at_most() -> None:
    """A stopped brain without a standby let every scrape wait for 30 s, and one behind another for a minute."""
    assert to_brain.OPEN_S < 6 and to_brain.ABSENT_S <= 2  # deploy/haproxy.cfg waits for 6 s
    async with before_a_brain(PAUSE, joined=False) as (client, _):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(to_brain, "ABSENT_S", 0.01)
            for method, path in (("GET", "/state"), ("GET", "/ready"), ("POST", "/state")):
                answer = await client.request(method, path)
                text = answer.json()["error"]["message"]
                assert answer.status_code == 503 and "late: no answer within 0.01 s" in text
                assert ("may still do as asked" in text) is (method == "POST")


async def test_without_a_brain_the_answer_is_503_with_retry_after() -> None:
    async with before_a_brain() as (client, _):
        answer = await client.get("/state")
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "no brain can be reached" in answer.json()["error"]["message"]


async def test_a_change_that_a_brain_makes_while_its_relay_joins_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(to_brain, "TURN_S", 3600.0)
    async with before_a_brain(TURN, HEAD) as (client, _):
        answer = await client.post("/state", content=b"{}")
        assert answer.status_code == 200 and answer.text == "ok"


async def test_a_call_stops_waiting_for_a_stopped_brain_when_another_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_brain, "TURN_S", 0.01)
    async with before_a_brain(TURN, PAUSE) as (client, _):
        answer = await client.post("/state", content=b"{}")
        assert answer.status_code == 503


async def test_a_change_that_a_dead_brain_may_have_made_is_reported_as_uncertain() -> None:
    async with before_a_brain(b"HTTP/1.1 ") as (client, _):
        for method, expected in (("POST", "it may have done as asked"), ("GET", "no brain can be reached")):
            answer = await client.request(method, "/state", content=b"{}")
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert expected in answer.json()["error"]["message"]


async def test_a_change_without_a_brain_is_a_503_that_promises_nothing() -> None:
    async with before_a_brain() as (client, _):
        answer = await client.post("/state", content=b"{}")
        assert answer.status_code == 503 and "no brain can be reached" in answer.json()["error"]["message"]

"""Who gets in: every route with every credential from here and from elsewhere, and the attacks that this ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.core.types import Role
from balanceroute.emulator import ClusterShape
from balanceroute.errors import ConfigError
from balanceroute.proxy.ops.guard import guarded
from balanceroute.proxy.perimeter.routes import ACCESS, Access, access_of
from tests.integration.router import Router, Sent, running, sent_to_workers
from tests.integration.test_proxy_answers import completion
from tests.plain_http import PLAIN
from tests.security.peers import PeerTransport
from tests.unit.proxy.client.connections import Connection, a_request
from tests.unit.proxy.perimeter.test_keys import entry
from tests.unit.proxy.reloading import apply
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

SMALL = ClusterShape(prefillers=1, decoders=1, max_num_seqs=8, time_scale=0.02)
CLIENT, ADMIN = "sk-client", "admin-token"
CREDENTIALS = {"none": None, "client": CLIENT, "admin": ADMIN, "wrong": "sk-wrong"}
PEERS = {"loopback": "127.0.0.1", "other": "203.0.113.9"}
HOT = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return key_file(tmp_path, entry("team", CLIENT))


def key_file(folder: Path, *entries: Any) -> Path:
    path = folder / "keys.yaml"
    lines = [one if isinstance(one, str) else one.model_dump_json() for one in entries]
    path.write_text("keys:\n" + "".join(f"- {line}\n" for line in lines))
    return path


@asynccontextmanager
async def asking(router: Router, peer: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client at this address, as the router sees it."""
    transport = PeerTransport(router.app, router.app.services.config, peer)
    options = {"base_url": "http://127.0.0.1:8000", "trust_env": False, **options}
    async with httpx.AsyncClient(transport=transport, **options) as client:
        yield client


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def calls(router: Router) -> Iterator[tuple[str, str, Access]]:
    """Method, path and class of all that the router serves."""
    for path in HOT:
        yield "POST", path, access_of(path)
    for route in router.app.routes:
        assert isinstance(route, Route)
        path = route.path.replace("{model:path}", "m").replace("{rest:path}", "r").replace("{token}", "t")
        path = path.replace("{name}", "dashboard.js")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, path, access_of(route.path)


async def statuses(router: Router, credential: str | None, peer: str) -> dict[tuple[str, str, Access], int]:
    """What each route says to this visitor."""
    found = {}
    async with asking(router, peer) as client:
        for method, path, access in calls(router):
            body = {} if method == "GET" else {"json": {}}
            reply = await client.request(method, path, headers=bearer(credential), **body)
            assert reply.headers.get("x-request-id"), path
            found[method, path, access] = reply.status_code
    return found


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("credential", CREDENTIALS)
async def test_every_route_is_open_to_its_class_alone(keys: Path, credential: str, peer: str) -> None:
    async with running(SMALL, auth={"client_keys": str(keys), "admin_token": ADMIN}) as router:
        for (method, path, access), status in (await statuses(router, CREDENTIALS[credential], PEERS[peer])).items():
            let_in = {
                Access.OPEN: True,
                Access.CLIENT: credential == "client",
                Access.DECODER: False,
                Access.ADMIN: credential == "admin",
            }[access]
            assert (status not in (401, 403)) == let_in, (method, path, status)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("credential", CREDENTIALS)
async def test_without_a_secret_admin_routes_are_open_to_loopback_only(credential: str, peer: str) -> None:
    async with running(SMALL) as router:
        for (method, path, access), status in (await statuses(router, CREDENTIALS[credential], PEERS[peer])).items():
            if access is Access.ADMIN and peer == "other":
                assert status == 403, (method, path)
            else:
                assert status not in (401, 403), (method, path, status)


async def test_every_served_route_has_a_class_and_every_class_a_route() -> None:
    async with running(
        ClusterShape(prefillers=1, decoders=1, connector="mooncake_layerwise", time_scale=0.02)
    ) as router:
        assert {route.path for route in router.app.routes if isinstance(route, Route)} == set(ACCESS)


def test_a_route_that_the_table_does_not_have_is_not_served() -> None:
    async def handler(request: Request) -> Response:
        return Response()

    with pytest.raises(KeyError):
        guarded(Route("/instances/new", handler), lambda: None, lambda: None)  # type: ignore[arg-type, return-value]


async def test_no_get_changes_anything() -> None:
    async with running(SMALL) as router:
        reads = {path for method, path, access in calls(router) if method == "GET" and access is Access.ADMIN}
        of_page = {f"/dashboard/{name}" for name in ("assets/dashboard.js", "data", "stream", "what_if")}
        assert reads == {"/state", "/decisions", "/dashboard", *of_page}


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("::ffff:203.0.113.9", 403),
        ("::127.0.0.1", 403),
        ("::", 403),
        ("2001:db8::1", 403),
        ("fe80::1%lo", 403),
        ("", 403),
    ],
)
async def test_loopback_is_recognised_by_ipv6_too(peer: str, status: int) -> None:
    async with running(SMALL) as router, asking(router, peer) as client:
        assert (await client.get("/state")).status_code == status
        assert (await client.get("/state", headers={"Host": "[::1]:8000"})).status_code == status
        assert (await client.get("/state", headers={"Host": "[2001:db8::1]:8000"})).status_code == 403


# -- attacks

PREFILLER = {"type": "prefill", "instances": "127.0.0.1:1"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain", "Origin": "https://evil.example"},
        {"Content-Type": "text/plain", "Origin": "null"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json", "Origin": "https://evil.example"},
        {"Content-Type": "application/json", "Origin": "http://evil.example:8000", "Host": "evil.example:8000"},
        {"Content-Type": "application/json", "X-Forwarded-For": "203.0.113.9"},
    ],
    ids=["plain-fetch", "sandboxed", "form", "preflighted", "rebound-name", "behind-a-proxy"],
)
async def test_a_web_page_can_not_add_a_prefiller_that_would_get_other_users_prompts(headers: dict[str, str]) -> None:
    async with running(SMALL) as router:
        body = b'{"type": "prefill", "instances": "127.0.0.1:1"}'
        reply = await router.client.post("/instances/add", content=body, headers=headers)
        assert reply.status_code in (403, 415), reply.text
        assert reply.json()["error"]["code"] == reply.status_code
        assert "127.0.0.1:1" not in router.app.services.fleet
        added = await router.client.post("/instances/add", json=PREFILLER)
        assert added.status_code == 200 and "127.0.0.1:1" in router.app.services.fleet


async def test_the_refusal_names_the_setting_that_opens_the_route() -> None:
    async with running(SMALL) as router, asking(router, "203.0.113.9") as client:
        reply = await client.post("/instances/add", json=PREFILLER)
        assert reply.status_code == 403 and "auth.admin_token" in reply.json()["error"]["message"]


async def test_a_refusal_comes_before_the_body_is_read(keys: Path) -> None:
    async with running(SMALL, auth={"client_keys": str(keys)}) as router:
        host, port = router.url.removeprefix("http://").split(":")
        for path in ("/v1/completions", "/tokenize", "/v1/chat/completions"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = (
                f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
            )
            writer.write(head.encode())
            async with asyncio.timeout(PATIENCE_S):
                assert b" 401 " in await reader.readline()
            writer.close()
            await writer.wait_closed()


async def test_large_bodies_take_room_from_their_key_s_share_on_every_route(keys: Path) -> None:
    async with running(SMALL, auth={"client_keys": str(keys)}) as router:
        for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens", *HOT, "/v1/messages"):
            for credential, holder in ((CLIENT, "key team"), ("sk-wrong", ""), (None, "")):
                headers = [(name.lower().encode(), value.encode()) for name, value in bearer(credential).items()]
                request = a_request(path=path.encode(), headers=headers)
                router.app.gate(request)
                if path in router.app.hot and credential == CLIENT:
                    router.app.hot[path](request, Connection().response()).check()
                assert request.holder == holder, (path, credential)


async def test_a_wrong_key_gets_openais_error_for_wrong_keys(keys: Path) -> None:
    async with running(SMALL, auth={"client_keys": str(keys)}) as router:
        for path, body in (("/v1/completions", completion()), ("/tokenize", {"prompt": "a"})):
            reply = await router.client.post(path, json=body, headers=bearer("sk-wrong"))
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert "sk-wrong" not in reply.text
        page = (await router.client.get("/metrics")).text
        assert 'balanceroute_refusals_total{reason="wrong_key"} 2.0' in page and "team" not in page


@pytest.mark.parametrize(
    ("auth", "sent"),
    [
        ({}, "Bearer sk-client"),
        ({"worker_api_key": "sk-worker"}, "Bearer sk-worker"),
        ({"client_keys": True}, None),
        ({"client_keys": True, "worker_api_key": "sk-worker"}, "Bearer sk-worker"),
    ],
    ids=["as-it-came", "the-workers", "none", "the-workers-for-known-clients"],
)
async def test_a_clients_key_never_reaches_a_worker_where_the_router_has_keys(
    keys: Path, auth: dict[str, Any], sent: str | None
) -> None:
    auth = {name: str(keys) if value is True else value for name, value in auth.items()}
    async with running(SMALL, auth=auth) as router:
        seen = sent_to_workers(router.app.services)
        headers = bearer(CLIENT)
        assert (await router.client.post("/v1/completions", json=completion(), headers=headers)).status_code == 200
        assert (await router.client.get("/v1/models", headers=headers)).status_code == 200
        assert (await router.client.post("/tokenize", json={"prompt": "a"}, headers=headers)).status_code == 200
        await router.settled()
        assert credentials(seen) == [{"authorization": sent} if sent else {}] * 4


async def test_the_admin_token_never_reaches_a_worker() -> None:
    async with running(SMALL, auth={"admin_token": ADMIN}) as router:
        seen = sent_to_workers(router.app.services)
        for path in ("/reset_prefix_cache", "/start_profile", "/stop_profile"):
            await router.client.post(path, headers=bearer(ADMIN))
        await router.client.get("/v1/models", headers=bearer(ADMIN))
        await router.client.post("/v1/completions", json=completion(), headers=bearer(ADMIN))
        await router.settled()
        assert credentials(seen) == [{}] * 9
        await router.client.get("/v1/models", headers=bearer("sk-own"))
        assert credentials(seen)[9:] == [{"authorization": "Bearer sk-own"}]


def credentials(sent: list[Sent]) -> list[dict[str, str]]:
    """Those of each request to a worker."""
    names = {"authorization", "x-api-key", "cookie"}
    return [{name: value for name, value in headers.items() if name in names} for _, _, headers in sent]


async def test_a_key_s_limits_are_429_with_the_time_to_come_back(tmp_path: Path) -> None:
    keys = key_file(
        tmp_path,
        entry("narrow", "sk-n", max_in_flight=1),
        entry("slow", "sk-s", requests_per_minute=2),
        entry("m", "sk-m"),
    )
    async with running(SMALL, auth={"client_keys": str(keys)}) as router:

        async def ask(key: str, **body: Any) -> httpx.Response:
            return await router.client.post("/v1/completions", json=completion(**body), headers=bearer(key))

        admitted = asyncio.ensure_future(ask("sk-n", max_tokens=5_000))

        async def under_way() -> int:
            return (await router.state())["keys"]["narrow"]

        await until(under_way)
        refused = [await ask("sk-n") for _ in range(3)]
        assert [reply.status_code for reply in refused] == [429] * 3 and not admitted.done()
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        assert (await admitted).status_code == 200
        assert (await ask("sk-n")).status_code == 200  # what had been refused holds nothing
        assert [(await ask("sk-s")).status_code for _ in range(4)] == [200, 200, 429, 429]
        assert {(await ask("sk-m")).status_code for _ in range(6)} == {200}
        await router.settled()
        assert (await router.state())["keys"] == {"narrow": 0, "slow": 0, "m": 0}


async def test_tokens_of_a_key_are_counted_with_its_prompts(tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("few", "sk-f", tokens_per_minute=100))
    async with running(SMALL, auth={"client_keys": str(keys)}) as router:
        send = lambda: router.client.post("/v1/completions", json=completion(max_tokens=80), headers=bearer("sk-f"))  # noqa: E731
        assert (await send()).status_code == 200  # 40 of the prompt and 80 of the answer
        refused = await send()
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 12


async def test_a_reload_revokes_a_removed_key_and_a_broken_file_changes_nothing(tmp_path: Path, keys: Path) -> None:
    async with running(SMALL, auth={"client_keys": str(keys)}) as router:
        services = router.app.services
        ask = lambda key: router.client.post("/v1/completions", json=completion(), headers=bearer(key))  # noqa: E731
        key_file(tmp_path, '{"name": "a"}')
        with pytest.raises(Exception, match="sha256"):
            await apply(services, services.config)
        assert (await ask(CLIENT)).status_code == 200
        key_file(tmp_path, entry("next", "sk-next"))
        await apply(services, services.config)
        assert [(await ask(key)).status_code for key in (CLIENT, "sk-next")] == [401, 200]


# -- what operators see


async def test_replacing_keys_under_load_refuses_no_client_with_a_kept_key(tmp_path: Path) -> None:
    kept, lent = entry("kept", CLIENT), entry("lent", "sk-lent")
    keys = key_file(tmp_path, kept, lent)
    async with running(SMALL, auth={"client_keys": str(keys)}) as router:
        services, over = router.app.services, False
        asked: list[str] = []

        async def ask(key: str) -> set[int]:
            seen = set()
            while not over:
                body = completion(max_tokens=2)
                reply = await router.client.post("/v1/completions", json=body, headers=bearer(key))
                seen.add(reply.status_code)
                asked.append(key)
            return seen

        asking_on = [asyncio.ensure_future(ask(key)) for key in (CLIENT, CLIENT, "sk-lent", "sk-lent")]
        for turn in range(20):
            key_file(tmp_path, *((kept, lent), (kept,))[turn % 2])
            await apply(services, services.config)
            asked_before = len(asked)
            await until(lambda before=asked_before: len(asked) > before)
            (tmp_path / "keys.yaml").write_text("keys: [half")
            with pytest.raises(ConfigError):
                await apply(services, services.config)
        over = True
        seen = await asyncio.gather(*asking_on)
        assert seen[0] == seen[1] == {200} and seen[2] | seen[3] <= {200, 401}
        await router.settled()
        assert [(key.name, key.in_flight) for key in services.perimeter.keys or ()] == [("kept", 0)]
        key_file(tmp_path, kept, lent)
        await apply(services, services.config)
        assert [key.in_flight for key in services.perimeter.keys or ()] == [0, 0]


async def test_the_dashboard_asks_for_the_token_once_and_its_cookie_opens_nothing_else() -> None:
    async with running(SMALL, auth={"admin_token": ADMIN}) as router, asking(router, "203.0.113.9") as laptop:
        page = await laptop.get("/dashboard")
        assert page.status_code == 401 and 'type="password"' in page.text
        assert (await laptop.get("/dashboard/data")).status_code == 401
        assert (await laptop.post("/dashboard/session", headers=bearer("wrong"))).status_code == 401
        signed_in = await laptop.post("/dashboard/session", headers=bearer(ADMIN))
        cookie = signed_in.headers["set-cookie"].lower()
        assert signed_in.status_code == 204 and "httponly" in cookie and "samesite=strict" in cookie
        assert "path=/dashboard" in cookie and ADMIN not in cookie
        page = await laptop.get("/dashboard")
        assert page.status_code == 200 and "KV load" in page.text
        assert (await laptop.get("/dashboard/data")).json()["policy"] == "br_0"
        value = laptop.cookies["balanceroute_session"]
        everywhere = {"Cookie": f"balanceroute_session={value}"}
        assert (await laptop.post("/instances/drain", json=PREFILLER, headers=everywhere)).status_code == 401
        assert (await laptop.post("/reset_prefix_cache", headers=everywhere)).status_code == 401
        assert (await laptop.post("/routing/policy", json={"policy": "random"}, headers=everywhere)).status_code == 401
        for path in ("/state", "/decisions"):
            assert (await laptop.get(path, headers=everywhere)).status_code == 401
        for path in ("/dashboard/assets/dashboard.js", "/dashboard/stream", "/dashboard/what_if?policy=br_0"):
            assert (await laptop.get(path)).status_code == 200


async def test_a_new_token_ends_dashboard_sessions_of_the_former_one() -> None:
    async with running(SMALL, auth={"admin_token": ADMIN}) as router:
        headers = bearer(ADMIN) | {"accept": "text/event-stream"}
        async with router.client.stream("GET", "/dashboard/stream", headers=headers, timeout=None) as reply:
            lines = reply.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            config = router.app.services.config
            auth = config.auth.model_copy(update={"admin_token": SecretStr("another")})
            await apply(router.app.services, config.model_copy(update={"auth": auth}))
            async with asyncio.timeout(PATIENCE_S):
                assert len([line async for line in lines if line]) <= 1  # what was under way
        assert (await router.client.get("/dashboard/stream", headers=headers)).status_code == 401


async def test_over_tls_the_cookie_stays_on_tls() -> None:
    async with (
        running(SMALL, auth={"admin_token": ADMIN}) as router,
        asking(router, "203.0.113.9", base_url="https://router.example") as laptop,
    ):
        signed_in = await laptop.post("/dashboard/session", headers=bearer(ADMIN))
        assert "secure" in signed_in.headers["set-cookie"].lower()


async def test_a_host_header_that_resembles_an_address_breaks_no_admin_route() -> None:
    async with running(SMALL, auth={"admin_token": ADMIN}) as router:
        headers = bearer(ADMIN) | {"host": "[....]"}
        (worker,) = router.app.services.fleet.of(Role.PREFILL)
        body = {"type": "prefill", "instances": worker.spec.url}
        assert (await router.client.post("/instances/undrain", json=body, headers=headers)).status_code == 200
        assert (await router.client.post("/dashboard/session", headers=headers)).status_code == 204


async def test_metrics_can_be_put_behind_the_token() -> None:
    async with (
        running(SMALL, auth={"admin_token": ADMIN}, metrics={"public": False}) as router,
        asking(router, "203.0.113.9") as client,
    ):
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer(ADMIN))).status_code == 200


async def test_every_admin_call_is_logged_with_method_path_and_peer(caplog: pytest.LogCaptureFixture) -> None:
    async with running(SMALL) as router, asking(router, "203.0.113.9") as stranger:
        caplog.set_level(logging.INFO, "balanceroute.proxy.ops.guard")
        url = router.cluster.decode_urls[0]
        await router.client.post("/instances/drain?x=secret", json={"type": "decode", "instances": [url]})
        await router.client.get("/state")
        refused = await stranger.post("/instances/drain", json=PREFILLER, headers={"X-Request-Id": "mine"})
        lines = [vars(record) for record in caplog.records if record.message == "admin call"]
        assert [(line["method"], line["path"], line["status"]) for line in lines] == [
            ("POST", "/instances/drain", 200),
            ("GET", "/state", 200),
            ("POST", "/instances/drain", 403),
        ]
        assert (lines[0]["peer"], lines[0]["by"], lines[0]["instances"]) == ("127.0.0.1", "loopback", [url])
        assert (lines[2]["peer"], lines[2]["refused"], lines[2]["request"]) == ("203.0.113.9", "not_loopback", "mine")
        assert refused.headers["x-request-id"] == "mine" and "secret" not in str(lines)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/models"])
async def test_every_refused_client_call_is_logged_with_peer_key_and_reason(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = key_file(tmp_path, entry("slow", "sk-s", requests_per_minute=1))
    async with running(SMALL, auth={"client_keys": str(keys)}) as router, asking(router, "203.0.113.9") as stranger:
        caplog.set_level(logging.INFO)
        method, body = ("GET", {}) if path == "/v1/models" else ("POST", {"json": completion()})
        for credential in ("sk-s", "sk-s", "sk-wrong", None):
            await stranger.request(method, path + "?x=secret", headers=bearer(credential), **body)
        await router.settled()
    lines = [vars(record) for record in caplog.records if "refused" in vars(record)]
    assert [(line["status"], line["refused"], line.get("key")) for line in lines] == [
        (429, "key_limit", "slow"),
        (401, "wrong_key", None),
        (401, "no_key", None),
    ]
    assert {(line["peer"], line["path"]) for line in lines} == {("203.0.113.9", path)}
    assert all(line["request"] for line in lines)
    assert not any(secret in str(lines) for secret in ("sk-s", "sk-wrong", "secret"))


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "/v1/completions", {"json": completion()}, 200),
        ("POST", "/v1/completions", {"json": completion(stream=True)}, 200),
        ("POST", "/v1/completions", {"json": completion(n=2)}, 200),
        ("POST", "/v1/completions", {"content": b"{"}, 400),
        ("POST", "/v1/completions", {"json": completion(), "headers": {"X-Request-Timeout": "soon"}}, 400),
        ("GET", "/v1/completions", {}, 405),
        ("GET", "/v1/models", {}, 200),
        ("GET", "/nowhere", {}, 404),
        ("GET", "/health", {}, 200),
        ("POST", "/tokenize", {"content": b"a" * 5000}, 413),
    ],
)
@pytest.mark.parametrize("own", [None, "mine-1"], ids=["ours", "theirs"])
async def test_every_response_of_every_status_carries_a_request_id_that_the_log_has(
    method: str, path: str, options: dict[str, Any], status: int, own: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(SMALL, limits={"max_body_bytes": 4096}) as router:
        headers = options.get("headers", {}) | ({} if own is None else {"X-Request-Id": own})
        reply = await router.client.request(method, path, **(options | {"headers": headers}))
        assert reply.status_code == status
        assert reply.headers.get_list("x-request-id") == [own or reply.headers["x-request-id"]]
        assert (request_id := reply.headers["x-request-id"])
        await router.settled()
    if path != "/health":  # what is asked every second by everybody leaves no lines
        named = [{getattr(line, name, None) for name in ("request", "client_request")} for line in caplog.records]
        assert any(request_id in names for names in named), caplog.text


async def test_a_bug_shows_a_client_only_the_request_id() -> None:
    async with running(SMALL) as router:

        def broken() -> bytes:
            raise RuntimeError("/etc/secret")

        router.app.services.metrics.pieces = broken  # type: ignore[method-assign]
        reply = await router.client.get("/metrics", headers={"X-Request-Id": "mine"})
        assert (reply.status_code, reply.headers["x-request-id"]) == (500, "mine")
        assert reply.json()["error"]["code"] == 500 and "secret" not in reply.text


@pytest.mark.parametrize(
    "sent",
    [
        b"no request\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nnone\r\n",
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n",
    ],
    ids=["none", "no-host", "endless", "no-chunk", "long-line"],
)
async def test_a_request_refused_before_it_is_served_has_an_id_and_a_log_line(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(SMALL) as router:
        host, port = router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.close()
        await writer.wait_closed()
    name = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
    assert head.startswith(b"http/1.1 4") and name
    assert [record for record in caplog.records if str(getattr(record, "request", "")).startswith(name)]


async def test_a_client_refused_at_max_connections_gets_its_request_id() -> None:
    async with running(SMALL, limits={"max_connections": 1}) as router:
        async with router.client.stream(
            "POST", "/v1/completions", json=completion(max_tokens=30_000, stream=True, ignore_eos=True)
        ) as busy:
            lines = busy.aiter_lines()  # kept: a generator that is dropped closes the connection
            await anext(lines)
            async with httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S, **PLAIN) as other:
                refused = await other.post("/v1/completions", json=completion(), headers={"X-Request-Id": "mine"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (503, "mine")
        await router.settled()

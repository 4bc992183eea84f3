"""Pages of other sites: what a browser lets them send, and what the router lets them do and read.

Without `auth.allowed_origins` they get nothing. With it the client routes answer as CORS asks, and no other route does.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest

from balanceroute.config import validate
from balanceroute.errors import ConfigError
from tests.integration.router import Router, running
from tests.integration.test_proxy_answers import completion
from tests.security.test_perimeter import ADMIN, CLIENT, SMALL, bearer, key_file
from tests.unit.proxy.perimeter.test_keys import entry

pytestmark = pytest.mark.anyio

GOOD, EVIL = "https://chat.example.com", "https://evil.example"
CLIENT_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/models", "/tokenize")
READ = {"GET", "HEAD"}
OTHER_ROUTES = {
    "/instances/add": {"POST"},
    "/reset_prefix_cache": {"POST"},
    "/state": READ,
    "/dashboard": READ,
    "/metrics": READ,
    "/health": READ,
}
ALLOWED = {"allowed_origins": [GOOD]}


async def preflight(
    router: Router, path: str, origin: str, headers: str = "authorization,content-type"
) -> httpx.Response:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    return await router.client.request("OPTIONS", path, headers=asked)


def methods(reply: httpx.Response) -> set[str]:
    return set(reply.headers["allow"].split(", "))


def cors(reply: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control")}


async def test_an_allowed_origin_gets_an_answer_to_its_preflight_on_client_routes() -> None:
    async with running(SMALL, auth=ALLOWED) as router:
        for path in CLIENT_ROUTES:
            reply = await preflight(router, path, GOOD)
            assert reply.status_code == 204 and not reply.content and reply.headers["x-request-id"]
            cors_headers = cors(reply)
            assert cors_headers["access-control-allow-origin"] == GOOD and reply.headers["vary"].lower() == "origin"
            assert cors_headers["access-control-allow-headers"] == "authorization,content-type"
            assert ("GET" if path == "/v1/models" else "POST") in cors_headers["access-control-allow-methods"]
            assert "access-control-allow-credentials" not in cors_headers


async def test_an_allowed_page_can_read_every_answer_and_every_refusal() -> None:
    kinds: list[dict[str, Any]] = [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}]
    async with running(SMALL, auth=ALLOWED, limits={"max_body_bytes": 1024, "max_connections": 1}) as router:
        for fields in kinds:
            reply = await router.client.post("/v1/completions", json=completion(**fields), headers={"Origin": GOOD})
            assert reply.status_code == 200 and cors(reply)["access-control-allow-origin"] == GOOD
            exposed = cors(reply)["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "retry-after", "x-should-retry"} <= set(exposed)
        wrong = await router.client.post("/v1/completions", content=b"{", headers={"Origin": GOOD})
        assert wrong.status_code == 400 and cors(wrong)["access-control-allow-origin"] == GOOD
        for path in set(CLIENT_ROUTES) - {"/v1/models"}:
            large = await router.client.post(path, content=b"x" * 1025, headers={"Origin": GOOD})
            assert large.status_code == 413 and cors(large)["access-control-allow-origin"] == GOOD
        async with router.client.stream("POST", "/v1/completions", json=completion(stream=True, max_tokens=2000)):
            for path in set(CLIENT_ROUTES) - {"/v1/models"}:
                full = await router.client.post(path, json={}, headers={"Origin": GOOD})
                assert full.status_code == 503 and cors(full)["access-control-allow-origin"] == GOOD
        models = await router.client.get("/v1/models", headers={"Origin": GOOD})
        assert models.status_code == 200 and cors(models)["access-control-allow-origin"] == GOOD
        await router.settled()


async def test_a_star_allows_every_page_and_an_answer_says_so() -> None:
    async with running(SMALL, auth={"allowed_origins": ["*"]}) as router:
        assert cors(await preflight(router, "/v1/completions", EVIL))["access-control-allow-origin"] == "*"
        reply = await router.client.post("/v1/completions", json=completion(), headers={"Origin": EVIL})
        assert reply.status_code == 200 and cors(reply)["access-control-allow-origin"] == "*"
        await router.settled()


@pytest.mark.parametrize("allowed", [[], [GOOD], ["*"]], ids=["none", "one", "all"])
async def test_no_other_route_answers_a_preflight(allowed: list[str]) -> None:
    async with running(SMALL, auth={"allowed_origins": allowed, "admin_token": ADMIN}) as router:
        for path, served in OTHER_ROUTES.items():
            reply = await preflight(router, path, GOOD)
            assert reply.status_code == 405 and not cors(reply)
            assert methods(reply) == served
            read = await router.client.get(path, headers={"Origin": GOOD, **bearer(ADMIN)})
            assert not cors(read)


async def test_without_allowed_origins_options_is_a_405_that_names_the_methods_that_are_served() -> None:
    async with running(SMALL) as router:
        for path in CLIENT_ROUTES:
            reply = await preflight(router, path, GOOD)
            assert reply.status_code == 405 and not cors(reply)
            assert methods(reply) == ({"GET", "HEAD"} if path == "/v1/models" else {"POST"})


@pytest.mark.parametrize("allowed", [[], [GOOD]], ids=["none", "one"])
async def test_a_page_of_another_site_can_not_use_the_cluster(allowed: list[str]) -> None:
    """A form needs no preflight: its request would be served, and only its answer kept from the page."""
    async with running(SMALL, auth={"allowed_origins": allowed}) as router:
        tries = [
            (path, {"Origin": origin, "Content-Type": kind})
            for path in ("/v1/completions", "/v1/messages", "/tokenize")
            for origin in (EVIL, "null", "http://127.0.0.1:1", "https://chat.example.com.evil.example")
            for kind in ("text/plain", "application/json")
        ]
        for path, headers in tries:
            reply = await router.client.post(path, json=completion(), headers=headers)
            assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
            assert "auth.allowed_origins" in reply.json()["error"]["message"]
        metrics = (await router.client.get("/metrics")).text
        assert f'balanceroute_refusals_total{{reason="foreign_origin"}} {len(tries)}' in metrics
        await router.settled()


async def test_a_page_of_the_routers_own_origin_is_served_like_any_client() -> None:
    async with running(SMALL) as router:
        reply = await router.client.post("/v1/completions", json=completion(), headers={"Origin": router.url})
        assert reply.status_code == 200
        await router.settled()


async def test_a_valid_key_is_accepted_from_any_origin(tmp_path: Path) -> None:
    """Programs that are no browsers say an Origin, too; a page cannot have the key."""
    keys = key_file(tmp_path, entry("team", CLIENT))
    async with running(SMALL, auth={"client_keys": str(keys)}) as router:
        headers = {"Origin": "app://desktop"}
        reply = await router.client.post("/v1/completions", json=completion(), headers=headers | bearer(CLIENT))
        assert reply.status_code == 200
        assert (await router.client.post("/v1/completions", json=completion(), headers=headers)).status_code == 401
        await router.settled()


async def test_a_preflight_needs_no_key_and_names_no_header_that_breaks_the_answer(tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("team", CLIENT))
    async with running(SMALL, auth={"client_keys": str(keys), **ALLOWED}) as router:
        assert (await preflight(router, "/v1/completions", GOOD)).status_code == 204
        odd = await preflight(router, "/v1/completions", GOOD, "a;b\x09c")
        assert odd.status_code == 204 and cors(odd)["access-control-allow-headers"] == ""
        long = await preflight(router, "/v1/completions", GOOD, "a" * 5000)
        assert long.status_code == 204 and len(cors(long)["access-control-allow-headers"]) == 0
        assert (await preflight(router, "/v1/completions", EVIL)).status_code == 403


@pytest.mark.parametrize("origin", ["", "example.com", "https://a/b", "https://a b", "https://a\r\nx: y", "https://"])
def test_an_invalid_allowed_origin_is_refused_at_start(origin: str) -> None:
    tree = {"prefill": {"workers": [{"url": "http://h:1"}]}, "decode": {"workers": [{"url": "http://h:2"}]}}
    with pytest.raises(ConfigError, match=r"auth.allowed_origins"):
        validate(tree | {"auth": {"allowed_origins": [origin]}})


@pytest.mark.parametrize(
    "origin", ["https://Chat.example.com", "https://chat.example.com:443", "http://a:80", "http://[::1]:80"]
)
def test_an_allowed_origin_is_kept_as_browsers_send_it(origin: str) -> None:
    """In lower case, and without a port that is the scheme's own; another port stays."""
    tree = {"prefill": {"workers": [{"url": "http://h:1"}]}, "decode": {"workers": [{"url": "http://h:2"}]}}
    kept = validate(tree | {"auth": {"allowed_origins": [origin, "http://a:443"]}}).auth.allowed_origins
    assert kept == (origin.lower().removesuffix(":443").removesuffix(":80"), "http://a:443")

"""Who may use the admin routes."""

import pytest

from balanceroute.errors import AccessDenied
from balanceroute.proxy.perimeter.access import SESSION_COOKIE, SESSION_S, AdminGate, Visit

Headers = list[tuple[bytes, bytes]]
HERE: Headers = [(b"host", b"127.0.0.1:8000")]
JSON: Headers = [(b"content-type", b"application/json"), (b"content-length", b"20")]
TOKEN: Headers = [(b"authorization", b"Bearer s3cret")]
NOW = 1_700_000_000.0


def admitted(
    gate: AdminGate, headers: Headers, *, method: str = "GET", peer: str | None = "127.0.0.1", path: str = "/dashboard"
) -> str:
    return gate.admit(Visit(method, headers, peer, path), NOW)


def refused(
    gate: AdminGate, headers: Headers, *, method: str = "GET", peer: str | None = "127.0.0.1", path: str = "/dashboard"
) -> tuple[int, str]:
    with pytest.raises(AccessDenied) as caught:
        admitted(gate, headers, method=method, peer=peer, path=path)
    if caught.value.status in (401, 403) and "Pages" not in str(caught.value) and "wrong" not in str(caught.value):
        assert "auth.admin_token" in str(caught.value)
    return caught.value.status, caught.value.reason


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    "host", [b"127.0.0.1:8000", b"localhost", b"LOCALHOST:9", b"[::1]:8000", b"127.0.0.2"], ids=str
)
def test_without_a_token_loopback_is_admitted(peer: str, host: bytes) -> None:
    assert admitted(AdminGate(None), [(b"host", host)], peer=peer) == "loopback"


@pytest.mark.parametrize("peer", ["10.0.0.7", "203.0.113.9", "::ffff:10.0.0.7", "fe80::1", "", None, "localhost.evil"])
def test_without_a_token_no_other_machine_is_let_in(peer: str | None) -> None:
    assert refused(AdminGate(None), HERE, peer=peer) == (403, "not_loopback")


@pytest.mark.parametrize(
    "name", [b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via"], ids=str
)
@pytest.mark.parametrize("value", [b"127.0.0.1", b""], ids=["loopback", "empty"])
def test_without_a_token_no_proxied_call_is_admitted(name: bytes, value: bytes) -> None:
    assert refused(AdminGate(None), [*HERE, (name, value)]) == (403, "proxied")


@pytest.mark.parametrize(
    "headers",
    [
        [(b"host", b"evil.example:8000")],
        [(b"host", b"127.0.0.1.evil.example")],
        [(b"host", b"localhost.evil.example")],
        [(b"host", b"evil.example@127.0.0.1"), (b"host", b"127.0.0.1")],
        [(b"host", b"0.0.0.0:8000")],
        [(b"host", b"10.0.0.7:8000")],
        [(b"host", b"[::1")],
        [(b"host", b"")],
        [],
        [*HERE, *HERE],
    ],
    ids=["name", "prefix", "suffix", "two", "wildcard", "address", "broken", "empty", "none", "twice"],
)
def test_without_a_token_no_foreign_host_header_is_admitted(headers: Headers) -> None:
    assert refused(AdminGate(None), headers) == (403, "foreign_host")


@pytest.mark.parametrize("peer", ["127.0.0.1", "203.0.113.9"])
def test_a_token_is_all_that_is_asked_for_where_one_is_set(peer: str) -> None:
    gate = AdminGate("s3cret")
    elsewhere = [(b"host", b"router.example"), (b"x-forwarded-for", b"1.2.3.4")]
    assert admitted(gate, [*elsewhere, *TOKEN], peer=peer) == "token"
    assert admitted(gate, [*elsewhere, *TOKEN, *JSON], method="POST", peer=peer) == "token"
    assert refused(gate, HERE, peer=peer) == (401, "no_token")
    for wrong in (b"Bearer s3cre", b"Bearer s3cret2", b"Bearer ", b"Basic s3cret", b"s3cret", b"Bearer \xff"):
        assert refused(gate, [*HERE, (b"authorization", wrong)], peer=peer) == (401, "wrong_token")


@pytest.mark.parametrize("gate", [AdminGate(None), AdminGate("s3cret")], ids=["loopback", "token"])
@pytest.mark.parametrize(
    "origin",
    [
        b"https://evil.example",
        b"null",
        b"http://127.0.0.1:8001",
        b"http://127.0.0.1:8000.evil.example",
        b"",
        b"http://[",
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_of_other_sites_are_refused(gate: AdminGate, origin: bytes, method: str) -> None:
    headers = [*HERE, *TOKEN, *JSON, (b"origin", origin)]
    assert refused(gate, headers, method=method) == (403, "foreign_origin")
    own = [*HERE, *TOKEN, *JSON, (b"origin", b"http://127.0.0.1:8000"), (b"sec-fetch-site", b"same-origin")]
    assert admitted(gate, own, method=method)


def test_a_page_without_an_origin_of_its_own_is_refused_also_where_no_host_is_named() -> None:
    assert refused(AdminGate("s3cret"), [*TOKEN, (b"origin", b"null")]) == (403, "foreign_origin")


@pytest.mark.parametrize("site", [b"cross-site", b"same-site"], ids=str)
def test_a_cross_site_browser_request_cannot_change_anything(site: bytes) -> None:
    headers = [*HERE, *JSON, (b"sec-fetch-site", site)]
    assert refused(AdminGate(None), headers, method="POST") == (403, "foreign_origin")
    assert admitted(AdminGate(None), headers) == "loopback"  # a link to the dashboard


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"20")],
        [(b"transfer-encoding", b"chunked")],
        [(b"content-type", b"text/plain"), (b"content-length", b"20")],
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"application/x-www-form-urlencoded"), (b"content-length", b"0")],
        [(b"content-type", b"text/plain; application/json"), (b"content-length", b"20")],
        [(b"content-type", b"application/json-seq"), (b"content-length", b"20")],
        [*JSON, (b"content-type", b"text/plain")],
    ],
    ids=["undeclared", "chunked", "text", "text-without-body", "form", "parameter", "prefix", "two"],
)
def test_a_change_in_a_content_type_that_needs_no_preflight_is_refused(headers: Headers) -> None:
    assert refused(AdminGate(None), [*HERE, *headers], method="POST") == (415, "content_type")


@pytest.mark.parametrize(
    "headers", [[], [(b"content-length", b"0")], JSON, [(b"content-type", b"Application/JSON; charset=utf-8")]]
)
def test_a_change_with_a_json_body_or_none_is_admitted(headers: Headers) -> None:
    assert admitted(AdminGate(None), [*HERE, *headers], method="POST") == "loopback"


def cookie(value: str) -> Headers:
    return [*HERE, (b"cookie", f"a=b; {SESSION_COOKIE}={value}; c".encode())]


def test_a_session_opens_only_the_dashboard_and_lasts_a_week() -> None:
    gate = AdminGate("s3cret")
    session = gate.new_session(NOW)
    assert admitted(gate, cookie(session)) == "session"
    assert refused(gate, [*cookie(session), *JSON], method="POST") == (401, "no_token")
    for path in ("/state", "/decisions", "/metrics", "/", "", "/dashboards", "/x/dashboard/"):
        assert refused(gate, cookie(session), path=path) == (401, "no_token")
    watching = Visit("GET", cookie(session), None, "/dashboard/data")
    assert gate.admit(watching, NOW + SESSION_S - 1) == "session"
    with pytest.raises(AccessDenied):
        gate.admit(watching, NOW + SESSION_S + 1)


def test_a_session_cannot_be_forged_or_prolonged_and_ends_with_its_token() -> None:
    gate = AdminGate("s3cret")
    ends, _, signature = gate.new_session(NOW).partition(".")
    for forged in (
        f"{int(ends) + 9}.{signature}",
        f"{ends}.",
        f"{ends}.{'0' * 64}",
        signature,
        "",
        "s3cret",
        f"{ends}.é",
    ):
        assert refused(gate, cookie(forged)) == (401, "no_token")
    assert refused(AdminGate("other"), cookie(f"{ends}.{signature}")) == (401, "no_token")
    assert "s3cret" not in f"{ends}.{signature}"

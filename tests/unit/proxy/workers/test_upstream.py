"""The client side of the wire against scripted servers, on asyncio's loop and on uvloop."""

import asyncio
import errno
import itertools
import os
import resource
import socket
import ssl
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import trustme

from balanceroute.errors import CannotConnect, ConnectFailed, UpstreamTimeout
from balanceroute.proxy.life.errors import KvTooOld
from balanceroute.proxy.wire.responses import status_of
from balanceroute.proxy.workers import addresses
from balanceroute.proxy.workers.upstream import KEEPALIVE_S, LARGE_BYTES, Upstream
from tests.ports import loopback
from tests.unit.proxy.servers import (
    CHUNKED_HEAD,
    answering,
    chunked,
    falling_silent,
    on_both_loops,
    plain,
    post,
    read_request,
    worker,
)
from tests.unit.proxy.virtual_time import let_pass, stand_still, with_virtual_time
from tests.waiting import until

LONG_S = 3600.0  # for which connections may be idle that a busy machine must not lose


@on_both_loops
async def test_the_request_is_framed_and_carries_the_given_headers() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(plain(b""))

    async with worker(script) as server:
        upstream = Upstream(server.url + "/prefix/")
        await (await post(upstream)).read(10)
        upstream.close()
    head, body = seen[0]
    assert head.startswith(b"POST /prefix/v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nx-request-id: r1\r\n" in head
    assert b"\r\naccept-encoding: identity\r\n" in head  # without, any coding is allowed
    assert body == b"{}"


@on_both_loops
async def test_a_header_with_a_line_break_is_refused() -> None:
    with pytest.raises(ValueError, match="line break"):
        await Upstream("http://127.0.0.1:1").request("GET", "/", headers=[(b"a", b"b\r\nc: d")])


@on_both_loops
async def test_a_last_check_with_an_open_connection_may_hold_the_request_back() -> None:
    async with worker(answering(plain(b"a"))) as server:
        upstream = Upstream(server.url)

        def about_to_send() -> None:
            raise KvTooOld

        with pytest.raises(KvTooOld):
            await post(upstream, about_to_send=about_to_send)
        assert (upstream.idle_connections, upstream.busy_connections) == (0, 0)
        assert await (await post(upstream, about_to_send=lambda: None)).read(9) == b"a"
        upstream.close()


@on_both_loops
async def test_a_large_request_is_not_kept_while_its_reply_is_awaited() -> None:
    """Each choice of a request kept it twice while it was prefilled: 30 MB with `n` 8 took half a gigabyte."""
    size, read, answer = 8 * 2**20, asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            large, body = len(body) == size, b""
            if large:
                read.set()
                await answer.wait()
            writer.write(plain(b"a"))

    async with worker(script) as server:
        upstream = Upstream(server.url)
        await (await post(upstream)).read(10)
        assert upstream.idle_connections == 1
        tracemalloc.start()
        try:
            asked = asyncio.ensure_future(upstream.request("POST", "/v1/x", b"x" * size))
            await read.wait()
            assert tracemalloc.get_traced_memory()[0] < size / 2
        finally:
            tracemalloc.stop()
        answer.set()
        assert await (await asked).read(10) == b"a"
        upstream.close()


@on_both_loops
async def test_large_requests_leave_no_more_idle_connections_than_small_ones() -> None:
    """Each has a fresh connection, of which at 100 per second 400 stayed open, at the router and at its worker."""
    async with worker(answering(plain(b"a"))) as server:
        upstream = Upstream(server.url)
        for size in (1, LARGE_BYTES, 1, LARGE_BYTES, LARGE_BYTES):
            assert await (await upstream.request("POST", "/v1/x", b"x" * size)).read(10) == b"a"
            assert upstream.idle_connections == 1
        upstream.close()


@on_both_loops
async def test_one_connection_serves_consecutive_requests() -> None:
    async with worker(answering(plain(b"a"), CHUNKED_HEAD + chunked(b"b", b"c"))) as server:
        upstream = Upstream(server.url, keepalive_s=LONG_S)
        assert [await (await post(upstream)).read(9) for _ in range(4)] == [b"a", b"bc", b"bc", b"bc"]
        assert server.connections == 1
        assert (upstream.idle_connections, upstream.busy_connections) == (1, 0)
        upstream.close()


@on_both_loops
async def test_concurrent_requests_use_a_connection_each_and_share_them_later() -> None:
    async with worker(answering(plain(b"a"))) as server:
        upstream = Upstream(server.url, keepalive_s=LONG_S)
        for _ in range(3):
            replies = await asyncio.gather(*(post(upstream) for _ in range(20)))
            assert [await reply.read(9) for reply in replies] == [b"a"] * 20
        assert server.connections <= 20
        upstream.close()


@pytest.mark.parametrize("status", [b"413 Too Large", b"200 OK"])
@on_both_loops
async def test_a_worker_that_answers_before_it_has_read_the_request_gets_no_other_on_that_connection(
    status: bytes,
) -> None:
    """The next one would wait behind the rest of the body, which the worker may never read."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(plain(b"no", status))
        await writer.drain()
        await asyncio.Event().wait()

    async with worker(script) as server:
        upstream = Upstream(server.url)
        reply = await upstream.request("POST", "/v1/x", b"x" * 2**26)  # more than any socket buffers
        assert await reply.read(10) == b"no"
        assert (upstream.idle_connections, upstream.busy_connections) == (0, 0)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 O"], ids=["nothing", "half-a-head"])
@on_both_loops
async def test_a_close_before_the_reply_on_a_fresh_connection_is_not_retried(sent: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)

    async with worker(script) as server:
        with pytest.raises(ConnectFailed):
            await post(Upstream(server.url))
        assert server.connections == 1


@pytest.mark.parametrize("retry", [True, False])
@on_both_loops
async def test_a_reused_connection_closed_without_a_byte_is_retried_once_if_allowed(retry: bool) -> None:
    bodies: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append((await read_request(reader))[1])
        writer.write(plain(b"ok"))
        await read_request(reader)  # the second request on this connection is swallowed by the close

    async with worker(script) as server:
        upstream = Upstream(server.url, keepalive_s=LONG_S, fresh_s=LONG_S)
        assert await (await post(upstream)).read(9) == b"ok"
        if retry:
            assert await (await post(upstream)).read(9) == b"ok"
            assert server.connections == 2
        else:
            with pytest.raises(ConnectFailed):
                await post(upstream, retry_stale=False)
            assert server.connections == 1
        upstream.close()


@on_both_loops
async def test_a_connection_that_the_server_closed_while_idle_is_not_used() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(plain(b"ok"))

    async with worker(script) as server:
        upstream = Upstream(server.url)
        for _ in range(2):
            assert await (await post(upstream, retry_stale=False)).read(9) == b"ok"
            await server.closed.wait()
            await until(lambda: not any(connection.usable for connection in upstream._idle))
        assert server.connections == 2
        upstream.close()


async def clock_moves() -> None:
    """Wait until the loop's clock, which may count milliseconds, tells another time."""
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    await until(lambda: loop.time() > now_s)


@on_both_loops
async def test_a_connection_idle_for_too_long_is_not_used() -> None:
    async with worker(answering(plain(b"ok"))) as server:
        upstream = Upstream(server.url, keepalive_s=0.0)
        for _ in range(3):
            await (await post(upstream)).read(9)
            await clock_moves()
        assert server.connections == 3
        upstream.close()


@on_both_loops
async def test_surplus_connections_of_a_burst_close_while_one_stays_in_use() -> None:
    """As by health checks: they would keep all the others below theirs, open for as long as the worker keeps them."""
    async with worker(answering(plain(b"ok"))) as server:
        upstream = Upstream(server.url)
        for reply in await asyncio.gather(*(post(upstream) for _ in range(5))):
            await reply.read(9)
        assert (server.connections, upstream.idle_connections) == (5, 5)
        left = list(upstream._idle)[:-1]
        for connection in left:
            connection.idle_since -= KEEPALIVE_S
        await clock_moves()
        await (await post(upstream)).read(9)
        assert (server.connections, upstream.idle_connections) == (5, 1)
        assert not any(connection.usable for connection in left)
        upstream.close()


@on_both_loops
async def test_a_request_that_cannot_be_repeated_takes_only_a_connection_that_was_used_just_now() -> None:
    async with worker(answering(plain(b"ok"))) as server:
        upstream = Upstream(server.url, keepalive_s=LONG_S, fresh_s=LONG_S)
        await (await post(upstream)).read(9)
        await (await post(upstream, retry_stale=False)).read(9)
        assert server.connections == 1
        upstream.close()
        upstream = Upstream(server.url, keepalive_s=LONG_S, fresh_s=0.0)
        await (await post(upstream)).read(9)
        assert server.connections == 2
        for expected in (3, 4):
            await clock_moves()
            await (await post(upstream, retry_stale=False)).read(9)
            assert server.connections == expected
            assert upstream.idle_connections == 1  # the one that was too old is not kept either
        await clock_moves()
        await (await post(upstream)).read(9)
        assert server.connections == 4
        upstream.close()


@on_both_loops
async def test_a_port_without_a_listener_is_connect_failed() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed, match=r"^cannot connect: Connection refused$"):
            await post(Upstream(f"http://127.0.0.1:{taken.getsockname()[1]}"))


@pytest.mark.parametrize("ours", [True, False])
@on_both_loops
async def test_a_failed_connection_is_attributed_to_worker_or_router(ours: bool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        upstream = Upstream(f"http://127.0.0.1:{taken.getsockname()[1]}")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if ours:
            free = os.dup(taken.fileno())  # the lowest
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(ConnectFailed) as failed:
                await post(upstream)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert isinstance(failed.value, CannotConnect) is ours and not failed.value.sent
        assert status_of(failed.value) == (503 if ours else 502)


@pytest.mark.parametrize("ours", [True, False])
@on_both_loops
async def test_a_missing_local_port_is_attributed_to_the_router_if_other_connections_are_open(ours: bool) -> None:
    """If none is, this machine may just have no IPv6, and the worker nothing else."""

    async def no_port(*_: object, **__: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    async with worker(falling_silent()) as server:
        upstream = Upstream(server.url)
        other = asyncio.ensure_future(post(upstream))
        await until(lambda: upstream.busy_connections == 1)
        if not ours:
            upstream.close()
            upstream = Upstream(server.url)
        asyncio.get_running_loop().create_connection = no_port  # type: ignore[method-assign,assignment]
        with pytest.raises(ConnectFailed, match="Cannot assign requested address") as failed:
            await post(upstream)
        assert isinstance(failed.value, CannotConnect) is ours and not failed.value.sent
        upstream.close()
        with pytest.raises(ConnectFailed):
            await other


def test_a_second_address_is_used_when_the_first_fails_and_kept_when_lookups_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        lookups = 0

        async def found(_: str) -> list[str]:
            nonlocal lookups
            lookups += 1
            if lookups > 1:
                raise socket.gaierror(socket.EAI_AGAIN, "no answer")
            return ["127.0.0.2", "127.0.0.1"]

        monkeypatch.setattr(addresses, "look_up", found)
        async with worker(answering(plain(b"ok"))) as server:
            upstream = Upstream(server.url.replace("127.0.0.1", "d0.cluster"), keepalive_s=0.0)
            for _ in range(3):
                assert await (await post(upstream)).read(9) == b"ok"
                assert await upstream._addresses.get() == ["127.0.0.1", "127.0.0.2"]  # the one that answers first
                upstream._addresses.doubt()
            upstream.close()
        assert lookups == 3

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(test())


@with_virtual_time
async def test_a_silent_address_leaves_time_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, tried = asyncio.get_running_loop(), list[str]()

    async def found(_: str) -> list[str]:
        return ["2001:db8::1", "10.0.0.1"]

    async def connects(_: object, address: str, *__: object, **___: object) -> None:
        tried.append(address)
        if address == "2001:db8::1":
            await asyncio.Event().wait()
        raise ConnectionRefusedError

    monkeypatch.setattr(addresses, "look_up", found)
    loop.create_connection = connects  # type: ignore[method-assign,assignment]
    upstream = Upstream("http://d0.cluster:1")
    began_s = loop.time()
    with pytest.raises(ConnectFailed, match="cannot connect"):
        await post(upstream, connect_timeout_s=5.0)
    assert tried == ["2001:db8::1", "10.0.0.1"] and loop.time() - began_s == pytest.approx(1.25)


@pytest.mark.parametrize("ours", [True, False])
@with_virtual_time
async def test_a_connect_timeout_is_attributed_to_worker_or_router(ours: bool) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    asyncio.get_running_loop().create_connection = never  # type: ignore[method-assign,assignment]
    asking = asyncio.ensure_future(post(Upstream("http://127.0.0.1:1"), connect_timeout_s=5.0))
    await let_pass(1.0)
    stand_still(60.0 if ours else 0.0)
    with pytest.raises(ConnectFailed, match="no connection within 5 s") as failed:
        await asking
    assert isinstance(failed.value, CannotConnect) is ours


@on_both_loops
async def test_a_silent_worker_times_out_and_loses_the_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await reader.read()  # until the client gives up

    async with worker(script) as server:
        upstream = Upstream(server.url, tier="prefill")
        with pytest.raises(UpstreamTimeout) as caught:
            await post(upstream, first_byte_timeout_s=0.03)
        assert caught.value.tier == "prefill"
        await server.closed.wait()
        assert upstream.busy_connections == 0


@on_both_loops
async def test_a_cancelled_request_closes_its_connection() -> None:
    async with worker(falling_silent()) as server:
        upstream = Upstream(server.url)
        asking = asyncio.ensure_future(post(upstream))
        await until(lambda: server.connections)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.closed.wait()
        assert upstream.busy_connections == 0


@on_both_loops
async def test_a_request_cancelled_at_any_turn_of_the_loop_leaves_no_connection_busy() -> None:
    async with worker(falling_silent(CHUNKED_HEAD)) as server:
        for turns in itertools.count():
            upstream = Upstream(server.url)
            asking = asyncio.ensure_future(post(upstream))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            outcome = (await asyncio.gather(asking, return_exceptions=True))[0]
            seen = not isinstance(outcome, asyncio.CancelledError)
            assert upstream.busy_connections == seen
            upstream.close()
            if seen:
                break  # the sweep has passed the moment in which the head comes
        assert turns > 0


@on_both_loops
async def test_a_closed_upstream_refuses_requests() -> None:
    upstream = Upstream("http://127.0.0.1:1")
    upstream.close()
    with pytest.raises(ConnectFailed, match="removed"):
        await post(upstream)


@on_both_loops
async def test_an_upstream_closed_while_it_connects_sends_nothing() -> None:
    async with worker(falling_silent()) as server:
        for turns in itertools.count():
            upstream, sent = Upstream(server.url), list[bool]()
            asking = asyncio.ensure_future(post(upstream, about_to_send=lambda sent=sent: sent.append(True)))
            for _ in range(turns):
                await asyncio.sleep(0)
            sent_before = bool(sent)
            upstream.close()
            await until(asking.done)
            with pytest.raises(ConnectFailed) as failed:
                await asking
            assert bool(sent) is sent_before is failed.value.sent
            if sent_before:
                break  # the sweep has passed the moment in which the connection is made
        assert turns > 0


@on_both_loops
async def test_a_retired_upstream_refuses_requests_and_reads_replies_under_way_to_their_end() -> None:
    async with worker(answering(CHUNKED_HEAD + chunked(b"b", b"c"))) as server:
        upstream = Upstream(server.url)
        assert await (await post(upstream)).read(9) == b"bc"
        reply = await post(upstream)
        upstream.retire()
        with pytest.raises(ConnectFailed, match="removed"):
            await post(upstream)
        assert await reply.read(9) == b"bc"
        await server.closed.wait()
        assert (upstream.idle_connections, upstream.busy_connections) == (0, 0)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://"])
def test_a_url_without_scheme_or_host_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Upstream(url)


@on_both_loops
async def test_https_verifies_the_worker_and_works(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(certificate))
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(served)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with worker(answering(CHUNKED_HEAD + chunked(b"secret")), tls=served) as server:
        url = server.url.replace("http", "https")
        upstream = Upstream(url, ssl_context=lambda: trusting, keepalive_s=LONG_S)
        for _ in range(2):
            assert await (await post(upstream)).read(9) == b"secret"
        assert server.connections == 1
        with pytest.raises(ConnectFailed, match=r"(?i)certificate"):
            await post(Upstream(url))
        upstream.close()


@pytest.mark.parametrize(
    ("names", "trusted", "expected"),
    [
        ("d0.cluster", True, "its certificate is another host's"),
        ("10.9.8.7", True, "its certificate is another host's"),
        ("127.0.0.1", False, "its certificate is refused: "),
    ],
    ids=["another name", "another address", "another authority"],
)
@on_both_loops
async def test_a_failed_handshake_is_told_in_words_that_name_no_host(
    tmp_path: Path, names: str, trusted: bool, expected: str
) -> None:
    authority, served = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate = tmp_path / "ca.pem"
    (authority if trusted else trustme.CA()).cert_pem.write_to_path(str(certificate))
    authority.issue_cert(names).configure_cert(served)
    async with worker(answering(plain(b"ok")), tls=served) as server:
        trusting = ssl.create_default_context(cafile=str(certificate))
        with pytest.raises(ConnectFailed) as failed:
            await post(Upstream(server.url.replace("http", "https"), ssl_context=lambda: trusting))
    assert str(failed.value).startswith(f"cannot connect: {expected}") and "127.0.0.1" not in str(failed.value)


@on_both_loops
async def test_an_https_url_of_a_worker_that_speaks_http_is_told_as_that() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed, match=r"^cannot connect: its URL is https, and it does not speak TLS$"):
            await post(Upstream(f"https://127.0.0.1:{port}"))


@on_both_loops
async def test_a_worker_that_closes_within_the_handshake_is_told_as_that() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed, match="^cannot connect: (it c|C)"):  # closed, or reset
            await post(Upstream(f"https://127.0.0.1:{port}"))


@on_both_loops
async def test_small_writes_are_not_delayed() -> None:
    async with worker(answering(plain(b"ok"))) as server:
        upstream = Upstream(server.url)
        assert await (await post(upstream)).read(9) == b"ok"
        connection = upstream._idle[0]
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        upstream.close()


@on_both_loops
async def test_an_ipv6_host_is_connected_to_without_its_brackets_and_named_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine without IPv6 has the worker on its IPv4 loopback: all but the last hop is the same."""
    here = loopback()
    hosts: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        hosts.append(head.split(b"\r\n")[1])
        writer.write(plain(b"ok"))

    loop, asked = asyncio.get_running_loop(), []
    connect = loop.create_connection

    async def connect_here(factory: Any, host: str, port: int, **options: Any) -> Any:
        asked.append(host)
        return await connect(factory, here, port, **options)

    async with worker(script, host=here) as server:
        port = server.url.rpartition(":")[2]
        upstream = Upstream(f"http://[::1]:{port}")
        with monkeypatch.context() as patch:
            patch.setattr(loop, "create_connection", connect_here)
            assert await (await post(upstream)).read(9) == b"ok"
        assert (asked, hosts) == (["::1"], [b"host: [::1]:%b" % port.encode()])
        upstream.close()

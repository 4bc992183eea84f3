"""A relay on its own: without a brain, at a reload, and when its hold on a request is lost."""

import asyncio
import errno
import logging
import socket
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from balanceroute.config import validate
from balanceroute.proxy import relay as module
from balanceroute.proxy import server as server_module
from balanceroute.proxy.client.acceptor import Acceptor
from balanceroute.proxy.client.relay_loads import Load, RelayLoads
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.relay import reload_relay
from balanceroute.proxy.run_folder.folder import RunFolder
from tests.integration.relayed import SLOW, Relayed, a_brain, a_relay, answered, relayed
from tests.integration.router import FAST
from tests.integration.test_proxy_answers import completion
from tests.unit.proxy.link.test_far import Machine
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def streams_end(router: Relayed) -> None:
    """See the test below."""
    relay = router.relays[0]
    ask = completion(max_tokens=4000, stream=True, ignore_eos=True)
    async with relay.client.stream("POST", "/v1/completions", json=ask) as answer:
        lines = answer.aiter_lines()
        while not (await anext(lines)).startswith("data: "):
            pass
        request = next(iter(relay.app.services.tickets.by_id))
        relay.app.services.void({request})
        rest = [line async for line in lines]
        assert any("error" in line for line in rest) and "data: [DONE]" not in rest


async def test_relays_stay_alive_without_a_brain_and_new_requests_wait_for_one() -> None:
    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        router.brain.end()
        await until(lambda: relay.app.services.membership.member is None)
        assert (await relay.client.get("/health")).status_code == 200
        ready = await relay.client.get("/ready")
        assert ready.status_code == 503 and ready.headers["retry-after"]
        waits = asyncio.gather(*(answered(relay, number) for number in range(8)))
        await until(lambda: len(relay.app.services.tickets.by_id) == 8)
        async with a_brain(router.config, router.folder, relays=["relay-0"]) as brain:
            await waits
            await until(lambda: not brain.services.ledger.scheduler.snapshot.requests)


@pytest.mark.parametrize("far", [True, False], ids=["on another machine", "on its machine"])
async def test_a_relay_whose_brain_is_silent_says_at_once_that_it_is_not_ready(far: bool, tmp_path: Path) -> None:
    urls, folder = ["http://127.0.0.1:1", "http://127.0.0.1:2"], RunFolder(tmp_path)
    tiers = {name: {"workers": [{"url": url}]} for name, url in zip(("prefill", "decode"), urls, strict=True)}
    link = Machine(tmp_path).config.tls.model_dump(exclude_none=True) if far else {}
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,  # connections wait there, and nobody accepts them
        socket.socket(socket.AF_UNIX) as link_socket,
        socket.socket(socket.AF_UNIX) as operators_socket,
    ):
        for listener, path in ((link_socket, folder.link), (operators_socket, folder.operators)):
            listener.bind(str(path))
            listener.listen()
        listen = {"relays": 1, "brains": [f"127.0.0.1:{silent.getsockname()[1]}"]} if far else {"relays": 1}
        config = validate({**tiers, "decode": {**tiers["decode"], "max_num_seqs": 2}, "listen": listen, "tls": link})
        async with a_relay(config, folder, "relay-0") as relay:
            ready = await relay.client.get("/ready")
            assert (ready.status_code, ready.json()["error"]["message"]) == (503, module.NOT_FOUND)


async def test_ready_names_the_log_only_where_that_says_why_a_relay_has_no_brain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A start needs no cure: until the first brain leads the log of its relays has no reason."""
    folder = RunFolder(tmp_path)
    tiers = {name: {"workers": [{"url": f"http://127.0.0.1:{port}"}]} for port, name in ((1, "prefill"), (2, "decode"))}
    config = validate({**tiers, "decode": {**tiers["decode"], "max_num_seqs": 2}, "listen": {"relays": 1}})
    async with a_relay(config, folder, "relay-0") as relay:

        async def said() -> str:
            message: str = (await relay.client.get("/ready")).json()["error"]["message"]
            return message

        assert await said() == module.NOT_FOUND
        with socket.socket(socket.AF_UNIX) as link_socket:
            link_socket.bind(str(folder.link))
            link_socket.listen()
            link_socket.setblocking(False)
            peer, _ = await asyncio.get_running_loop().sock_accept(link_socket)
            peer.close()  # a brain that does not let it in
            await until(lambda: "this relay cannot join a brain" in caplog.messages)
            assert await said() == module.NOT_JOINED


async def test_a_draining_relay_is_not_ready_whatever_the_state_of_its_brain() -> None:
    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        await until(lambda: relay.app.services.membership.member is not None)
        assert (await relay.client.get("/ready")).status_code == 200
        relay.app.services.begin_drain()
        ready = await relay.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert (await relay.client.get("/health")).status_code == 200


async def test_a_relay_without_a_free_descriptor_retries_reading_other_pins_and_logs_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    looks: list[bool] = []
    exhausted = True

    def other_pins(folder: RunFolder, relay: str) -> list[Path]:
        looks.append(exhausted)
        if exhausted:
            raise OSError(errno.EMFILE, "Too many open files")
        return []

    monkeypatch.setattr(module, "LEFT_S", 0.02)
    monkeypatch.setattr(RunFolder, "other_pins", other_pins)
    async with relayed(FAST, count=1, prefill={"kv_pin_s": 60.0}) as router:
        await until(lambda: looks.count(True) >= 3)
        exhausted = False
        await until(lambda: looks.count(False) >= 3)
        await answered(router.relays[0], 1)
        assert router.relays[0].app.services.metrics.tasks_failed.value("left") == 0
    messages = [record.getMessage() for record in caplog.records if "pin records" in record.getMessage()]
    assert messages == [
        "pin records of other relays cannot be read",
        "pin records of other relays are read again",
    ]


async def test_a_relay_tells_its_parent_before_it_accepts_no_more() -> None:
    async with relayed(FAST, count=1) as router:
        server, loads, told = router.relays[0].server, RelayLoads(1), list[tuple[bool, bool]]()
        server.load = Load(loads, 0)
        server.load.accept(1.0)
        server.on_up = lambda: told.append((loads.any_accepts, server.listeners[0].fileno() >= 0))
        server.should_exit = True
        await until(lambda: bool(told))
        assert told == [(False, True)]


async def test_a_relay_shows_every_second_that_it_accepts_until_it_leaves() -> None:
    async with relayed(FAST, count=1) as router:
        server, loads = router.relays[0].server, RelayLoads(1)
        server.load = Load(loads, 0)
        assert not await server.on_tick(0) and loads.any_accepts
        server.leave()
        assert not loads.any_accepts and all(listener.fileno() < 0 for listener in server.listeners)
        await server.on_tick(0)
        assert not loads.any_accepts


@pytest.mark.parametrize("order", ["leave drain leave", "drain leave drain"])
async def test_a_relay_refuses_requests_in_a_drain_until_it_leaves_and_keeps_its_deadline(order: str) -> None:
    async with relayed(FAST, count=1) as router:
        server, brain = router.relays[0].server, router.relays[0].app.services.brain
        deadlines = []
        for step in order.split():
            getattr(server, step)()
            deadlines.append(server._drain)
            assert brain.leaving is (step == "drain")
        assert deadlines == [server._drain] * 3 and server._drain is not None


async def test_the_last_relay_answers_a_client_that_has_connected_before_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "LAST_S", 60.0)
    async with relayed(FAST, count=1) as router:
        server = router.relays[0].server
        accepted = await asyncio.open_connection(*server.listeners[0].getsockname())
        await until(lambda: bool(server.server_state.connections))
        server.drain()
        await until(lambda: server.listeners[0].fileno() < 0)
        reader, writer = accepted
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 ") and b"connection: close" in answer
        writer.close()


async def test_a_relay_that_leaves_waits_for_requests_on_connections_that_are_open() -> None:
    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        await answered(relay, 1)
        await router.settled()
        assert not relay.server.busy(relay.app.services)
        relay.server.leave()
        assert relay.server.busy(relay.app.services)
        await answered(relay, 2)
        await until(lambda: relay.server.should_exit)


async def test_a_relay_that_leaves_answers_a_request_whose_connection_is_just_being_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with relayed(FAST, count=1) as router:
        relay, opened = router.relays[0], Acceptor._open

        async def told_to_leave(acceptor: Acceptor, client: socket.socket) -> None:
            relay.server.leave()
            await opened(acceptor, client)

        monkeypatch.setattr(Acceptor, "_open", told_to_leave)
        await answered(relay, 1)
        await until(lambda: relay.server.should_exit)


async def test_a_relay_reloads_its_own_settings() -> None:
    async with relayed(FAST, count=1) as router:
        services = router.relays[0].app.services
        limits = router.config.limits.model_copy(update={"max_choices": 1})
        new = router.config.model_copy(update={"limits": limits})
        reload_relay(services, new, Perimeter(new))
        refused = await router.relays[0].client.post("/v1/completions", json=completion(n=2))
        assert refused.status_code == 400


async def test_a_reload_of_a_relay_keeps_what_keys_have_used_and_the_port_of_operators(tmp_path: Path) -> None:
    file, headers = tmp_path / "keys.yaml", {"authorization": "Bearer secret"}

    def allow(per_minute: int, secret: bytes = b"secret") -> None:
        file.write_text(f"- {{name: k, sha256: {sha256(secret).hexdigest()}, requests_per_minute: {per_minute}}}")
        file.chmod(0o600)

    allow(1)
    async with relayed(FAST, count=1, auth={"client_keys": str(file)}) as router:
        relay = router.relays[0]
        services = relay.app.services

        async def status() -> int:
            return (await relay.client.post("/v1/completions", json=completion(), headers=headers)).status_code

        assert [await status(), await status()] == [200, 429]
        for per_minute, expected in ((1, 429), (600, 200)):
            allow(per_minute)
            reload_relay(services, router.config, Perimeter(router.config))
            assert await status() == expected
        allow(600, b"another secret")
        reload_relay(services, router.config, Perimeter(router.config))
        assert await status() == 401
        services.perimeter.admin_port = 7
        reload_relay(services, router.config, Perimeter(router.config))
        assert services.perimeter.admin_port == 7


async def test_a_stream_that_the_brain_no_longer_holds_ends_with_an_error_and_no_done() -> None:
    async with relayed(SLOW, count=1) as router:
        with pytest.raises(httpx.RemoteProtocolError):
            await streams_end(router)
        await router.settled()

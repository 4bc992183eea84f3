"""What signals mean: a drain, an end, a reload."""

import asyncio
import logging
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.app import RouterApp, create_app
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.server import ChildServer, ProcessServer, Server
from balanceroute.proxy.telemetry.clock import Loop
from tests.unit.proxy.life.legs import a_leg, dispatching
from tests.unit.proxy.virtual_time import a_config, a_router, let_pass, script, with_virtual_time
from tests.waiting import until

DRAIN_S = 10.0


def a_server(services: Services, kind: type[Server] = Server, **more: Any) -> Any:
    app: RouterApp = create_app(services.config)
    app.services = services
    return kind(app, services.config, **more)


def a_draining_router() -> Services:
    return a_router(a_config(1, 1, lifecycle={"drain_timeout_s": DRAIN_S}))


def test_a_router_uses_a_clock_that_includes_suspended_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[object] = []

    async def serve(server: Server, **_: object) -> None:
        server.started = True
        loops.append(asyncio.get_running_loop())

    monkeypatch.setattr(Server, "serve", serve)
    Server(create_app(a_config()), a_config()).run()
    assert isinstance(*loops, Loop)


def test_uvicorns_line_of_an_address_is_left_out_beside_the_routers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A brain's told to press CTRL+C, which the parent handles."""

    async def serve(server: Server, **_: object) -> None:
        server.started = True
        its_log = logging.getLogger("uvicorn.error")
        its_log.info("Uvicorn running on unix socket %s (Press CTRL+C to quit)", "operators.sock")
        its_log.info("Shutting down")

    monkeypatch.setattr(Server, "serve", serve)
    with caplog.at_level(logging.INFO, "uvicorn.error"):
        Server(create_app(a_config()), a_config()).run()
    assert caplog.messages == ["Shutting down"]


@with_virtual_time
async def test_the_first_signal_refuses_new_requests_and_the_server_ends_with_the_last_one() -> None:
    services = a_draining_router()
    server = a_server(services)
    services.exchanges = 1
    server.handle_exit(signal.SIGTERM, None)
    await until(lambda: services.ledger.draining)
    await let_pass(DRAIN_S / 2)
    assert not server.should_exit
    services.exchanges = 0
    await let_pass(1.0)
    assert server.should_exit and not server.force_exit


@with_virtual_time
async def test_kv_that_is_still_to_be_freed_keeps_the_server_too_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    services = a_draining_router()
    server = a_server(services)
    held = 1
    monkeypatch.setattr(type(services.drainer), "pending", property(lambda drainer: held))
    server.handle_exit(signal.SIGTERM, None)
    await let_pass(1.0)
    assert not server.should_exit
    (line,) = [vars(record) for record in caplog.records if record.message == "draining"]
    assert (line["requests"], line["kv_drains"]) == (0, 1)
    held = 0
    await let_pass(1.0)
    assert server.should_exit


@with_virtual_time
async def test_requests_beyond_the_drain_timeout_are_aborted() -> None:
    services = a_draining_router()
    script(services, "p0", None)
    server = a_server(services)
    async with dispatching(services):
        leg = a_leg(services)
        task = services.loop.create_task(leg.run())
        await until(lambda: services.legs)
        services.exchanges = 1
        began_s = services.ledger.now()
        server.handle_exit(signal.SIGTERM, None)
        results = await asyncio.gather(task, return_exceptions=True)
        assert type(results[0]).__name__ == "Draining"
        assert services.ledger.now() - began_s == pytest.approx(DRAIN_S, abs=0.2)
        await until(lambda: server.should_exit)
        assert services.ledger.now() - began_s < 2 * DRAIN_S, "although the exchange never ended"


@with_virtual_time
async def test_a_leaving_process_accepts_no_request_after_its_deadline() -> None:
    class LeavingServer(ChildServer):
        def leave(self) -> None:
            self._drain = asyncio.get_running_loop().create_task(self._until_drained(self._app.services))

    services = a_draining_router()
    services.exchanges = 1
    server = a_server(services, LeavingServer)
    server.leave()
    await let_pass(DRAIN_S / 2)
    assert not services.ledger.draining
    await let_pass(DRAIN_S)
    assert services.ledger.draining


@pytest.mark.anyio
async def test_connections_that_wait_at_a_listener_when_the_server_ends_are_served() -> None:
    class Served(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(b"served")
            transport.close()

    server = a_server(a_draining_router())
    server.connected = Served
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.servers = [SimpleNamespace(sockets=(listener,), close=listener.close)]
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        await server._answer_last_requests()
    assert [await asyncio.to_thread(client.recv, 10) for client in clients] == [b"served"] * 3
    for client in clients:
        client.close()


@with_virtual_time
async def test_a_second_signal_ends_at_once() -> None:
    services = a_draining_router()
    services.exchanges = 1
    server = a_server(services)
    server.handle_exit(signal.SIGTERM, None)
    await until(lambda: services.ledger.draining)
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and server.force_exit


@with_virtual_time
async def test_a_second_signal_in_the_same_turn_of_the_loop_ends_at_once_too() -> None:
    """A turn may take long: the second signal was taken for the first, and the router drained."""
    services = a_draining_router()
    services.exchanges = 1
    server = a_server(services)
    for _ in range(2):
        server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit
    await let_pass(1.0)


@with_virtual_time
async def test_a_child_that_ends_at_once_refuses_no_request_that_another_may_serve() -> None:
    services = a_draining_router()
    server = a_server(services, ChildServer)
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and server.force_exit
    await let_pass(1.0)
    assert not services.ledger.draining


def test_a_signal_before_startup_ends_at_once() -> None:
    config = a_config()
    server = Server(create_app(config), config)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit


@pytest.mark.parametrize("error", [ConfigError("the file is wrong"), RuntimeError("can't start new thread")], ids=type)
@with_virtual_time
async def test_reloads_run_in_sequence_and_signals_meanwhile_cause_one_more(error: Exception) -> None:
    services, running, done = a_router(), [0], []

    async def reload() -> None:
        assert not running[0]
        running[0] = 1
        await let_pass(5.0)
        running[0] = 0
        done.append(True)
        if len(done) == 1:
            raise error

    server = a_server(services, ProcessServer, on_reload=reload)
    server.started = True
    server._reload()
    await let_pass(1.0)
    for _ in range(3):
        server._reload()
    await let_pass(30.0)
    assert len(done) == 2

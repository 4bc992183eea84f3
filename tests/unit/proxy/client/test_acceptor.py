"""Connections are taken one by one from a socket that others accept on as well."""

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import uvloop

from balanceroute.proxy.client import acceptor as module
from balanceroute.proxy.client.acceptor import LEAVE_S, Acceptor
from balanceroute.proxy.client.relay_loads import CONNECTIONS, FEW, Load, RelayLoads
from tests.waiting import pace, until


class Counting(asyncio.Protocol):
    """Counts its connections, by whose they are."""

    def __init__(self, taken: list[str], name: str) -> None:
        self._taken, self._name = taken, name

    def connection_made(self, transport: Any) -> None:
        self._taken.append(self._name)
        transport.write(b"here")
        transport.close()


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as sock:
        sock.setblocking(False)
        yield sock


def clients(listener: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(listener.getsockname()) for _ in range(count)]


def received_by(client: socket.socket) -> bytes:
    client.settimeout(60)
    with client:
        return client.recv(10)


@pytest.mark.anyio
async def test_waiting_connections_are_shared_by_all_acceptors(listener: socket.socket) -> None:
    waiting, taken = clients(listener, 100), list[str]()
    loop = asyncio.get_running_loop()
    both = [Acceptor(loop, listener.dup(), lambda name=name: Counting(taken, name)) for name in "ab"]  # type: ignore[misc]
    with closing(both[0]), closing(both[1]):
        await until(lambda: len(taken) == 100)
    for one in both:
        one.close()
        await one.wait_closed()
    assert {received_by(client) for client in waiting} == {b"here"}
    assert min(taken.count("a"), taken.count("b")) > 20


class Staying(asyncio.Protocol):
    """A connection that stays open."""

    def __init__(self, open_now: list[asyncio.Protocol]) -> None:
        self._open = open_now

    def connection_made(self, transport: Any) -> None:
        self._open.append(self)
        transport.write(b"here")

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.remove(self)


@pytest.mark.anyio
async def test_connections_that_arrive_one_by_one_are_shared_by_all_acceptors(
    listener: socket.socket,
) -> None:
    table = RelayLoads(2)
    loads = [Load(table, place) for place in (0, 1)]
    both: list[list[asyncio.Protocol]] = [[], []]

    def ahead(place: int) -> bool:
        loads[place].put(CONNECTIONS, len(both[place]))
        return loads[place].ahead(10_000, 10_000)

    held: list[socket.socket] = []

    async def come(number: int) -> None:
        for _ in range(number):
            held.extend(clients(listener, 1))
            await until(lambda: sum(map(len, both)) == len(held))
            await pace(LEAVE_S)  # who has left this one to the other looks again before the next one comes

    loop = asyncio.get_running_loop()
    one, other = (
        Acceptor(loop, listener.dup(), lambda place=place: Staying(both[place]), lambda place=place: ahead(place))  # type: ignore[misc]
        for place in (0, 1)
    )
    try:
        await come(200)
        assert abs(len(both[0]) - len(both[1])) <= FEW + 1
        other.close()
        before = len(both[0])
        await come(20)  # as beside a relay that stands still
        assert len(both[0]) == before + 20
    finally:
        for each in (one, other, *held):
            each.close()
        await until(lambda: not any(both))


def test_a_relay_with_more_connections_does_not_wait_for_a_stuck_one_at_each_connection(
    listener: socket.socket,
) -> None:
    taken, waited = list[str](), list[float]()

    class Watched(uvloop.Loop):  # type: ignore[misc]
        """Notes how long is waited."""

        def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
            if delay == LEAVE_S:
                waited.append(delay)
            return super().call_later(delay, callback, *args, context=context)

    async def test() -> None:
        waiting = clients(listener, 100)
        one = Acceptor(asyncio.get_running_loop(), listener.dup(), lambda: Counting(taken, "ahead"), lambda: True)
        with closing(one):
            await until(lambda: len(taken) == 100)
        await one.wait_closed()
        assert {received_by(client) for client in waiting} == {b"here"}

    with asyncio.Runner(loop_factory=Watched) as runner:
        runner.run(test())
    assert 1 <= len(waited) < 50


@pytest.mark.anyio
async def test_connections_not_accepted_before_a_close_are_left_to_other_acceptors(listener: socket.socket) -> None:
    taken: list[str] = []
    loop = asyncio.get_running_loop()
    Acceptor(loop, listener.dup(), lambda: Counting(taken, "first")).close()
    waiting = clients(listener, 3)
    second = Acceptor(loop, listener.dup(), lambda: Counting(taken, "second"))
    with closing(second):
        await until(lambda: len(taken) == 3)
        assert {received_by(client) for client in waiting} == {b"here"}
    await second.wait_closed()
    assert taken == ["second"] * 3


@pytest.mark.anyio
async def test_the_last_acceptor_takes_what_waits_before_it_closes(listener: socket.socket) -> None:
    taken: list[str] = []
    last = Acceptor(asyncio.get_running_loop(), listener.dup(), lambda: Counting(taken, "last"))
    waiting = clients(listener, 3)
    listener.close()
    last.take_rest()
    last.close()
    last.take_rest()  # nothing more
    await last.wait_closed()
    await until(lambda: len(taken) == 3)
    assert {received_by(client) for client in waiting} == {b"here"}


class Full:
    """A listening socket of a process without descriptors, as often as that is told."""

    def __init__(self, sock: socket.socket, times: int) -> None:
        self._sock, self._times = sock, times

    def accept(self) -> tuple[socket.socket, object]:
        self._times -= 1
        if self._times >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._sock.accept()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


@pytest.mark.anyio
async def test_an_acceptor_without_descriptors_waits_and_logs_it(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    taken: list[str] = []
    waiting = clients(listener, 2)
    sock = Full(listener.dup(), 2)
    one = Acceptor(asyncio.get_running_loop(), sock, lambda: Counting(taken, "a"))  # type: ignore[arg-type]
    with closing(one):
        await until(lambda: len(taken) == 2)
        assert {received_by(client) for client in waiting} == {b"here"}
    await one.wait_closed()
    assert caplog.text.count("connections cannot be accepted") == 2

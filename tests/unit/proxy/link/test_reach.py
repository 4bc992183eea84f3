"""The way to whoever leads."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
import trustme

from balanceroute.proxy.link import reach as reach_module
from balanceroute.proxy.link.reach import (
    MAX_RETRY_S,
    RETRY_S,
    STEADY_S,
    FarReach,
    Pauses,
    SocketReach,
    UntrustedBrain,
)
from balanceroute.proxy.perimeter.tls import Tls
from tests.unit.proxy.link.test_far import Machine
from tests.waiting import PATIENCE_S as LONG_S

pytestmark = pytest.mark.anyio


class Quiet(asyncio.Protocol):
    """A connection that says nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


async def test_a_replaced_brain_socket_is_detected(tmp_path: Path) -> None:
    loop, path = asyncio.get_running_loop(), tmp_path / "link"
    reach = SocketReach(path)
    with pytest.raises(FileNotFoundError):
        await reach.connect(Quiet)
    first = await loop.create_unix_server(asyncio.Protocol, str(path))
    made, moved = await reach.connect(Quiet)
    assert not moved()
    path.rename(tmp_path / "former")
    assert not moved()  # nobody to turn to
    second = await loop.create_unix_server(asyncio.Protocol, str(path))
    assert moved()
    made.transport.close()
    for server in (first, second):
        server.close()
        await server.wait_closed()


async def test_a_brain_that_is_not_trusted_or_not_there_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach_module, "TRY_S", LONG_S)
    machine, loop = Machine(tmp_path), asyncio.get_running_loop()
    brains = Tls(machine.config)
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=brains.link.brain)
    address = server.sockets[0].getsockname()[:2]
    machine.issue(trustme.CA())
    relays = Tls(machine.config)
    reach = FarReach([address], lambda: relays.link.relay)
    with pytest.raises(UntrustedBrain, match=rf"127\.0\.0\.1:{address[1]}: .*CERTIFICATE_VERIFY_FAILED"):
        await reach.connect(Quiet)
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{address[1]}: Connection refused$") as raised:
        await reach.connect(Quiet)
    assert not isinstance(raised.value, UntrustedBrain)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 9), [Errno 113] ..."),
            "Connection refused",
        ),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
    ids=["a name of two addresses", "an unknown name", "no words"],
)
async def test_a_brain_that_cannot_be_reached_is_named_without_what_the_system_adds(
    error: OSError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fails)
    reach = FarReach([("brain", 9)], ssl.create_default_context)
    with pytest.raises(ConnectionError, match=f"^brain:9: {reason}$"):
        await reach.connect(Quiet)


async def test_a_brain_that_does_not_answer_is_left_for_the_next_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    tls, loop = Tls(machine.config), asyncio.get_running_loop()
    silent = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)  # as one whose process stands still
    leads = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=tls.link.brain)
    addresses = [server.sockets[0].getsockname()[:2] for server in (silent, leads)]
    reach = FarReach(addresses, lambda: tls.link.relay)
    monkeypatch.setattr(reach_module, "TRY_S", 0.2)
    with pytest.raises(TimeoutError):
        await reach.connect(Quiet)
    monkeypatch.setattr(reach_module, "TRY_S", LONG_S)
    for _ in range(2):  # who was found stays the one to ask
        made, moved = await reach.connect(Quiet)
        assert reach.address == addresses[1] and not moved()
        made.transport.close()
    reach.try_next_address()
    assert reach.address == addresses[0]
    assert FarReach([("::1", 9000)], lambda: tls.link.relay).name == "[::1]:9000"
    for server in (silent, leads):
        server.close()
        await server.wait_closed()


def test_pauses_grow_with_each_refusal_until_a_brain_lets_the_relay_in() -> None:
    pauses, lengths_s = Pauses(), []
    for _ in range(8):
        lengths_s.append(pauses.next_s)
        pauses.refused()
    assert lengths_s[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S] and lengths_s[-1] == MAX_RETRY_S
    assert not pauses.has_joined
    pauses.joined(1, 0.0)
    assert pauses.next_s == RETRY_S and pauses.has_joined


def test_pauses_grow_while_memberships_of_one_brain_end_soon_and_begin_anew_with_another_or_a_long_one() -> None:
    pauses = Pauses()
    for now in range(3):
        pauses.joined(7, float(now))
        assert not pauses.left(7, now + 0.5)
    assert pauses.next_s == 4 * RETRY_S and pauses.growing
    pauses.joined(8, 3.0)
    assert pauses.next_s == RETRY_S and not pauses.growing
    assert not pauses.left(8, 3.5)
    pauses.joined(8, 4.0)
    assert pauses.left(8, 4.1 + STEADY_S)
    pauses.joined(8, 20.0)
    assert not pauses.left(8, 20.5) and pauses.next_s == RETRY_S

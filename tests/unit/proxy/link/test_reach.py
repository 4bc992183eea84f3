"""The way to whoever leads."""

import asyncio
from pathlib import Path

import pytest
import trustme

from balanceroute.proxy.link import reach as reach_module
from balanceroute.proxy.link.reach import FarReach, SocketReach, UntrustedBrain
from balanceroute.proxy.perimeter.tls import Tls
from tests.unit.proxy.link.test_far import Machine

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


async def test_a_brain_that_is_not_trusted_or_not_there_is_named_with_the_reason(tmp_path: Path) -> None:
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
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{address[1]}: ") as raised:
        await reach.connect(Quiet)
    assert not isinstance(raised.value, UntrustedBrain)


async def test_a_brain_that_does_not_answer_is_left_for_the_next_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach_module, "TRY_S", 0.2)
    machine = Machine(tmp_path)
    tls, loop = Tls(machine.config), asyncio.get_running_loop()
    silent = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)  # as one whose process stands still
    leads = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=tls.link.brain)
    addresses = [server.sockets[0].getsockname()[:2] for server in (silent, leads)]
    reach = FarReach(addresses, lambda: tls.link.relay)
    with pytest.raises(TimeoutError):
        await reach.connect(Quiet)
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

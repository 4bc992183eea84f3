"""The link between machines: who is let in, who is waited for, and where a relay looks for the brain."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import trustme

from balanceroute.config import Config
from balanceroute.core.types import Outcome
from balanceroute.errors import ConfigError
from balanceroute.proxy.link import far as far_module
from balanceroute.proxy.link import reach
from balanceroute.proxy.link.far import FarListener, FarMembers
from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.hub import TAKEN, Patience
from balanceroute.proxy.link.messages import VERSION, Farewell, FromBrain, FromRelay, Hello, read_from_brain
from balanceroute.proxy.link.reach import FarReach
from balanceroute.proxy.perimeter.tls import Tls
from tests.ports import free_base_port
from tests.unit.proxy.link.brains import Brain, Stage, with_stage
from tests.unit.proxy.virtual_time import a_config, let_pass, with_virtual_time
from tests.waiting import PATIENCE_S as LONG_S
from tests.waiting import until


class Machine:
    """What another machine, and the brain's, have of the link."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.issue(trustme.CA())
        self.tls = Tls(self.config)

    def issue(self, ca: trustme.CA, host: str = "127.0.0.1") -> None:
        ca.cert_pem.write_to_path(str(self.folder / "ca.pem"))
        ca.issue_cert(host).private_key_and_cert_chain_pem.write_to_path(str(self.folder / "link.pem"))

    @property
    def config(self) -> Config:
        files = {"link_ca_file": str(self.folder / "ca.pem"), "link_cert_file": str(self.folder / "link.pem")}
        return a_config(tls=files)

    @property
    def members(self) -> FarMembers:
        return FarMembers(self.folder / "far")

    @asynccontextmanager
    async def let_in(self, brain: Brain, port: int = 0, sock: socket.socket | None = None) -> AsyncIterator[int]:
        """Who comes may join this brain; yields the port."""
        async with self.listening(brain.hub.connected, asyncio.Protocol, port, sock) as listener:
            number: int = listener.sockets[0].getsockname()[1]
            yield number

    @asynccontextmanager
    async def listening(
        self,
        link: far_module.Protocols,
        operators: far_module.Protocols,
        port: int = 0,
        sock: socket.socket | None = None,
    ) -> AsyncIterator[FarListener]:
        """A brain's listener for other machines, with these protocols for who comes. `sock`: a bound one."""
        if sock is None:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
        listener = FarListener(asyncio.get_running_loop(), sock, lambda: self.tls.link.brain, link, operators)
        try:
            yield listener
        finally:
            listener.close()
            await listener.wait_closed()

    def reach(self, *ports: int) -> FarReach:
        return FarReach([("127.0.0.1", port) for port in ports], lambda: self.tls.link.relay)

    async def raw(self, port: int) -> tuple[Frames[FromRelay], list[FromBrain]]:
        """A connection that says what it is told to, and what it hears."""
        received: list[FromBrain] = []
        loop = asyncio.get_running_loop()

        def made() -> Frames[FromRelay]:
            return Frames(loop, lambda _, body: received.extend(read_from_brain(body)), lambda *_: None)

        frames, _ = await self.reach(port).connect(made)
        return frames, received


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Whose handshakes may take as long as a busy machine needs."""
    monkeypatch.setattr(reach, "TRY_S", LONG_S)
    monkeypatch.setattr(far_module, "HANDSHAKE_S", LONG_S)
    return Machine(tmp_path)


@pytest.fixture
def refusing_port() -> Iterator[int]:
    """One that is taken, and at which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@with_stage
async def test_a_relay_of_another_machine_sends_its_token_counts(
    stage: Stage, machine: Machine, refusing_port: int
) -> None:
    brain = await stage.brain(far=machine.members)
    async with machine.let_in(brain) as port:
        relay = stage.relay("r0@b", machine.reach(refusing_port, port))
        ticket = await relay.decoding("a")
        ticket.progress(3)
        await until(lambda: brain.load == 13)
        assert machine.members.names == {"r0@b"}
        ticket.finish(Outcome.FINISHED)
        await until(lambda: not brain.scheduler.snapshot.requests)


@with_stage
async def test_relays_know_how_many_there_are_on_all_machines_together(stage: Stage, machine: Machine) -> None:
    brain, near = await stage.brain(far=machine.members), stage.relay("r0")
    async with machine.let_in(brain) as port:
        far = stage.relay("r0@b", machine.reach(port))
        await until(lambda: near.brain.relays == far.brain.relays == 2)
        await far.end()
        await until(lambda: near.brain.relays == 1)


@with_stage
async def test_the_next_brain_waits_for_the_far_relays_of_the_former(
    stage: Stage, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(far_module, "MAX_HANDSHAKES", 1)  # they come one after the other
    machine.members.keep(["r0@b", "r0@c"])
    brain = await stage.brain(far=machine.members, patience=Patience(grace_s=3600.0))
    async with machine.let_in(brain) as port:
        first = stage.relay("r0@b", machine.reach(port))
        await until(lambda: first.membership.member is not None)
        assert not brain.hub.settled.is_set()
        assert machine.members.names == {"r0@b", "r0@c"}  # should this brain die before the other has come
        second = stage.relay("r0@c", machine.reach(port))
        await until(lambda: second.membership.member is not None)
        assert brain.hub.settled.is_set()
        await second.end()
        await until(lambda: machine.members.names == {"r0@b"})
    assert "refused" not in caplog.text


@pytest.mark.parametrize("known", [True, False])
@with_stage
async def test_a_brain_waits_longer_if_it_does_not_know_the_far_relays_which_may_try_other_addresses_first(
    stage: Stage, machine: Machine, refusing_port: int, known: bool
) -> None:
    if known:
        machine.members.keep([])
    patience = Patience(grace_s=0.0, unknown_s=3600.0)
    brain = await stage.brain(far=machine.members, patience=patience)
    async with machine.let_in(brain) as port:
        relay = stage.relay("r0@b", machine.reach(refusing_port, port))
        await until(lambda: relay.membership.member is not None)
        assert not known or brain.hub.settled.is_set()
        assert known or not brain.hub.settled.is_set()


@with_stage
async def test_a_brain_that_ends_lets_no_far_relay_in_while_its_process_still_listens(
    stage: Stage, machine: Machine
) -> None:
    brain = await stage.brain(far=machine.members)
    async with machine.let_in(brain) as port:
        brain.hub.close()  # as when it has lost the lead
        frames, received = await machine.raw(port)
        frames.send(Hello(VERSION, "r0@b", 1, 0, ()))
        await until(lambda: not frames.open)
        assert not received and not brain.hub.members


@with_stage
async def test_far_members_of_a_former_brain_are_remembered_by_the_next(stage: Stage, machine: Machine) -> None:
    brain = await stage.brain(far=machine.members)
    async with machine.let_in(brain) as port:
        relay = stage.relay("r0@b", machine.reach(port))
        await until(lambda: relay.membership.member is not None)
        brain.hub.close()
        await until(lambda: relay.membership.member is None)
        assert machine.members.names == {"r0@b"}


@with_stage
async def test_a_draining_brain_sends_far_relays_to_the_next_brain(
    stage: Stage, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    drains, near = await stage.brain(far=machine.members), stage.relay("r0")
    async with machine.let_in(drains) as port:
        far = stage.relay("r0@b", machine.reach(port))
        await until(lambda: far.membership.member is not None and near.membership.member is not None)
        drains.hub.dismiss_far()
        await until(lambda: far.membership.member is None)
        frames, _ = await machine.raw(port)
        frames.send(Hello(VERSION, "r0@b", 1, 0, ()))
        await until(lambda: not frames.open)
        assert near.membership.member is not None and not machine.members.known
        assert {"r0@b"} == {vars(line)["relay"] for line in caplog.records if line.message == "relay left"}
        assert "relay lost" not in [line.message for line in caplog.records]


@with_stage
async def test_a_draining_brain_continues_when_the_file_of_far_relays_cannot_be_removed(
    stage: Stage, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    drains = await stage.brain(far=machine.members)
    machine.members.forget()
    assert not caplog.records, "none has been kept"
    (machine.folder / "far").mkdir()  # can't be unlinked, as nothing can where nothing can be written
    drains.hub.dismiss_far()
    assert "names of far relays cannot be removed" in [one.getMessage() for one in caplog.records]


@pytest.mark.parametrize("process", [1, 2], ids=["the same", "another"])
@with_stage
async def test_two_far_relays_with_one_name_leave_the_first_joined_and_refuse_the_second_with_the_reason(
    stage: Stage, machine: Machine, process: int
) -> None:
    brain = await stage.brain()
    async with machine.let_in(brain) as port:
        first, _ = await machine.raw(port)
        first.send(Hello(VERSION, "r0@b", 1, 0, ()))
        await until(lambda: brain.hub.members)
        second, received = await machine.raw(port)
        second.send(Hello(VERSION, "r0@b", process, 0, ()))
        if process == 1:  # its connection is another one
            await until(lambda: not first.open)
            assert second.open
        else:
            await until(lambda: not second.open)
            assert first.open and [each.reason for each in received if isinstance(each, Farewell)] == [TAKEN]
        first.abort("the test ends")
        second.abort("the test ends")


@with_stage
async def test_a_relay_of_a_cloned_machine_is_refused_although_its_process_has_the_same_number(
    stage: Stage, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    brain = await stage.brain()
    async with machine.let_in(brain) as port:
        first = stage.relay("r0@b", machine.reach(port))
        await until(lambda: first.membership.member is not None)
        clone = stage.relay("r0@b", machine.reach(port))
        joined = clone.membership
        await until(lambda: joined.member is not None or any(TAKEN in str(vars(line)) for line in caplog.records))
        assert first.membership.member == 1 and joined.member is None


def test_far_relays_of_earlier_are_not_waited_for_if_a_brain_of_another_machine_has_led_since(
    machine: Machine,
) -> None:
    machine.members.keep(["r0@b"])
    later = FarMembers(machine.folder / "far", others_led=True)
    assert not later.names and not later.known
    assert machine.members.names == {"r0@b"} and machine.members.known


def test_a_damaged_file_of_far_members_does_not_prevent_leading(machine: Machine) -> None:
    (machine.folder / "far").write_bytes(b"\xff spoilt")
    assert not machine.members.known and not machine.members.names


def test_far_members_that_cannot_be_saved_do_not_prevent_leading(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    FarMembers(machine.folder / "gone" / "far").keep(["r0@b"])
    assert [record.message for record in caplog.records] == ["names of far relays cannot be saved"]


@pytest.mark.parametrize(
    ("hello", "gets_farewell"),
    [
        (Hello(VERSION, "r0", 1, 0, ()), False),  # the name of one on the brain's machine
        (Hello(VERSION, "r0@b\nr0@c", 1, 0, ()), False),
        (Hello(VERSION - 1, "r0@b", 1, 99, ()), True),  # an epoch of who speaks another version means nothing
        (Hello(VERSION, "r0@b", 1, 2**63, ()), False),  # no leader has come so far, and none could follow
    ],
)
@with_stage
async def test_a_refused_relay_changes_nothing(
    stage: Stage, machine: Machine, hello: Hello, gets_farewell: bool
) -> None:
    brain, near = await stage.brain(far=machine.members), stage.relay("r0")
    await until(lambda: near.membership.member is not None)
    async with machine.let_in(brain) as port:
        frames, received = await machine.raw(port)
        frames.send(hello)
        await until(lambda: not frames.open)
        assert any(isinstance(message, Farewell) for message in received) is gets_farewell
        assert near.membership.member is not None and not brain.superseded


async def what_comes(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """All of it, until the other side closes."""
    reader, writer = connection
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


@with_stage
async def test_a_link_connection_without_a_handshake_is_closed(
    stage: Stage, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_module, "HANDSHAKE_S", 0.1)
    brain = await stage.brain(far=machine.members)
    async with machine.let_in(brain) as port:
        assert await what_comes(await asyncio.open_connection("127.0.0.1", port)) == b""


@with_stage
async def test_unauthenticated_connections_are_few_and_do_not_block_relays(
    stage: Stage, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(far_module, "HANDSHAKE_S", 3600.0)
    monkeypatch.setattr(far_module, "MAX_HANDSHAKES", 3)
    brain = await stage.brain(far=machine.members)
    async with machine.let_in(brain) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        relay = stage.relay("r0@b", machine.reach(port))
        await until(lambda: relay.membership.member is not None)
        assert await what_comes(silent[0]) == b""
        assert not silent[1][0].at_eof() and not silent[2][0].at_eof()
        (refused,) = (vars(line) for line in caplog.records if "refused" in line.message)
        assert (refused["last"], refused["reason"]) == ("127.0.0.1", "too many handshakes at a time")
        for _, writer in silent[1:]:
            writer.transport.abort()


@pytest.mark.anyio
async def test_alpn_tells_relays_from_operators(machine: Machine) -> None:
    came: list[str] = []

    class Peer(asyncio.Protocol):
        def __init__(self, name: str) -> None:
            self._name = name

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            came.append(self._name)

    link, contexts = machine.tls.link, {"relay": machine.tls.link.relay, "operator": machine.tls.link.operators}
    async with machine.listening(lambda: Peer("relay"), lambda: Peer("operator")) as listener:
        for context in contexts.values():
            _, writer = await asyncio.open_connection(*listener.sockets[0].getsockname(), ssl=context)
            await until(lambda: len(came) == 1 + (context is link.operators))  # noqa: B023
            writer.transport.abort()
    assert came == list(contexts)


@pytest.mark.anyio
async def test_refused_peers_are_counted_in_few_log_lines(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(far_module, "LOG_EVERY_S", 3600.0)
    async with machine.listening(asyncio.Protocol, asyncio.Protocol) as listener:
        address = listener.sockets[0].getsockname()

        async def refused() -> None:
            connection = await asyncio.open_connection(*address)
            connection[1].write(b"GET / HTTP/1.1\r\n\r\n")
            await what_comes(connection)
            await listener.wait_closed()

        for _ in range(3):
            await refused()
        monkeypatch.setattr(far_module, "LOG_EVERY_S", 0.0)
        for _ in range(2):
            await refused()
        silent = await asyncio.open_connection(*address)
        await until(lambda: listener._handshakes)
        listener.close()
        await until(silent[0].at_eof)
        silent[1].transport.abort()
    lines = [vars(line) for line in caplog.records if line.message == "connections to listen.link refused"]
    assert [(line["count"], line["last"]) for line in lines] == [(1, "127.0.0.1"), (3, "127.0.0.1"), (1, "127.0.0.1")]


@with_virtual_time
async def test_a_brain_that_can_accept_no_connection_tries_again_after_a_pause_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [errno.ECONNABORTED]  # a peer that has gone is nobody's concern

    def accept(_: socket.socket) -> None:
        code = failures.pop() if failures else errno.EMFILE
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket.socket, "accept", accept)
    with socket.create_server(("127.0.0.1", 0)) as sock, socket.create_connection(sock.getsockname()):
        listener = FarListener(asyncio.get_running_loop(), sock, lambda: None, asyncio.Protocol, asyncio.Protocol)  # type: ignore[arg-type, return-value]
        await let_pass(2.5 * far_module.PAUSE_S)
        listener.close()
        await let_pass(2.5 * far_module.PAUSE_S)
    assert [record.message for record in caplog.records] == ["connections cannot be accepted"] * 3


@with_stage
async def test_a_brain_that_ends_refuses_who_comes_and_the_next_one_on_its_socket_does_not(
    stage: Stage, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent, and brains that may come next, hold the same socket open: a relay waited 1.5 s for an answer."""
    monkeypatch.setattr(far_module, "PAUSE_S", 0.01)
    port = free_base_port((0,))
    async with machine.listening(asyncio.Protocol, asyncio.Protocol, port) as former:
        parents = former.sockets[0].dup()
        former.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        brain = await stage.brain(far=machine.members)
        async with (
            machine.let_in(brain, sock=parents.dup()),
            machine.listening(asyncio.Protocol, asyncio.Protocol, sock=parents.dup()) as stopped,
        ):
            stopped.close()  # it led before, was stopped, and ends only now
            relay = stage.relay("r0@b", machine.reach(port))
            await until(lambda: relay.membership.member is not None)
        parents.close()


@with_stage
async def test_a_connection_without_a_hello_is_closed(stage: Stage, machine: Machine) -> None:
    brain = await stage.brain(far=machine.members, patience=Patience(hello_s=0.1))
    async with machine.let_in(brain) as port:
        frames, received = await machine.raw(port)
        await until(lambda: not frames.open)
        assert not received


def unheard(frames: Frames[FromRelay], what: object) -> None:
    """Nobody listens."""


def without_a_name(machine: Machine, ca: trustme.CA) -> None:
    machine.issue(ca, "another.host")


def of_another_ca(machine: Machine, ca: trustme.CA) -> None:
    machine.issue(trustme.CA())


@pytest.mark.parametrize("spoil", [without_a_name, of_another_ca])
@with_stage
async def test_a_brain_is_verified_by_its_ca_and_name_as_reloaded(
    stage: Stage, machine: Machine, spoil: Callable[[Machine, trustme.CA], None]
) -> None:
    ca = trustme.CA()
    machine.issue(ca)
    machine.tls.reload(machine.config)
    relays = Tls(machine.config)
    brain = await stage.brain(far=machine.members)
    async with machine.let_in(brain) as port:

        async def reached() -> bool:
            reach = FarReach([("127.0.0.1", port)], lambda: relays.link.relay)
            frames, _ = await reach.connect(lambda: Frames(asyncio.get_running_loop(), unheard, unheard))
            frames.abort("that is all")
            return True

        assert await reached()
        spoil(machine, ca)
        machine.tls.reload(machine.config)
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await reached()


@with_stage
async def test_the_brain_s_log_says_what_is_wrong_with_a_relays_certificate(
    stage: Stage, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    ca, year = trustme.CA(), datetime(2020, 1, 1)
    machine.issue(ca)
    machine.tls.reload(machine.config)
    expired = ca.issue_cert("127.0.0.1", not_before=year, not_after=year + timedelta(days=1))
    expired.private_key_and_cert_chain_pem.write_to_path(str(machine.folder / "link.pem"))
    relays = Tls(machine.config)
    brain = await stage.brain(far=machine.members)
    async with machine.let_in(brain) as port:
        stage.relay("r0@b", FarReach([("127.0.0.1", port)], lambda: relays.link.relay))
        await until(lambda: any("refused" in line.getMessage() for line in caplog.records))
    reasons = [vars(line)["reason"] for line in caplog.records if "refused" in line.getMessage()]
    assert reasons == ["CERTIFICATE_VERIFY_FAILED: certificate has expired"]


def test_the_links_certificates_may_change_but_not_be_added_or_removed(machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"tls\.link_ca_file: .*restart"):
        machine.tls.reload(a_config())
    (machine.folder / "link.pem").write_text("no certificate")
    before = machine.tls.link
    with pytest.raises(ConfigError, match=r"tls\.link_cert_file"):
        machine.tls.reload(machine.config)
    assert machine.tls.link is before

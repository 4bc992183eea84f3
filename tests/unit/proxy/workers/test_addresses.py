"""Names that change, fail, and take long."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import uvloop

from balanceroute.errors import CannotConnect, ConnectFailed
from balanceroute.proxy.workers import addresses as module
from balanceroute.proxy.workers.addresses import FRESH_S, PATIENCE_S, Addresses, look_up
from balanceroute.proxy.workers.upstream import Upstream
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time
from tests.waiting import PATIENCE_S as LONG_S
from tests.waiting import until

LOST = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class Names:
    """Stands for the system's resolver until the test ends."""

    def __init__(self, *addresses: str) -> None:
        self.addresses, self.error, self.takes_s, self.lookups = list(addresses), None, 0.0, 0
        module.look_up = self._look

    error: Exception | None

    async def _look(self, host: str) -> list[str]:
        self.lookups += 1
        await let_pass(self.takes_s)
        if self.error is not None:
            raise self.error
        return list(self.addresses)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "look_up", look_up)


class System:
    """Stands for `socket.getaddrinfo`: for a silent name it waits until the test's end, or `LONG_S`."""

    def __init__(self, addresses: dict[str, list[str]]) -> None:
        self.addresses = addresses
        self.asked, self.given_up, self.ended = list[str](), list[str](), threading.Event()

    def getaddrinfo(self, host: str, port: None, *, type: int) -> list[tuple[object, ...]]:
        self.asked.append(host)
        if host not in self.addresses:
            if not self.ended.wait(LONG_S):
                self.given_up.append(host)
            raise LOST
        return [(0, type, 6, "", (address, 0)) for address in self.addresses[host]]


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    """The system's resolver, which knows one name."""
    system = System({"d0": ["10.0.0.1", "10.0.0.2", "10.0.0.1"]})
    monkeypatch.setattr(socket, "getaddrinfo", system.getaddrinfo)
    yield system
    system.ended.set()


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("host", ["10.0.0.7", "::1", "fe80::1%eth0"])
@with_virtual_time
async def test_an_ip_address_needs_no_lookup(host: str) -> None:
    names, addresses = Names(), Addresses(host)
    addresses.doubt()
    assert await addresses.get() == [host] and names.lookups == 0


@with_virtual_time
async def test_concurrent_lookups_are_shared_and_cached_for_a_while() -> None:
    names, addresses = Names("10.0.0.1", "10.0.0.2"), Addresses("d0")
    names.takes_s = 2.0
    found = await asyncio.gather(*(addresses.get() for _ in range(20)))
    assert found == [["10.0.0.1", "10.0.0.2"]] * 20 and names.lookups == 1
    await let_pass(FRESH_S - 0.1)
    assert await addresses.get() == found[0] and names.lookups == 1
    names.addresses, names.takes_s = ["10.0.0.3"], 0.0
    await let_pass(0.2)
    assert await addresses.get() == ["10.0.0.3"] and names.lookups == 2


@with_virtual_time
async def test_an_unknown_name_is_an_error_and_is_looked_up_each_time() -> None:
    names, addresses = Names("10.0.0.1"), Addresses("d0")
    names.error = LOST
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="Temporary failure"):
            await addresses.get()
    names.error = None
    assert await addresses.get() == ["10.0.0.1"] and names.lookups == 3


@with_virtual_time
async def test_while_lookups_fail_the_last_addresses_are_used_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    names, addresses = Names("10.0.0.1"), Addresses("d0")
    await addresses.get()
    names.error = LOST
    for _ in range(10):
        await let_pass(FRESH_S + 1)
        assert await addresses.get() == ["10.0.0.1"]
    assert names.lookups == 11
    names.error, names.addresses = None, ["10.0.0.2"]
    await let_pass(FRESH_S + 1)
    assert await addresses.get() == ["10.0.0.2"]
    assert [record.getMessage() for record in caplog.records] == [
        "name not found: its last addresses are used",
        "name found again",
    ]


@with_virtual_time
async def test_a_slow_lookup_delays_few_callers_and_only_briefly() -> None:
    names, addresses = Names("10.0.0.1"), Addresses("d0")
    await addresses.get()
    await let_pass(FRESH_S)
    names.takes_s, names.addresses, began_s = 30.0, ["10.0.0.2"], now()
    assert await addresses.get() == ["10.0.0.1"]
    assert now() - began_s == pytest.approx(PATIENCE_S)
    assert await addresses.get() == ["10.0.0.1"]
    assert now() - began_s == pytest.approx(PATIENCE_S) and names.lookups == 2
    await let_pass(30.0)
    assert await addresses.get() == ["10.0.0.2"]


@with_virtual_time
async def test_doubtful_addresses_are_looked_up_at_once() -> None:
    names, addresses = Names("10.0.0.1"), Addresses("d0")
    await addresses.get()
    names.addresses = ["10.0.0.2"]
    addresses.doubt()
    assert await addresses.get() == ["10.0.0.2"]


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
@with_virtual_time
async def test_refusing_addresses_of_a_removed_name_are_forgotten(code: int) -> None:
    names, addresses = Names("10.0.0.1"), Addresses("d0")
    await addresses.get()
    names.error = socket.gaierror(code, "Name or service not known")
    await let_pass(FRESH_S + 1)
    assert await addresses.get() == ["10.0.0.1"]  # a pod that is not ready has no name, and may serve
    addresses.doubt()
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="not known"):
            await addresses.get()
    names.error, names.addresses = None, ["10.0.0.2"]
    assert await addresses.get() == ["10.0.0.2"]


@with_virtual_time
async def test_refusing_addresses_are_kept_while_no_name_server_answers() -> None:
    names, addresses = Names("10.0.0.1"), Addresses("d0")
    await addresses.get()
    names.error = LOST
    addresses.doubt()
    assert await addresses.get() == ["10.0.0.1"]


@with_virtual_time
async def test_a_failed_look_up_is_told_without_the_number_of_its_error(caplog: pytest.LogCaptureFixture) -> None:
    names, addresses = Names("10.0.0.1"), Addresses("d0")
    await addresses.get()
    names.error = LOST
    await let_pass(FRESH_S + 1)
    await addresses.get()
    assert [getattr(record, "error", "") for record in caplog.records] == ["Temporary failure in name resolution"]
    with pytest.raises(ConnectFailed, match=r"^cannot connect: Temporary failure in name resolution$"):
        await Upstream("http://d1:9000").request("GET", "/health")


@with_virtual_time
async def test_the_preferred_address_stays_first_while_the_name_resolves_to_it() -> None:
    names = Names("10.0.0.1", "10.0.0.2", "10.0.0.3")
    addresses = Addresses("d0.cluster")
    assert await addresses.get() == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    addresses.prefer("10.0.0.2")
    for _ in range(2):
        assert await addresses.get() == ["10.0.0.2", "10.0.0.1", "10.0.0.3"]
        addresses.doubt()
    names.addresses = ["10.0.0.9", "10.0.0.3"]
    assert await addresses.get() == ["10.0.0.9", "10.0.0.3"]


@with_virtual_time
async def test_a_waiter_may_be_cancelled_and_the_others_get_their_answer() -> None:
    names, addresses = Names("10.0.0.1"), Addresses("d0")
    names.takes_s = 2.0
    first, second = asyncio.ensure_future(addresses.get()), asyncio.ensure_future(addresses.get())
    await let_pass(1.0)
    first.cancel()
    assert await second == ["10.0.0.1"] and first.cancelled()


LOOPS = pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])


@LOOPS
def test_a_name_is_found_while_the_name_server_is_silent_on_hundreds_of_others(
    system: System, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def test() -> None:
        others = [asyncio.ensure_future(Addresses(f"silent-{number}").get()) for number in range(200)]
        await until(lambda: len(system.asked) == len(others))
        assert await Addresses("d0").get() == ["10.0.0.1", "10.0.0.2"]
        system.ended.set()
        for other in others:
            with pytest.raises(socket.gaierror, match="Temporary failure"):
                await other

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(test())


@LOOPS
def test_a_process_ends_without_the_lookups_under_way(
    system: System, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def test() -> None:
        asking = asyncio.ensure_future(Addresses("silent").get())
        await until(lambda: system.asked)
        asking.cancel()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(test())
    threads = [thread for thread in threading.enumerate() if thread.name == "look-up"]
    assert threads and all(thread.daemon for thread in threads) and not system.given_up
    system.ended.set()
    for thread in threads:
        thread.join()  # its answer comes when the loop has ended


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_what_is_no_name_is_an_error(host: str) -> None:
    with pytest.raises(UnicodeError):
        asyncio.run(Addresses(host).get())


@with_virtual_time
async def test_a_missing_thread_is_the_routers_own_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(CannotConnect, match="Cannot allocate memory"):
        await Upstream("http://d0.cluster:1").request("GET", "/health")

"""Relays of several machines (run folders) before one brain, joined by TCP and TLS."""

import asyncio
import json
import os
import re
import shutil
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from balanceroute.config.addresses import host_in_url
from balanceroute.proxy.link.hub import Patience
from tests.e2e.routers import LONG, Authority, Router, a_folder, a_router, all_end, streams
from tests.plain_http import PLAIN
from tests.ports import free_base_port, loopback
from tests.processes import Cluster, complete_lines, end_group
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, slots=True)
class Machines:
    """The brain's, which has a relay too, and those of relays alone."""

    brain: Router
    relays: list[Router]
    port: int
    authority: Authority

    @property
    def logs(self) -> str:
        return "".join(router.log.read_text() for router in (self.brain, *self.relays))


@asynccontextmanager
async def machines(
    cluster: Cluster, folder: Path, standbys: int = 0, host: str = "127.0.0.1", names: Sequence[str] = ("a", "b")
) -> AsyncIterator[Machines]:
    authority, port = Authority(folder), free_base_port((0,))
    address = f"{host_in_url(host)}:{port}"
    async with AsyncExitStack() as stack:
        flags = [*authority.flags(), "--set", f"listen.link={address}"]
        home = a_folder(folder, "brain")
        brain = await stack.enter_async_context(a_router(cluster, home, *flags, host=host, relays=1, standbys=standbys))
        flags = [*authority.flags(), "--set", f"listen.brains={json.dumps([address])}"]
        relays = [
            await stack.enter_async_context(a_router(cluster, a_folder(folder, name), *flags, host=host, relays=1))
            for name in names
        ]
        yield Machines(brain, relays, port, authority)


def with_machines(
    test: Callable[[Machines], Awaitable[None]],
    cluster: Cluster,
    folder: Path,
    standbys: int = 0,
    host: str = "127.0.0.1",
    names: Sequence[str] = ("a", "b"),
) -> None:
    async def run() -> None:
        async with machines(cluster, folder, standbys, host, names) as those:
            await test(those)
            await until(those.brain.holds_nothing)
            await until(lambda: not cluster.holds_kv())
            assert "Traceback" not in those.logs and '"internal error"' not in those.logs

    asyncio.run(run())


def test_relays_of_other_machines_answer_like_the_brains_own_relays(cluster: Cluster, tmp_path: Path) -> None:
    async def test(those: Machines) -> None:
        begun = [stream for n, router in enumerate(those.relays) for stream in streams(router, 6, 30, first=20 * n)]
        assert await all_end(begun) == 12
        finished = r'balanceroute_requests_total\{outcome="finished"\} (\S+)'

        async def counted(router: Router) -> bool:
            found = re.search(finished, (await router.get("/metrics")).text)
            return found is not None and float(found[1]) == 12

        for router in (those.brain, *those.relays):
            await until(lambda: counted(router))  # noqa: B023
            assert len((await router.state())["workers"]) == 2
            assert (await router.get("/dashboard")).status_code == 200

    with_machines(test, cluster, tmp_path, host=loopback())  # that is IPv6; all other tests use 127.0.0.1


def test_slots_of_a_dead_relay_machine_become_free_for_the_others(cluster: Cluster, tmp_path: Path) -> None:
    async def test(those: Machines) -> None:
        (dies,), stays = those.relays, those.brain
        lost = streams(dies, 4, 1000)
        await until(lambda: all(stream.begun for stream in lost))
        kept = streams(stays, 4, 70, first=50)
        await until(lambda: all(stream.begun for stream in kept))
        end_group(dies.running)

        async def are_free() -> bool:
            return await those.brain.active() <= 4

        await until(are_free)
        assert await all_end(streams(stays, 4, 20, first=80)) == 4
        assert await all_end(kept) == 4 and await all_end(lost) == 0

    async def run() -> None:
        async with machines(cluster, tmp_path, names=("a",)) as those:
            await test(those)
            await until(those.brain.holds_nothing)

    asyncio.run(run())


@pytest.mark.parametrize(("number", "standbys"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)], ids=["killed", "stopped"])
def test_relays_of_other_machines_survive_the_death_of_the_brain(
    cluster: Cluster, tmp_path: Path, number: signal.Signals, standbys: int
) -> None:
    async def test(those: Machines) -> None:
        begun = [stream for n, router in enumerate(those.relays) for stream in streams(router, 4, 200, first=20 * n)]
        await until(lambda: all(stream.begun for stream in begun))
        struck = datetime.now(UTC)
        os.kill(those.brain.brains[-1], number)
        later = [
            stream for n, router in enumerate(those.relays) for stream in streams(router, 3, 20, first=50 + 20 * n)
        ]
        complete = await all_end(begun)
        assert await all_end(later) == 6
        await until(lambda: len(those.brain.brains) >= 2)  # it may decide before it says that it listens
        assert len(those.brain.brains) == 2 or standbys  # on a busy machine the next one may seem to stand still, too
        void = sum(line["void"] for line in those.brain.logged("relay joined"))
        assert 8 - void <= complete <= 8
        late = [line for line in those.brain.logged("the brain decides")[1:] if line["relays"] < 3]
        assert not void or late  # a relay that does not come in time finds its slots taken
        waited = [datetime.fromisoformat(line["time"]) - struck for line in late]
        assert all(each.total_seconds() >= Patience().grace_s for each in waited)

    with_machines(test, cluster, tmp_path, standbys)


@pytest.mark.parametrize("epoch", ["", "100"], ids=["its clock is right", "its clock is behind"])
def test_far_relays_rejoin_a_brain_machine_that_lost_its_run_folder(
    cluster: Cluster, tmp_path: Path, epoch: str
) -> None:
    """Its run folder is in memory, so it knows no epoch of before, which relays of other machines have seen."""

    async def run() -> None:
        async with machines(cluster, tmp_path, names=("a",)) as those:
            (far,) = those.relays
            begun = streams(far, 4, 500)
            await until(lambda: all(stream.begun for stream in begun))
            end_group(those.brain.running)
            flags = [*those.authority.flags(), "--set", f"listen.link=127.0.0.1:{those.port}"]
            folder = a_folder(tmp_path, "empty")
            (folder / "lead").write_text(epoch)
            async with a_router(cluster, folder, *flags, relays=1) as brain:
                assert await all_end(streams(far, 4, 20, first=100)) == 4
                assert await all_end(begun) == 4
                await until(brain.holds_nothing)
                assert len(brain.brains) == 1

    asyncio.run(run())


def test_a_new_version_takes_over_at_the_brain_s_machine_and_at_the_others(cluster: Cluster, tmp_path: Path) -> None:
    async def run() -> None:
        async with machines(cluster, tmp_path) as those:
            begun = [stream for n, router in enumerate(those.relays) for stream in streams(router, 3, 200, first=9 * n)]
            await until(lambda: all(stream.begun for stream in begun))
            link, brains = f"listen.link=127.0.0.1:{those.port}", f"listen.brains=[127.0.0.1:{those.port}]"
            flags = [*those.authority.flags(), "--take-over", "--set"]
            async with AsyncExitStack() as stack:
                for router, where in ((those.brain, link), (those.relays[0], brains)):
                    port, folder = router.client.base_url.port, router.log.parent
                    assert port is not None
                    new = a_router(cluster, folder, *flags, where, port=port, relays=1, log_name="new.log")
                    await stack.enter_async_context(new)
                later = [stream for router in those.relays for stream in streams(router, 2, 20, first=100)]
                assert await all_end(later) == 4
                assert await all_end(begun) == 6
                for router in (those.brain, those.relays[0]):
                    await until(lambda: router.running.poll() == 0)  # noqa: B023
                assert await all_end(streams(those.relays[1], 2, 20, first=200)) == 2

    asyncio.run(run())


def test_a_machine_that_drains_finishes_its_streams(cluster: Cluster, tmp_path: Path) -> None:
    async def test(those: Machines) -> None:
        drains, stays = those.relays
        begun = streams(drains, 4, 70)
        await until(lambda: all(stream.begun for stream in begun))
        os.kill(drains.running.pid, signal.SIGTERM)
        assert await all_end(streams(stays, 4, 20, first=100)) == 4
        assert await all_end(begun) == 4
        await until(lambda: drains.running.poll() == 0)
        begun = streams(stays, 4, 2 * LONG)
        await until(lambda: all(stream.begun for stream in begun))
        with cluster.standing_still():
            os.kill(those.brain.running.pid, signal.SIGTERM)
            await until(lambda: those.brain.running.poll() == 0)  # it does not wait for other machines
        assert await all_end(begun) == 4

    async def run() -> None:
        async with machines(cluster, tmp_path) as those:
            await test(those)
            assert "Traceback" not in those.logs and '"internal error"' not in those.logs

    asyncio.run(run())


def test_a_peer_without_a_link_certificate_gets_no_answer_and_does_no_harm(cluster: Cluster, tmp_path: Path) -> None:
    async def answer_to(port: int, context: ssl.SSLContext | None, sent: bytes) -> bytes:
        """All that the brain sends to who says this, until it closes."""
        writer = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                writer.write(sent)
                return await reader.read()
        except (ConnectionError, ssl.SSLError):
            return b""
        finally:
            if writer is not None:
                writer.transport.abort()

    async def test(those: Machines) -> None:
        begun = streams(those.relays[0], 6, 70)
        await until(lambda: all(stream.begun for stream in begun))
        stranger = Authority(tmp_path, "stranger").client()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        nobody = ssl.create_default_context(cafile=str(those.authority.ca))
        http = b"GET /state HTTP/1.1\r\nhost: brain\r\n\r\n"
        for context in (stranger, nobody):
            assert await answer_to(those.port, context, http) == b""
            assert b"workers" not in await answer_to(those.port, context, b"\x00\x00\x00\x05hello")
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(70_000), b"\x00" * 100):
            assert b"workers" not in await answer_to(those.port, None, sent)
        ours = those.authority.client()
        ours.set_alpn_protocols(["balanceroute-link"])
        assert await answer_to(those.port, ours, b"") == b""  # no Hello
        assert await answer_to(those.port, ours, b"\xff\xff\xff\xff") == b""
        assert await all_end(begun) == 6
        assert len(those.brain.brains) == 1 and not those.brain.logged("relay lost")
        await until(lambda: those.brain.logged("connections to listen.link refused"))

    with_machines(test, cluster, tmp_path, names=("a",))


def test_a_relay_that_the_brain_does_not_let_in_says_why_and_is_not_ready(cluster: Cluster, tmp_path: Path) -> None:
    async def run() -> None:
        async with machines(cluster, tmp_path, names=("a",)) as those:
            stranger = a_folder(tmp_path, "stranger")
            await _is_refused(those, cluster, stranger, Authority(tmp_path, "other"), "CERTIFICATE_VERIFY_FAILED")
            namesake = a_folder(tmp_path, "namesake")
            shutil.copy(tmp_path / "a" / "identity", namesake)
            await _is_refused(those, cluster, namesake, those.authority, "a relay of this name is here")

    asyncio.run(run())


async def _is_refused(those: Machines, cluster: Cluster, folder: Path, authority: Authority, reason: str) -> None:
    port, log = free_base_port((0,)), folder / "router.log"
    flags = [*authority.flags(), "--set", f"listen.brains=[127.0.0.1:{those.port}]"]
    waiting = asyncio.get_running_loop().create_task(_run_until_cancelled(cluster, folder, flags, port))

    def says_why() -> bool:  # another reason may come first: a brain on a busy machine does not answer in time
        lines = complete_lines(log) if log.exists() else []
        return any("this relay cannot join a brain" in line and reason in line for line in lines)

    await until(says_why)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, **PLAIN) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def _run_until_cancelled(cluster: Cluster, folder: Path, flags: list[str], port: int) -> None:
    async with a_router(cluster, folder, *flags, port=port, relays=1):
        raise AssertionError("it is ready")

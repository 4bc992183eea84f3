"""Two routers as processes that name one Lease: one serves, and the other takes over."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.api_server import ApiServer, an_api_server
from tests.e2e.routers import SLOTS, Authority, Router, a_folder, a_router, all_end, keeps_asking, streams
from tests.plain_http import PLAIN
from tests.ports import free_base_port
from tests.processes import Cluster, end_group, forked_process
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.e2e
DURATION_S = 12  # a leader on a busy machine must not lose it


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    account = tmp_path / "account"
    account.mkdir()
    with an_api_server(account) as running:
        host, port = running.url.removeprefix("https://").split(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        yield running


def flags(server: ApiServer) -> list[str]:
    settings = {"lease": "router", "lease_duration_s": DURATION_S, "service_account": server.account}
    return [part for name, value in settings.items() for part in ("--set", f"listen.{name}={value}")]


def kill(router: Router) -> None:
    end_group(router.running)


def drain(router: Router) -> None:
    os.kill(router.running.pid, signal.SIGTERM)


@pytest.mark.parametrize("ends", [kill, drain])
def test_a_second_pod_leads_when_the_first_one_ends(
    cluster: Cluster, tmp_path: Path, server: ApiServer, ends: object
) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()

    async def second() -> int:
        """Waits until it leads, and serves then."""
        async with a_router(cluster, folders[1], *flags(server), relays=1) as router:
            served = await all_end(streams(router, 4, 20, first=100))
            await until(router.holds_nothing)
            return served

    async def run() -> None:
        async with a_router(cluster, folders[0], *flags(server), relays=1) as router:
            holder = server.spec["holderIdentity"]
            assert await all_end(streams(router, 4, 20)) == 4
            other = asyncio.get_running_loop().create_task(second())
            log = folders[1] / "router.log"
            await until(lambda: log.exists() and "who holds the lease" in log.read_text())
            begun = streams(router, 4, 70 if ends is drain else 1000)  # who is killed ends none
            await until(lambda: all(stream.begun for stream in begun))
            assert server.spec["holderIdentity"] == holder and '"epoch"' not in log.read_text()
            assert callable(ends)
            ends(router)
            assert await other == 4
            assert server.spec["holderIdentity"] != holder and server.spec["leaseTransitions"] >= 2
            complete = await all_end(begun)
            assert complete == (4 if ends is drain else 0)

    asyncio.run(run())


def test_a_standby_pod_reloads_other_slots_that_the_leader_refuses_and_leads_with_them(
    cluster: Cluster, tmp_path: Path, server: ApiServer
) -> None:
    file, folder, log = tmp_path / "router.yaml", tmp_path / "b", tmp_path / "b.log"
    file.write_text(cluster.config.read_text())
    folder.mkdir()
    command = ["serve", "--config", str(file), "--relays", "1", "--host", "127.0.0.1", "--port", "0"]
    command += ["--set", f"listen.run_folder={folder}", "--set", "listen.standbys=0", *flags(server)]

    async def run() -> None:
        async with a_router(replace(cluster, config=file), tmp_path, *flags(server), relays=1) as first:
            with forked_process(*command, log=log) as running:
                second = Router(log, running, first.client)
                await until(lambda: "who holds the lease" in log.read_text() and bool(second.relays))
                file.write_text(cluster.config.read_text().replace(f"max_num_seqs: {SLOTS}", "max_num_seqs: 7"))
                for router in (first, second):
                    router.running.send_signal(signal.SIGHUP)
                await until(lambda: first.logged("reload refused"))
                await until(lambda: len(second.logged("configuration reloaded")) == 2)  # the relay, and the brain
                kill(first)
                await until(lambda: second.brains)
                (port,) = {line["port"] for line in second.logged("listening") if "relay" in line}
                async with httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, **PLAIN
                ) as client:
                    state = await Router(log, running, client).state()
                assert {worker["slots"] for worker in state["workers"]} == {7}

    asyncio.run(run())


def test_a_router_that_takes_over_from_the_leader_keeps_the_lease_beside_a_standby_pod(
    cluster: Cluster, tmp_path: Path, server: ApiServer
) -> None:
    port, standby, log = free_base_port((0,)), tmp_path / "b", tmp_path / "b.log"
    standby.mkdir()
    command = ["serve", "--config", str(cluster.config), "--relays", "1", "--host", "127.0.0.1", "--port", "0"]
    command += ["--set", f"listen.run_folder={standby}", *flags(server)]

    async def run() -> None:
        async with a_router(cluster, tmp_path, *flags(server), port=port, relays=1) as old:
            holder = server.spec["holderIdentity"]
            with forked_process(*command, log=log):
                await until(lambda: "who holds the lease" in log.read_text())
                begun, ended = streams(old, 4, 70), asyncio.Event()
                await until(lambda: all(stream.begun for stream in begun))
                clients = [asyncio.get_running_loop().create_task(keeps_asking(old, n, ended)) for n in range(4)]
                async with a_router(
                    cluster, tmp_path, "--take-over", *flags(server), port=port, relays=1, log_name="new.log"
                ) as new:
                    await until(lambda: bool(new.brains))
                    assert await all_end(begun) == 4
                    await until(lambda: old.running.poll() is not None)
                    assert old.running.returncode == 0
                    assert await all_end(streams(new, 4, 20, first=300)) == 4
                    ended.set()
                    assert all([await client for client in clients])
                    await until(new.holds_nothing)
                    assert server.spec["holderIdentity"] == holder
                    assert '"epoch"' not in log.read_text()

    asyncio.run(run())


def test_a_brain_of_another_machine_leads_when_it_gets_the_lease(
    cluster: Cluster, tmp_path: Path, server: ApiServer
) -> None:
    """Two machines that may decide, and one of relays alone, which has both in its list."""
    authority, base = Authority(tmp_path), free_base_port((0, 1))
    ports = [base, base + 1]
    folders = [a_folder(tmp_path, name) for name in ("a", "b", "c")]
    brains = "[" + ", ".join(f"127.0.0.1:{port}" for port in ports) + "]"

    def at(port: int) -> list[str]:
        return [*flags(server), *authority.flags(), "--set", f"listen.link=127.0.0.1:{port}"]

    async def second() -> None:
        """Stands by until it leads, and then until it is cancelled."""
        async with a_router(cluster, folders[1], *at(ports[1]), relays=1):
            await asyncio.Event().wait()

    async def run() -> None:
        async with (
            a_router(cluster, folders[0], *at(ports[0]), relays=1) as first,
            a_router(cluster, folders[2], *authority.flags(), "--set", f"listen.brains={brains}", relays=1) as relays,
        ):
            other = asyncio.get_running_loop().create_task(second())
            log = folders[1] / "router.log"
            await until(lambda: log.exists() and "who holds the lease" in log.read_text())
            begun = streams(relays, 4, 1000)
            await until(lambda: all(stream.begun for stream in begun))
            kill(first)
            later = streams(relays, 3, 20, first=100)
            assert await all_end(later) == 3 and not other.done()
            assert await all_end(begun) == 4
            assert server.spec["leaseTransitions"] >= 2
            await until(relays.holds_nothing)
            await until(lambda: not cluster.holds_kv())
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

    asyncio.run(run())

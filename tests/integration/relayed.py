"""A brain and its relays in front of an emulated cluster, all in the test's own event loop, over real sockets."""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from balanceroute.config import Config
from balanceroute.emulator import ClusterShape, EmulatedCluster
from balanceroute.engine.tokens import continuation, decode
from balanceroute.proxy.brain import BrainServer
from balanceroute.proxy.brain_app import BrainApp, BrainSetup, create_brain_app
from balanceroute.proxy.link.leadership import FileLead
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.relay import RelayApp, RelayServer, create_relay_app
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.relay_locks import RelayLocks, relay_name
from balanceroute.proxy.server import Server
from tests.integration.router import FAST, configuration, patient
from tests.integration.test_proxy_answers import completion
from tests.plain_http import PLAIN
from tests.waiting import until

LINEAGE = 7
SLOW = ClusterShape(prefillers=1, decoders=2, max_num_seqs=2, time_scale=1.0)


@dataclass(frozen=True, slots=True)
class Relay:
    """One relay, and a client that is connected to it alone."""

    app: RelayApp
    client: httpx.AsyncClient
    server: RelayServer


@dataclass(frozen=True, slots=True)
class Relayed:
    """A running router of several parts."""

    config: Config
    folder: RunFolder
    brain: BrainApp
    relays: list[Relay]
    cluster: EmulatedCluster

    async def settled(self) -> None:
        """Wait until nothing is held by anybody."""

        def nothing_held() -> bool:
            relays = [relay.app.services for relay in self.relays]
            held = [[*relay.tickets.by_id, *relay.legs] or relay.exchanges or relay.drainer.pending for relay in relays]
            return not any(held) and not self.brain.services.ledger.scheduler.snapshot.requests and self.cluster.idle()

        await until(nothing_held)
        services = self.brain.services
        services.ledger.scheduler.snapshot.check_invariants()
        await until(lambda: all(worker.in_use == 0 for worker in services.fleet))


@asynccontextmanager
async def serving(server: Server, sockets: list[socket.socket] | None = None) -> AsyncIterator[None]:
    """Run a server."""
    server.config.timeout_graceful_shutdown = 1
    task = asyncio.get_running_loop().create_task(server._serve(sockets))
    await until(lambda: server.started or task.done())
    try:
        yield
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def a_brain(
    config: Config, folder: RunFolder, relays: Collection[str] = ("relay-0", "relay-1"), again: bool = False
) -> AsyncIterator[BrainApp]:
    """One that leads, and waits for these relays; `again`: after another one."""
    lead = FileLead(folder.lead)
    await until(lead.take)
    try:
        setup = BrainSetup(LINEAGE, again=again)
        app = create_brain_app(Configured.read(config), folder, lead, relays, setup)
        async with serving(BrainServer(app, config, setup)):
            yield app
    finally:
        lead.release()


@asynccontextmanager
async def a_relay(config: Config, folder: RunFolder, name: str) -> AsyncIterator[Relay]:
    """One that has found a brain."""
    lock = RelayLocks(folder).lock(name)
    app = create_relay_app(Configured.read(config), folder, name, lock)
    server = RelayServer(app, config)
    with os.fdopen(lock), socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            serving(server, [listener]),
            httpx.AsyncClient(base_url=url, **PLAIN, timeout=120.0, limits=limits) as client,
        ):
            yield Relay(app, client, server)


@asynccontextmanager
async def relayed(
    shape: ClusterShape | None = None, count: int = 2, apart: bool = False, **overrides: Any
) -> AsyncIterator[Relayed]:
    """Run a cluster of this shape, a brain and so many relays. `apart`: of a router each; they share no memory."""
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="relayed")))  # the path of a socket must be short
    try:
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(EmulatedCluster(patient(shape or FAST)))
            config = configuration(cluster, **overrides)
            names = [relay_name(number, 1 + number * apart) for number in range(count)]
            brain = await stack.enter_async_context(a_brain(config, folder, relays=names))
            relays = [await stack.enter_async_context(a_relay(config, folder, name)) for name in names]
            await until(lambda: brain.hub.settled.is_set() and len(brain.hub.members) == count)
            await until(lambda: all(relay.app.services.known.is_set() for relay in relays))
            await until(lambda: not any(worker.unknown for worker in brain.services.fleet))
            yield Relayed(config, folder, brain, relays, cluster)
    finally:
        shutil.rmtree(folder.folder)


async def answered(relay: Relay, number: int) -> None:
    """A prompt of its own is answered with the tokens that follow it."""
    prompt = list(range(1000 + number, 1030 + number))
    body = completion(prompt=prompt, max_tokens=20)
    answer = await relay.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == decode(continuation(prompt, 20))

"""A router in front of an emulated cluster, both in the test's own event loop, over loopback sockets."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx

from balanceroute.config import Config, validate
from balanceroute.core.types import Role
from balanceroute.emulator import ClusterShape, EmulatedCluster
from balanceroute.emulator.connectors import DEFAULT_LEASE_S
from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.app import RouterApp, create_app
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.server import Server
from tests.plain_http import PLAIN
from tests.waiting import until


@dataclass(frozen=True, slots=True)
class Router:
    """A running router: its client, its application, the cluster behind it."""

    client: httpx.AsyncClient
    app: RouterApp
    cluster: EmulatedCluster
    url: str

    async def state(self) -> dict[str, Any]:
        return (await self.client.get("/state")).json()

    async def settled(self) -> None:
        """Wait until neither router nor cluster holds anything; fails with what is left.

        Pinned KV that the router has given up, and has counted, is no leak: its leases end here and now.
        """
        services = self.app.services

        def is_settled() -> bool:
            if self._empty() and self._only_orphans():
                for worker in self.cluster.prefill:
                    worker.end_leases()
            return self._empty() and self.cluster.idle()

        try:
            await until(is_settled)
        except AssertionError:
            raise AssertionError(f"still held: {await self.state()} {self.cluster.state()}") from None
        services.ledger.scheduler.snapshot.check_invariants()
        assert services.legs == set()
        assert services.tickets.by_id == {}
        assert all(worker.in_use == 0 for worker in services.fleet)

    def _empty(self) -> bool:
        services = self.app.services
        snapshot = services.ledger.scheduler.snapshot
        return (
            not snapshot.requests
            and services.exchanges == 0
            and services.drainer.pending == 0
            and all(p.inflight == 0 and p.pinned == 0 for p in snapshot.prefillers)
        )

    def _only_orphans(self) -> bool:
        pinned = sum(len(worker.prefiller.pinned) for worker in self.cluster.prefill)
        served = any(any(worker.queue_counts()) for worker in self.cluster.workers.values())
        return not served and 0 < pinned <= self.app.services.metrics.orphaned_kv


def configuration(cluster: EmulatedCluster, **overrides: Any) -> Config:
    """A configuration for this cluster; overrides are sections or plain settings."""
    shape = cluster.shape
    ranks = shape.ranks_per_url
    tree: dict[str, Any] = {
        "connector": str(shape.connector),
        "prefill": {"workers": [{"url": url} for url in cluster.prefill_urls], "poll_interval_s": 0.2},
        "decode": {
            "workers": [
                {"url": url, "dp_rank": rank} if ranks > 1 else {"url": url}
                for url in cluster.decode_urls
                for rank in range(ranks)
            ],
            "max_num_seqs": shape.max_num_seqs,
            "overlap_requests": 0,  # `auto` goes by measured times, which a busy machine makes longer
        },
        "routing": {"policy": "br_0"},
        "predictor": {"kind": "none"},
        "health": {"interval_s": 0.2},
    }
    if shape.connector == "mooncake_layerwise":
        tree["layerwise"] = {"callback_url": "http://router"}
    elif shape != patient(replace(shape, lease_s=None)):
        tree["prefill"]["kv_pin_s"] = shape.pin_lease_s * shape.time_scale
    for name, value in overrides.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return validate(tree)


JUDGED_S = 1.5  # a limit of workers: the router notices, and does not count, each of its own pauses that takes so long


async def looked_on(services: Services, seconds: float) -> None:
    """Wait until the reaper has looked on for so long: what it moves after that time has moved."""
    from_s = services.ledger.now()
    await until(lambda: services.last_look_s >= from_s + seconds)


async def pushed_back(router: Router, role: str) -> None:
    """Wait until every worker of that role has refused requests twice in a row; each time it rests longer."""
    workers = router.app.services.fleet.of(Role(role))
    await until(lambda: all(worker.circuit.failures >= 2 for worker in workers))


Sent = tuple[str, str, dict[str, str]]
"""Method, path and headers of a request to a worker."""


def sent_to_workers(services: Services) -> list[Sent]:
    """What goes to the workers from here on, but for polls of their health and metrics."""
    seen: list[Sent] = []
    for worker in services.fleet:
        send = worker.upstream.request

        async def noted(
            method: str, path: str, body: bytes = b"", headers: Any = b"", *, send: Any = send, **rest: Any
        ) -> Any:
            if path not in ("/health", "/metrics"):
                lines = headers.splitlines() if isinstance(headers, bytes) else [b"%b: %b" % each for each in headers]
                seen.append((method, path, dict(line.decode().split(": ", 1) for line in lines)))
            return await send(method, path, body, headers, **rest)

        worker.upstream.request = noted  # type: ignore[method-assign]
    return seen


@asynccontextmanager
async def served(app: RouterApp, send_buffer_bytes: int | None = None) -> AsyncIterator[str]:
    """Serve an application on a free loopback port with the server that `serve` ships; yields its URL.

    `send_buffer_bytes`: of each connection; None: the kernel's own, which is megabytes.
    """
    listen = app.config.listen.model_copy(update={"host": "127.0.0.1", "port": 0})
    server = Server(app, app.config.model_copy(update={"listen": listen}))
    server.config.timeout_graceful_shutdown = 1
    task = asyncio.get_running_loop().create_task(server._serve())
    await until(lambda: server.started or task.done())
    if task.done():
        task.result()
    listener = server.servers[0].sockets[0]
    if send_buffer_bytes is not None:
        with socket.socket(fileno=os.dup(listener.fileno())) as shared:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def patient(shape: ClusterShape) -> ClusterShape:
    """The shape with a lease that is, unless it sets one, the connector's own in real time, whatever the time scale.

    One of a second would run out while a busy machine lets the test stand still: decoders would read other KV.
    """
    if shape.lease_s is not None:
        return shape
    return replace(shape, lease_s=DEFAULT_LEASE_S[shape.connector] / shape.time_scale)


@asynccontextmanager
async def running(
    shape: ClusterShape | None = None,
    *,
    forecasts: Forecasts | None = None,
    adjust: Callable[[Config], Config] = lambda config: config,
    send_buffer_bytes: int | None = None,
    **overrides: Any,
) -> AsyncIterator[Router]:
    """Run a cluster of this shape and a router in front of it."""
    async with EmulatedCluster(patient(shape or FAST)) as cluster:
        config = adjust(configuration(cluster, **overrides))
        app = create_app(config, forecasts=forecasts, strict=True)
        callbacks = httpx.AsyncClient(transport=httpx.ASGITransport(app), trust_env=False, timeout=None)
        cluster.route_metaserver(callbacks)
        # idle connections are left before the emulated servers close them, also where a busy machine is late
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        async with (
            served(app, send_buffer_bytes) as url,
            httpx.AsyncClient(base_url=url, **PLAIN, timeout=120.0, limits=limits) as client,
        ):
            urls = {*cluster.prefill_urls, *cluster.decode_urls}
            known = [worker for worker in app.services.fleet if worker.spec.url in urls]
            await until(lambda: not any(worker.unknown for worker in known))
            yield Router(client, app, cluster, url)


FAST = ClusterShape(prefillers=2, decoders=4, max_num_seqs=8, time_scale=0.02)

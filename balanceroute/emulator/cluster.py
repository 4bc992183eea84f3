"""An emulated cluster in one event loop: prefillers, decode ranks at one barrier, their servers and their faults;
all of it, or the part that a process of its own runs (`processes.py`).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from balanceroute.emulator.app import Site, create_app
from balanceroute.emulator.clock import EmulatedClock
from balanceroute.emulator.connectors import KvExchange
from balanceroute.emulator.decode import DecodeWorker
from balanceroute.emulator.decode_group import DecodeGroupRunner
from balanceroute.emulator.errors import ApiError
from balanceroute.emulator.faults import WORKER_KINDS, Fault, FaultKind
from balanceroute.emulator.prefill import PrefillWorker
from balanceroute.emulator.remote import SIDE_CHANNEL_PORT, PrefillSide, RemoteKv
from balanceroute.emulator.server import HttpServer
from balanceroute.emulator.shape import ClusterShape
from balanceroute.emulator.transport import App, StreamingTransport
from balanceroute.emulator.worker import Worker
from balanceroute.errors import ConfigError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
WILDCARDS = {"": HOST, "0.0.0.0": HOST, "::": "::1"}  # listening address -> address for clients


@dataclass(frozen=True, slots=True)
class Part:
    """The workers of a cluster that one process runs, by number; `prefill_urls` are those of the others' prefillers."""

    prefillers: range
    decoders: range
    prefill_urls: tuple[str, ...] = ()


class EmulatedCluster:
    """`async with EmulatedCluster(shape) as cluster:` runs it.

    listen: open loopback ports (`prefill_ports`, `decode_ports`; 0 or none given: free ones). Without, the
    URLs exist only for `transport()`, which works on any loop, a virtual one included.
    """

    def __init__(
        self,
        shape: ClusterShape | None = None,
        *,
        listen: bool = True,
        host: str = HOST,
        prefill_ports: Sequence[int] | None = None,
        decode_ports: Sequence[int] | None = None,
        part: Part | None = None,
    ) -> None:
        self.shape = shape = shape or ClusterShape()
        part = part or Part(range(shape.prefillers), range(shape.decoders))
        self._listen = listen
        self._host = host
        size, prefillers = shape.ranks_per_url, len(part.prefillers)
        urls = len(part.decoders) // size
        self._ports = [*(prefill_ports or [0] * prefillers), *(decode_ports or [0] * urls)]
        if len(self._ports) != prefillers + urls:
            raise ConfigError("emulated cluster: as many ports as URLs are needed")
        clock, wake = EmulatedClock(shape.time_scale), asyncio.Event()
        exchange = self._exchange = RemoteKv(part.prefill_urls) if part.prefill_urls else KvExchange()
        self.prefill = [PrefillWorker(f"p{i}", shape, clock, exchange, SIDE_CHANNEL_PORT + i) for i in part.prefillers]
        self.decode = [DecodeWorker(f"d{i}", shape, clock, exchange, wake, self._post_json) for i in part.decoders]
        self._runner = DecodeGroupRunner(self.decode, shape.step_time, clock, wake)
        self._sites = [Site([worker], shape, self) for worker in self.prefill]
        self._sites += [Site(self.decode[url * size : (url + 1) * size], shape, self) for url in range(urls)]
        self.prefill_urls: list[str] = []
        self.decode_urls: list[str] = []
        self._servers: list[HttpServer] = []
        self._apps: dict[str, App] = {}  # applications for the in-process transport, by host:port
        self._tasks: list[asyncio.Task[None]] = []
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.aclose()
            raise
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(worker.run()) for worker in self.prefill]
        if self.decode:
            self._tasks.append(loop.create_task(self._runner.run()))
        for task in self._tasks:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop everything: ports closed, connections cut, tasks ended."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers))
        if self._client is not None:
            await self._client.aclose()
        if isinstance(self._exchange, RemoteKv):
            await self._exchange.aclose()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A worker's own task must not end before the cluster: a bug here must not look like a slow engine."""
        if not task.cancelled() and task.exception() is not None:
            logger.error("emulator task failed", exc_info=task.exception())
            for worker in self.workers.values():
                worker.kill_engine()

    @property
    def workers(self) -> dict[str, Worker]:
        """All workers by name: p0, p1, ..., d0, d1, ..."""
        return {worker.name: worker for worker in [*self.prefill, *self.decode]}

    def transport(self) -> StreamingTransport:
        """An httpx transport that reaches the workers without sockets."""
        return StreamingTransport(self._apps)

    def route_metaserver(self, client: httpx.AsyncClient) -> None:
        """Let layerwise callbacks use `client`, e.g. to reach a router that runs in process."""
        self._client = client

    def state(self) -> dict[str, Any]:
        """The state of every worker, and violations."""
        workers = [worker.state() for worker in self.workers.values()]
        return {
            "workers": {state["name"]: state for state in workers},
            "steps": self._runner.group.steps if self._runner.group is not None else 0,
            "step_totals": self._runner.totals.to_dict(),
            "late_s": self._runner.late_s,
            "barrier_stopped": self._runner.stopped,
            "violations": sum(sum(state["violations"].values()) for state in workers),
        }

    def kv(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a decode rank of another process about the prefillers here. Raises: KeyError."""
        return PrefillSide(self._exchange).answer(what, body)

    def violations(self) -> dict[str, int]:
        """The router's violations of the protocol, by kind, over all workers."""
        total: dict[str, int] = {}
        for worker in self.workers.values():
            for kind, count in worker.violations.items():
                total[kind] = total.get(kind, 0) + count
        return total

    def idle(self) -> bool:
        """Whether no worker holds anything: no request, no block, no pin."""
        return all(worker.kv.used == 0 and not any(worker.queue_counts()) for worker in self.workers.values())

    async def inject(self, worker: str, fault: Fault | FaultKind | str, **values: Any) -> None:
        """Put a fault on a worker: `inject("d0", "reset", after_events=3)`. Raises: ApiError when it makes no sense."""
        if not isinstance(fault, Fault):
            fault = Fault.from_json({"kind": str(fault), **values})
        target = self.workers.get(worker)
        if target is None:
            raise ApiError(f"fault: no worker {worker!r}, there are {', '.join(self.workers)}")
        if fault.kind in WORKER_KINDS:
            await self._act(target, fault)
        else:
            target.faults.add(fault)

    async def _act(self, worker: Worker, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.KILL_ENGINE:
                worker.kill_engine()
            case FaultKind.STOP:
                await self._stop(worker)
            case FaultKind.START:
                await self._start(worker)
            case FaultKind.STOP_BARRIER:
                self._runner.stopped = True
            case FaultKind.START_BARRIER:
                self._runner.resume()
            case FaultKind.CLEAR:
                worker.faults.clear()
                self._heal(worker)
            case FaultKind.SLOW_PREFILL if isinstance(worker, PrefillWorker):
                worker.prefiller.slowdown = fault.factor
            case FaultKind.FREEZE | FaultKind.UNFREEZE if isinstance(worker, DecodeWorker):
                worker.rank.stalled = fault.kind is FaultKind.FREEZE
                self._runner.wake()
            case FaultKind.PAUSE if isinstance(worker, DecodeWorker):
                if worker.rank.running:
                    worker.rank.pause(next(iter(worker.rank.running)))
            case FaultKind.RESUME if isinstance(worker, DecodeWorker):
                worker.rank.resume()
                self._runner.wake()
            case FaultKind.RECOMPUTE_NOW if isinstance(worker, DecodeWorker):
                worker.pop_last()
            case _:
                raise ApiError(f"fault: {fault.kind} makes no sense on {worker.name}")

    def _heal(self, worker: Worker) -> None:
        if isinstance(worker, PrefillWorker):
            worker.prefiller.slowdown = 1.0
        elif isinstance(worker, DecodeWorker):
            worker.rank.stalled = False
            worker.rank.resume()
        self._runner.wake()

    async def _stop(self, worker: Worker) -> None:
        """Kill the process behind a worker's URL: all its ranks go."""
        index, site = self._site_of(worker)
        if self._servers:
            await self._servers[index].stop()
        self._apps.pop(self._netloc(index), None)
        for member in site.workers:
            member.go_down()

    async def _start(self, worker: Worker) -> None:
        index, site = self._site_of(worker)
        if worker.up and not worker.dead:
            raise ApiError(f"fault: {worker.name} is up already")
        for member in site.workers:
            member.come_back()
        if self._servers and not self._servers[index].listening:
            await self._servers[index].start()
        self._apps[self._netloc(index)] = create_app(site)

    def _site_of(self, worker: Worker) -> tuple[int, Site]:
        return next((index, site) for index, site in enumerate(self._sites) if worker in site.workers)

    def _netloc(self, index: int) -> str:
        return httpx.URL([*self.prefill_urls, *self.decode_urls][index]).netloc.decode()

    async def _open(self) -> None:
        apps = [create_app(site) for site in self._sites]
        if self._listen:
            self._servers = [HttpServer(app, self._host, port) for app, port in zip(apps, self._ports, strict=True)]
            for server in self._servers:
                await server.start()
            ports = [server.port for server in self._servers]
        else:
            ports = [port or SIDE_CHANNEL_PORT + 100 + index for index, port in enumerate(self._ports)]
        urls = [f"http://{reached_at(self._host)}:{port}" for port in ports]
        self.prefill_urls = urls[: len(self.prefill)]
        self.decode_urls = urls[len(self.prefill) :]
        self._apps.update({url.removeprefix("http://"): app for url, app in zip(urls, apps, strict=True)})

    async def _post_json(self, url: str, body: Mapping[str, Any]) -> None:
        """POST for layerwise callbacks; the status is ignored. Raises: OSError on transport errors."""
        if self._client is None:
            self._client = httpx.AsyncClient(trust_env=False, timeout=None)
        try:
            await self._client.post(url, json=dict(body))
        except httpx.TransportError as error:
            raise OSError(str(error)) from error


def reached_at(host: str) -> str:
    """The host for URLs, on this machine, of a server that listens on `host`."""
    name = WILDCARDS.get(host, host)
    return f"[{name}]" if ":" in name else name

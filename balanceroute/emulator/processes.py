"""The emulated cluster in several processes: what one process can't show is a worker that is stopped as a whole.

Each prefiller is a process, and the decode ranks are `groups` processes of equal size, each with a barrier of its own:
as many groups as ranks make independent ranks, one makes the group that one frozen rank silences. KV goes between them
over HTTP (`remote.py`). The parent starts them, ends them, and has a server of its own to ask and to break them:

    GET  /_emulator/state     every worker that answers, as `EmulatedCluster.state` says it, and how its process is
    POST /_emulator/fault     {"worker": "d0", "kind": ...}: handed on; `sigstop`, `sigcont`, `sigkill` and `respawn`
                              are for the whole process of that worker
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from types import TracebackType
from typing import Any, Final, Self

import httpx
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.emulator.app import json_response
from balanceroute.emulator.cluster import EmulatedCluster, Part, reached_at
from balanceroute.emulator.connectors import Connector
from balanceroute.emulator.faults import FaultKind
from balanceroute.emulator.server import HttpServer
from balanceroute.emulator.shape import ClusterShape
from balanceroute.errors import ConfigError

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 5.0
ASK_TIMEOUT_S: Final = 2.0  # a stopped process answers nothing
_SIGNALS: Final = {"sigstop": signal.SIGSTOP, "sigcont": signal.SIGCONT, "sigkill": signal.SIGKILL}


@dataclass(frozen=True, slots=True)
class Member:
    """One process: the workers that it runs, and their ports in the same order."""

    part: Part
    ports: tuple[int, ...]

    @property
    def role(self) -> str:
        """p: a prefiller, d: decode ranks."""
        return "p" if self.part.prefillers else "d"

    @property
    def names(self) -> list[str]:
        """The names of its workers."""
        return [f"p{index}" for index in self.part.prefillers] + [f"d{index}" for index in self.part.decoders]


def members_of(
    shape: ClusterShape, groups: int, host: str, prefill_ports: Sequence[int], decode_ports: Sequence[int]
) -> list[Member]:
    """The processes of a cluster. Raises: ConfigError: it can't be cut up like that."""
    if shape.connector is Connector.MOONCAKE_LAYERWISE:
        raise ConfigError("--processes: not with mooncake_layerwise, whose prefillers write into the decode ranks")
    size = shape.decoders // groups
    if size * groups != shape.decoders or size % shape.ranks_per_url:
        raise ConfigError(f"--processes {groups}: {shape.decoders} decode ranks can't be cut into so many equal groups")
    urls = tuple(f"http://{reached_at(host)}:{port}" for port in prefill_ports)
    members = [Member(Part(range(i, i + 1), range(0)), (port,)) for i, port in enumerate(prefill_ports)]
    ports = size // shape.ranks_per_url
    for group in range(groups):
        part = Part(range(0), range(group * size, (group + 1) * size), urls)
        members.append(Member(part, tuple(decode_ports[group * ports : (group + 1) * ports])))
    return members


class ProcessCluster:
    """`async with ProcessCluster(shape, members, host, control_port) as cluster:` runs all of it."""

    def __init__(self, shape: ClusterShape, members: list[Member], host: str, control_port: int) -> None:
        self.shape, self._members, self._host = shape, members, host
        urls = {role: [self._address(port) for m in members if m.role == role for port in m.ports] for role in "pd"}
        self.prefill_urls, self.decode_urls = urls["p"], urls["d"]
        self.groups = sum(member.role == "d" for member in members)
        self._processes: dict[int, SpawnProcess] = {}
        self._start_pipes: dict[int, Connection] = {}  # a process that starts sends how that went: see `run_member`
        self._stopped: set[int] = set()  # by SIGSTOP
        self.routes = [
            Route("/_emulator/state", self._state, methods=["GET"]),
            Route("/_emulator/fault", self._fault, methods=["POST"]),
            Route("/health", lambda _: Response(), methods=["GET"]),
        ]
        self._server = HttpServer(Starlette(routes=self.routes), host, control_port)
        self._client = httpx.AsyncClient(trust_env=False, timeout=ASK_TIMEOUT_S)

    @property
    def control_url(self) -> str:
        """The URL for the state and the faults of the whole cluster."""
        return self._address(self._server.port)

    def _address(self, port: int) -> str:
        return f"http://{reached_at(self._host)}:{port}"

    async def __aenter__(self) -> Self:
        try:
            for index in range(len(self._members)):
                self._spawn(index)
            await asyncio.gather(*(self._ready(index) for index in range(len(self._members))))
            await self._server.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every process, also the stopped ones."""
        await self._server.stop()
        await self._client.aclose()
        for index in self._stopped:
            self._send(index, signal.SIGCONT)
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            await asyncio.to_thread(process.join, STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                await asyncio.to_thread(process.join)

    async def send(self, worker: str, name: str) -> None:
        """Do to the process of a worker what `name` says: sigstop, sigcont, sigkill, respawn. Raises: KeyError."""
        index = self._index_of(worker)
        if name == "respawn":
            if not self._processes[index].is_alive():
                self._spawn(index)
                await self._ready(index)
            return
        self._send(index, _SIGNALS[name])
        if name == "sigstop":
            self._stopped.add(index)
        else:
            self._stopped.discard(index)
        if name == "sigkill":
            await asyncio.to_thread(self._processes[index].join)

    def _index_of(self, worker: str) -> int:
        return next(index for index, member in enumerate(self._members) if worker in member.names)

    def _spawn(self, index: int) -> None:
        member = self._members[index]
        context = multiprocessing.get_context("spawn")
        self._start_pipes[index], start_pipe = context.Pipe(duplex=False)
        process = context.Process(target=run_member, args=(self.shape, member, self._host, start_pipe), daemon=True)
        ensure_running()  # `start` would do it, and not restore our mask then
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the parent, which ends it
        try:
            process.start()  # it has our mask from its first instruction
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        start_pipe.close()
        self._processes[index] = process

    def _send(self, index: int, number: signal.Signals) -> None:
        process = self._processes[index]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)

    async def _ready(self, index: int) -> None:
        """Wait until a process listens, as it has sent; something else may answer at its ports. Raises: ConfigError."""
        connection, process, loop = self._start_pipes.pop(index), self._processes[index], asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(connection.fileno(), readable.set)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await readable.wait()
            failure = connection.recv()
        except TimeoutError:
            failure = f"has not started within {START_TIMEOUT_S:g} s"
        except EOFError:
            await asyncio.to_thread(process.join, STOP_TIMEOUT_S)
            failure = f"ended at its start with code {process.exitcode}"
        finally:
            loop.remove_reader(connection.fileno())
            connection.close()
        if failure is not None:
            raise ConfigError(f"the process of {', '.join(self._members[index].names)} {failure}")

    def _url(self, index: int) -> str:
        return self._address(self._members[index].ports[0])

    # -- the control server

    async def _state(self, request: Request) -> Response:
        answers = await asyncio.gather(*(self._ask(index) for index in range(len(self._members))))
        workers: dict[str, Any] = {}
        processes: dict[str, str] = {}
        for index, (member, answer) in enumerate(zip(self._members, answers, strict=True)):
            workers |= {} if answer is None else answer["workers"]
            if not self._processes[index].is_alive():
                state = "dead"
            elif index in self._stopped:
                state = "stopped"
            else:
                state = "silent" if answer is None else "up"
            processes |= dict.fromkeys(member.names, state)
        violations = sum(answer["violations"] for answer in answers if answer is not None)
        return json_response({"workers": workers, "processes": processes, "violations": violations})

    async def _ask(self, index: int) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = (await self._client.get(f"{self._url(index)}/_emulator/state")).json()
        except httpx.TransportError:
            return None
        return answer

    async def _fault(self, request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict):
            return json_response({"error": 'fault: the body must be JSON, {"worker": NAME, "kind": KIND}'}, 400)
        worker, kind = str(body.get("worker")), str(body.get("kind"))
        try:
            index = self._index_of(worker)
        except StopIteration:
            names = ", ".join(name for member in self._members for name in member.names)
            return json_response({"error": f"fault: no worker {worker!r}, there are {names}"}, 400)
        kinds = (*FaultKind, *_SIGNALS, "respawn")
        if kind not in kinds:
            return json_response({"error": f"fault: kind must be one of {', '.join(kinds)}"}, 400)
        if kind in _SIGNALS or kind == "respawn":
            await self.send(worker, kind)
            return json_response({"worker": worker, "kind": kind, "at_once": True})
        try:
            reply = await self._client.post(f"{self._url(index)}/_emulator/fault", json=body)
        except httpx.TransportError:
            return json_response({"error": f"fault: the process of {worker} does not answer"}, 503)
        return Response(reply.content, reply.status_code, media_type="application/json")


def run_member(shape: ClusterShape, member: Member, host: str, start_pipe: Connection) -> None:
    """A child process: serve its workers until SIGTERM, or until its parent has gone.

    It sends `start_pipe` None once it listens, or else why it can't.
    """
    import uvloop

    threading.Thread(target=_end_with_parent, daemon=True).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(shape, member, host, start_pipe))
        except ConfigError as error:
            with suppress(BrokenPipeError):
                start_pipe.send(str(error))


async def _serve(shape: ClusterShape, member: Member, host: str, start_pipe: Connection) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    prefillers = len(member.part.prefillers)
    cluster = EmulatedCluster(
        shape,
        host=host,
        prefill_ports=member.ports[:prefillers],
        decode_ports=member.ports[prefillers:],
        part=member.part,
    )
    async with cluster:
        with suppress(BrokenPipeError):  # the parent waits no longer, and ends this process
            start_pipe.send(None)
        await stopped.wait()


def _end_with_parent(end: Callable[[int], None] = os._exit) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        end(1)

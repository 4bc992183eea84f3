"""A brain and its relays on one loop, over a real socket."""

import asyncio
import functools
import inspect
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from balanceroute.core.policies import PolicySettings, make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Phase, RequestSpec, Role, Standing, WorkerSpec
from balanceroute.proxy.admission.decode_dispatcher import DecodeDispatcher
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.admission.prefill_dispatcher import PrefillDispatcher
from balanceroute.proxy.admission.tickets import Ticket
from balanceroute.proxy.link.far import FarMembers
from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.hub import Hub, Patience
from balanceroute.proxy.link.membership import Membership
from balanceroute.proxy.link.messages import VERSION, FromBrain, FromRelay, Held, Hello, Workers, read_from_brain
from balanceroute.proxy.link.reach import Moved, P, Reach, SocketReach
from balanceroute.proxy.link.remote import RemoteBrain
from balanceroute.proxy.telemetry.instruments import Histogram
from balanceroute.proxy.workers.fleet import Fleet, FleetConfig
from balanceroute.proxy.workers.relay_reports import RelayReports
from balanceroute.proxy.workers.silence import FrozenGroup
from tests.waiting import PATIENCE_S, until

T = TypeVar("T")


def _nobody(request_id: str) -> None:
    """Nobody watches."""


class Watched(Scheduler):
    """A scheduler that says whose tokens it is told."""

    generates = staticmethod(_nobody)

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        self.generates(request_id)
        super().progress(request_id, tokens, now)


class Brain:
    """A hub before a ledger, with its dispatchers once it has settled."""

    def __init__(
        self,
        config: SchedulerConfig,
        epoch: int,
        slots: int,
        relays: Collection[str],
        far: FarMembers | None = None,
        patience: Patience | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.scheduler = Watched(make_policy(PolicySettings(policy="br_0")), config)
        self.scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
        self.scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=slots), 0.0)
        self.ledger = Ledger(self.scheduler, loop)
        self.superseded: list[int] = []
        self.frozen: list[FrozenGroup] = []
        self.fleet = Fleet(self.ledger, FleetConfig())
        reports = RelayReports(self.fleet, loop, self.frozen, Heard())
        self.goes_on = False  # under a larger epoch than it has heard of
        self.bugs: list[str] = []
        self.hub = Hub(
            self.ledger, reports, loop, epoch, relays, self._superseded, self.bugs.append, far=far, patience=patience
        )
        self.fleet.on_change = self.hub.news.workers_changed
        self._tasks = [loop.create_task(self._decide())]

    def _superseded(self, epoch: int) -> int | None:
        self.superseded.append(epoch)
        return epoch + 1 if self.goes_on else None

    async def _decide(self) -> None:
        await self.hub.settled.wait()
        prefills = PrefillDispatcher(self.ledger)
        decodes = DecodeDispatcher(self.ledger, Histogram((1.0,)), lambda admit: None)
        await asyncio.gather(prefills.run(), decodes.run())

    @property
    def load(self) -> int:
        """Tokens on the one decode worker, with all that relays have counted."""
        self.ledger.settle()
        return self.scheduler.snapshot.workers[0].load

    @property
    def active(self) -> list[str]:
        """Who is on the one decode worker."""
        return sorted(self.scheduler.snapshot.workers[0].active)

    async def end(self) -> None:
        """Die: connections break without a Farewell."""
        self.hub.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class HoldingReach(SocketReach):
    """The way to a brain whose messages are held back while `holds`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.holds = False
        self.held: list[Callable[[], None]] = []

    async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
        """See `Reach`."""
        made, moved = await super().connect(protocol)
        assert isinstance(made, Frames)
        on_frame = made._on_frame

        def receive(frames: Frames[FromRelay], body: bytes) -> None:
            if self.holds:
                self.held.append(lambda: on_frame(frames, body))
            else:
                on_frame(frames, body)

        made._on_frame = receive
        return made, moved

    def let_go(self) -> None:
        """The relay receives what was held back, and from now on everything."""
        self.holds = False
        for on_frame in self.held:
            on_frame()
        self.held.clear()


class Heard:
    """A listener of a relay's brain, or of relays' reports, that notes what it is told."""

    pin_s = None

    def __init__(self) -> None:
        self.messages: list[object] = []

    def note(self, message: Any, *_: object) -> None:
        self.messages.append(message)

    def messages_of(self, kind: type[T]) -> list[T]:
        return [each for each in self.messages if isinstance(each, kind)]

    joined = void = name_workers = silence = explained = keys_elsewhere = make_keys = note
    relays_hold = relay_given_up = note_connector = doubt_connector = note


class Relay:
    """Tickets before a brain that is elsewhere."""

    def __init__(self, config: SchedulerConfig, reach: Reach, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.bugs: list[str] = []
        self.heard = Heard()
        self.brain = RemoteBrain(loop, config)
        self.membership = Membership(loop, reach, name, self.brain, self.bugs.append)
        self.tickets = self.brain.tickets
        self.restart()

    def restart(self) -> None:
        """Look for a brain again."""
        self._task = asyncio.get_running_loop().create_task(self.membership.run(self.heard))

    async def decoding(self, request_id: str, prompt_tokens: int = 10) -> Ticket:
        """A request that is on a decode worker."""
        ticket = await self.pooled(request_id, prompt_tokens)
        await ticket.admission()
        return ticket

    async def pooled(self, request_id: str, prompt_tokens: int = 10) -> Ticket:
        """A request that waits for one."""
        ticket = self.tickets.submit(RequestSpec(request_id, 1))
        assert await ticket.prefiller() == "p0"
        ticket.prefilled(prompt_tokens)
        return ticket

    async def end(self) -> None:
        """Its process ends."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Stage:
    """Where they meet."""

    def __init__(self, path: str) -> None:
        self.path, self.config = path, SchedulerConfig()
        self._all: list[Brain | Relay] = []

    async def brain(
        self,
        epoch: int = 1,
        slots: int = 4,
        relays: Collection[str] = (),
        far: FarMembers | None = None,
        patience: Patience | None = None,
    ) -> Brain:
        """One that listens."""
        brain = Brain(self.config, epoch, slots, relays, far, patience)
        self._all.append(brain)
        await brain.hub.serve(self.path)
        return brain

    def relay(self, name: str = "r0", reach: Reach | None = None) -> Relay:
        """One that looks for a brain."""
        relay = Relay(self.config, reach or SocketReach(self.path), name)
        self._all.append(relay)
        return relay

    async def end(self) -> None:
        """All of them."""
        for each in self._all:
            await each.end()


@asynccontextmanager
async def a_stage() -> AsyncIterator[Stage]:
    folder = tempfile.mkdtemp(prefix="link")  # a socket's path may have 107 characters
    stage = Stage(f"{folder}/brain")
    try:
        yield stage
    finally:
        await stage.end()
        shutil.rmtree(folder)


def on(test: Callable[[Stage], Awaitable[None]]) -> None:
    """Run a test with a stage."""

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), a_stage() as stage:
            await test(stage)
        # one that TLS still closes would be found by the garbage collector, and fail a later test
        transports = asyncio.get_running_loop()._transports  # type: ignore[attr-defined]
        await until(lambda: all(transport._sock is None for transport in transports.values()), "connections stay open")

    asyncio.run(run())


def with_stage(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Have a test of pytest run with a stage, its first parameter; see `on`."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        on(lambda stage: test(stage, **fixtures))

    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return run


class RawRelay:
    """A relay's connection for raw messages."""

    def __init__(self) -> None:
        self.received: list[FromBrain] = []
        self.frames: Frames[FromRelay]

    async def connect(self, stage: Stage) -> "RawRelay":
        loop = asyncio.get_running_loop()

        def made() -> Frames[FromRelay]:
            return Frames(loop, lambda _, body: self.received.extend(read_from_brain(body)), lambda *_: None)

        _, self.frames = await loop.create_unix_connection(made, stage.path)
        return self

    def circuits(self) -> list[str]:
        """The circuits of all workers in received messages."""
        return [each.circuit for message in self.received if isinstance(message, Workers) for each in message.changed]

    def hello(self, *held: Held, relay: str = "raw", epoch: int = 0, version: int = VERSION) -> None:
        self.frames.send(Hello(version, relay, 1, epoch, held))


def stream(number: int, request_id: str, tokens: int = 1) -> Held:
    spec = RequestSpec(request_id, 10)
    return Held(number, 2, Standing(spec, Phase.DECODING, 10, decoder="d0", tokens=tokens))

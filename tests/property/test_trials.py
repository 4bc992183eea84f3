"""A worker's trials at relays: in whatever order relays and brain hear of each other, it gets requests again."""

import asyncio
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.types import WorkerState
from balanceroute.proxy.link.messages import CacheDoubted, Judged, Workers, WorkerStanding
from balanceroute.proxy.workers.fleet import FleetConfig, Worker
from balanceroute.proxy.workers.relay_fleet import RelayFleet
from balanceroute.proxy.workers.relay_reports import RelayReports
from tests.unit.proxy.virtual_time import a_router, in_virtual_time, let_pass

NAMES = ("r0", "r1")
OF_RELAYS = [*("begins", "told", "heard") * 3, "success", "inconclusive", "fault", "busy", "rejoins"]
EVENTS = st.sampled_from([(event, name) for event in OF_RELAYS for name in NAMES])


class RelayOfOneWorker:
    """A relay with requests on d0, and what is on its way to the brain and from there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.to_brain: deque[Judged | CacheDoubted] = deque()
        self.to_relay: deque[tuple[Workers, bool]] = deque()
        self.requests = 1  # from before
        self.loop, self.fleet = loop, RelayFleet(loop, FleetConfig(), self.to_brain.append)

    @property
    def worker(self) -> Worker:
        return self.fleet["d0"]

    def begins(self) -> None:
        """A request, if the worker may get one."""
        if self.worker.state is WorkerState.UP:
            self.requests += 1
            self.worker.circuit.used()

    def ends(self, how: str) -> None:
        """A request."""
        if not self.requests:
            return
        self.requests -= 1
        circuit, now = self.worker.circuit, self.loop.time()
        if how == "fault":
            circuit.fault(now, "status 500")
        elif how == "busy":
            circuit.busy(now)
        else:
            getattr(circuit, how)()

    def hears(self) -> None:
        if self.to_relay:
            self.fleet.follow(*self.to_relay.popleft())


class Judge:
    """The brain's side, which sends workers as the hub does."""

    def __init__(self) -> None:
        services = a_router()
        self.worker = services.fleet["d0"]
        self.reports = RelayReports(services.fleet, services.loop, [], services)
        self.relays = {name: RelayOfOneWorker(services.loop) for name in NAMES}
        self._known: dict[str, WorkerStanding] = {}
        self._judged: set[str] = set()
        services.fleet.on_change = lambda: services.loop.call_soon(self.sends)
        for name in NAMES:
            self.joins(name)
            self.relays[name].hears()

    def sends(self) -> None:
        before, self._known = self._known, self.reports.standings()
        changed = tuple(each for name, each in self._known.items() if before.get(name) != each or name in self._judged)
        self._judged.clear()
        for relay in self.relays.values() if changed else ():
            relay.to_relay.append((Workers(changed, ()), False))

    def joins(self, name: str) -> None:
        """Anew: what was on its way is lost, and the relay's requests go on."""
        relay = self.relays[name]
        relay.to_brain.clear()
        relay.to_relay.clear()
        self.reports.lost(name)
        self.sends()
        relay.to_relay.clear()
        relay.to_relay.append((Workers(tuple(self._known.values()), ()), True))

    def is_told(self, name: str) -> None:
        if not self.relays[name].to_brain:
            return
        message = self.relays[name].to_brain.popleft()
        assert isinstance(message, Judged)
        self.reports.take("r0", message)
        self._judged.add(message.worker)

    def happens(self, event: str, name: str) -> None:
        if event == "begins":
            self.relays[name].begins()
        elif event == "told":
            self.is_told(name)
        elif event == "heard":
            self.relays[name].hears()
        elif event == "rejoins":
            self.joins(name)
        else:
            self.relays[name].ends(event)

    async def all_is_said(self) -> None:
        self.sends()
        while any(relay.to_brain or relay.to_relay for relay in self.relays.values()):
            for name, relay in self.relays.items():
                self.is_told(name)
                relay.hears()
            await asyncio.sleep(0)
            self.sends()


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS | st.sampled_from([0.1, 0.6, 3.0]), max_size=60))
def test_a_worker_gets_requests_again_however_messages_about_its_trials_cross(
    events: list[tuple[str, str] | float],
) -> None:
    async def test() -> None:
        judge = Judge()
        judge.worker.circuit.busy(asyncio.get_running_loop().time())
        await let_pass(1.0)
        await judge.all_is_said()
        for event in events:
            if isinstance(event, float):
                await let_pass(event)
                judge.sends()
            else:
                judge.happens(*event)
            await asyncio.sleep(0)
        for relay in judge.relays.values():
            while relay.requests:
                relay.ends("inconclusive")
        await let_pass(10.0)
        await judge.all_is_said()
        await let_pass(60.0)
        await judge.all_is_said()
        assert judge.worker.state is WorkerState.UP
        assert [relay.worker.state for relay in judge.relays.values()] == [WorkerState.UP] * len(NAMES)

    in_virtual_time(test)

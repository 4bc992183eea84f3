"""What the brain alone needs, and how much it knows when it decides: a hub and a ledger before two simulated relays.

    .venv/bin/python -m scripts.bench.brain [--far]

144 decode workers of 64 slots are full. Each of their steps, 16 per second, gives every stream one token: 147,456
tokens/s. 120 requests/s arrive, are prefilled at once and wait among 512; as many streams end. Two relays, in a process
of their own, say all this over a real socket by the real `RemoteBrain`; what they leave out is HTTP. Rows:

    brain     CPU time of the brain's process, as a share of one core
    decision  duration of one decision over all that waits, the reading of tokens included
    age       how long ago the oldest token was due that the brain did not know of at a decision, over all workers. How
              late the process was that plays the relays (`lag`) is part of it: on a busy machine, most of it
    far       with --far: as `brain`, by relays that join as those of other machines do, over TLS, and say their tokens
    alone     the same requests and tokens in the process of the ledger, without a link

Not part of it: predictors, polls of workers, operators' routes.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Final, cast

import trustme
import uvloop

from balanceroute.config import validate
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec
from balanceroute.proxy.admission.decode_dispatcher import HOLD_S
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.admission.prefill_dispatcher import PrefillDispatcher
from balanceroute.proxy.admission.tickets import Ticket, Tickets
from balanceroute.proxy.link.far import FarListener
from balanceroute.proxy.link.hub import Hub
from balanceroute.proxy.link.membership import Membership
from balanceroute.proxy.link.messages import FAR
from balanceroute.proxy.link.reach import FarReach, Reach, SocketReach
from balanceroute.proxy.link.remote import RemoteBrain
from balanceroute.proxy.perimeter.tls import LinkTls, Tls
from balanceroute.proxy.workers.fleet import Fleet, FleetConfig
from balanceroute.proxy.workers.relay_reports import RelayReports

WORKERS: Final = 144
SLOTS: Final = 64
STREAMS: Final = WORKERS * SLOTS
WAITING: Final = 512
STEPS_PER_S: Final = 16
REQUESTS_PER_S: Final = 120
RELAYS: Final = ("relay-0", "relay-1")
TICK_S: Final = 0.002
BUSY_S: Final = 0.1  # late by so much, what was measured is another load


class Deaf:
    """A listener of a relay's brain, or of relays' reports, that does nothing."""

    pin_s = None

    def ignore(self, *_: object) -> None:
        """Do nothing."""

    joined = void = name_workers = silence = explained = keys_elsewhere = make_keys = ignore
    relays_hold = relay_given_up = note_connector = doubt_connector = ignore


class Life:
    """Requests that come, stream and go, spread over the tickets of one or more relays."""

    def __init__(self, parts: list[Tickets]) -> None:
        self.parts, self.loop = parts, asyncio.get_running_loop()
        self.running: list[list[Ticket]] = [[] for _ in range(WORKERS)]
        self.lags_s: list[float] = []
        self._random = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        self._full = asyncio.Event()
        self._admitted = 0

    async def begin(self) -> list[str]:
        """Fill all slots and the pool; returns a stream of each worker that stays to the end."""
        for _ in range(STREAMS + WAITING):
            self.arrive()
        await self._full.wait()
        return [tickets[0].id for tickets in self.running]

    def arrive(self) -> None:
        self._count += 1
        spec = RequestSpec(f"cmpl-{self._count:020d}", self._random.randrange(200, 4000))
        task = self.loop.create_task(self._live(self.parts[self._count % len(self.parts)].submit(spec)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, ticket: Ticket) -> None:
        await ticket.prefiller()
        ticket.prefilled(ticket.spec.prompt_tokens)
        worker = await ticket.admission()
        self.running[int(worker[1:])].append(ticket)
        self._admitted += 1
        if self._admitted == STREAMS:
            self._full.set()

    async def stream(self, began_s: float, seconds: float) -> None:
        """Worker g makes its n-th step at `due_s(g, n, began_s)`, and requests come and go."""
        steps, gone = 0, 0
        while (now := self.loop.time()) < began_s + seconds:
            late = 0.0
            while due_s(steps % WORKERS, steps // WORKERS, began_s) <= now:
                late = max(late, now - due_s(steps % WORKERS, steps // WORKERS, began_s))
                for ticket in self.running[steps % WORKERS]:
                    ticket.progress(1)
                steps += 1
            while gone < (now - began_s) * REQUESTS_PER_S:
                gone += 1
                streams = self.running[self._random.randrange(WORKERS)]
                streams.pop(self._random.randrange(1, len(streams))).finish(Outcome.FINISHED, "stop")
                self.arrive()
            self.lags_s.append(late)
            await asyncio.sleep(TICK_S)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


def due_s(worker: int, step: int, began_s: float) -> float:
    """Steps of the workers are spread evenly."""
    return began_s + (step + worker / WORKERS) / STEPS_PER_S


class Decisions:
    """A ledger whose decisions are timed, and looked at for what they knew."""

    def __init__(self, policy: str, horizon_steps: int) -> None:
        loop = asyncio.get_running_loop()
        settings = PolicySettings(policy=policy, horizon_steps=horizon_steps)
        config = SchedulerConfig(max_pooled=WAITING)
        self.scheduler = Scheduler(make_policy(settings), config)
        for number in range(8):
            self.scheduler.add_worker(WorkerSpec(f"p{number}", Role.PREFILL), 0.0)
        for number in range(WORKERS):
            self.scheduler.add_worker(WorkerSpec(f"d{number}", Role.DECODE, slots=SLOTS), 0.0)
        self.ledger = Ledger(self.scheduler, loop)
        self.witnesses: list[str] = []
        self.began_s = 0.0
        self.durations_s: list[float] = []
        self.ages_s: list[float] = []
        self.waiting: list[int] = []
        self._again: asyncio.TimerHandle | None = None
        self._tasks = [loop.create_task(each()) for each in (PrefillDispatcher(self.ledger).run, self._decide)]

    async def _decide(self) -> None:
        """As `DecodeDispatcher`, and timed."""
        ledger = self.ledger
        while True:
            await ledger.decision_due.wait()
            self._timed()
            ledger.decision_due.clear()
            if self.scheduler.snapshot.pool.size and ledger.decision_possible and self._again is None:
                self._again = ledger.loop.call_later(HOLD_S, self._ask_again)

    def _ask_again(self) -> None:
        self._again = None
        self.ledger.decision_due.set()

    def _timed(self) -> None:
        self.waiting.append(len(self.scheduler.snapshot.pool))
        began = time.thread_time()
        self.ledger.admit()
        self.durations_s.append(time.thread_time() - began)
        if self.witnesses:
            now, requests = self.ledger.now(), self.scheduler.snapshot.requests
            oldest_s = min(
                due_s(worker, requests[name].age_tokens, self.began_s) for worker, name in enumerate(self.witnesses)
            )
            self.ages_s.append(max(0.0, now - oldest_s))

    def watch(self, witnesses: list[str], began_s: float) -> None:
        """Measure from now on."""
        self.witnesses, self.began_s = witnesses, began_s
        self.durations_s, self.ages_s, self.waiting = [], [], []

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


def link_tls(folder: str) -> LinkTls:
    """The contexts of the certificates in this folder."""
    files = {"link_ca_file": f"{folder}/ca.pem", "link_cert_file": f"{folder}/link.pem"}
    workers = {role: {"workers": [{"url": f"http://{role}:1"}]} for role in ("prefill", "decode")}
    return Tls(validate({**workers, "tls": files})).link


def far_listener(hub: Hub, folder: str, loop: asyncio.AbstractEventLoop) -> FarListener:
    """Let relays in that have a certificate, which is made here."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(f"{folder}/ca.pem")
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(f"{folder}/link.pem")
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    tls = link_tls(folder)
    return FarListener(loop, sock, lambda: tls.brain, hub.connected, asyncio.Protocol)


def play(folder: str, port: int | None, seconds: float, pipe: Connection) -> None:
    """The process of the relays."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        reach: Reach = SocketReach(f"{folder}/link")
        if port is not None:
            tls = link_tls(folder)
            reach = FarReach([("127.0.0.1", port)], lambda: tls.relay)
        machine = "" if port is None else f"{FAR}bench"
        brains = [RemoteBrain(loop, SchedulerConfig()) for _ in RELAYS]
        parts = [brain.tickets for brain in brains]
        links = [
            loop.create_task(Membership(loop, reach, f"{name}{machine}", brain, print).run(Deaf()))
            for name, brain in zip(RELAYS, brains, strict=True)
        ]
        life = Life(parts)
        witnesses = await life.begin()
        began_s = loop.time() + 0.5
        pipe.send((witnesses, began_s))
        await life.stream(began_s, seconds)
        pipe.send(life.lags_s)
        life.end()
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def linked(policy: str, horizon_steps: int, seconds: float, far: bool = False) -> None:
    """The brain in this process, the relays in another."""
    with tempfile.TemporaryDirectory() as folder:
        decisions = Decisions(policy, horizon_steps)
        loop = asyncio.get_running_loop()
        reports = RelayReports(Fleet(decisions.ledger, FleetConfig()), loop, (), Deaf())
        hub = Hub(decisions.ledger, reports, loop, 1, () if far else RELAYS, lambda _: None, print)
        await hub.serve(f"{folder}/link")
        listener = far_listener(hub, folder, loop) if far else None
        port = None if listener is None else listener.sockets[0].getsockname()[1]
        ours, theirs = multiprocessing.Pipe()
        relays = multiprocessing.get_context("spawn").Process(
            target=play, args=(folder, port, seconds, theirs), daemon=True
        )
        relays.start()
        witnesses, began_s = await _heard(ours)
        assert isinstance(witnesses, list)
        decisions.watch(witnesses, began_s)
        before, began = time.process_time(), time.monotonic()
        lags_s = cast(list[float], await _heard(ours))
        share = (time.process_time() - before) / (time.monotonic() - began)
        _print(policy, f"{'far' if far else 'brain'} {share:5.1%} of a core", decisions, lags_s)
        if listener is not None:
            listener.close()
        hub.close()
        decisions.end()
        relays.join()


async def alone(policy: str, horizon_steps: int, seconds: float) -> None:
    """All in this process."""
    loop = asyncio.get_running_loop()
    decisions = Decisions(policy, horizon_steps)
    life = Life([Tickets(decisions.ledger, loop)])
    witnesses = await life.begin()
    began_s = loop.time() + 0.5
    decisions.watch(witnesses, began_s)
    await life.stream(began_s, seconds)
    _print(policy, "alone", decisions, life.lags_s)
    life.end()
    decisions.end()


async def _heard(pipe: Connection) -> tuple[list[str], float] | list[float]:
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(pipe.fileno(), came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    os.set_blocking(pipe.fileno(), True)  # uvloop reads without waiting, and not all of it may have come
    received: tuple[list[str], float] | list[float] = pipe.recv()
    return received


def _print(policy: str, what: str, decisions: Decisions, lags_s: list[float]) -> None:
    def ms(values_s: list[float]) -> str:
        cuts = statistics.quantiles(values_s, n=100)
        return f"p50 {1e3 * cuts[49]:.2f} p99 {1e3 * cuts[98]:.2f}"

    decided = f"{len(decisions.durations_s)} decisions over {statistics.median(decisions.waiting):.0f}"
    print(
        f"{policy:9} {what:20} {decided}, ms: {ms(decisions.durations_s)}; age, ms: {ms(decisions.ages_s)}"
        f"; lag, ms: {ms(lags_s)}" + ("; TOO BUSY: not all of it was played" if max(lags_s) > BUSY_S else ""),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--far", action="store_true", help="relays of other machines as well")
    seconds = (arguments := parser.parse_args()).seconds
    runs: tuple[Callable[..., object], ...] = (linked, alone)
    if arguments.far:
        runs = (linked, partial(linked, far=True), alone)
    for _ in range(arguments.rounds):
        for policy, horizon_steps in (("level_fit", 0), ("br_h", 80)):
            for run in runs:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(run(policy, horizon_steps, seconds))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

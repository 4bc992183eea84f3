"""Drains pinned KV that no request needs.

A prefiller keeps the KV of an answered probe until a decoder has pulled it or the connector's timeout strikes (480 s
for Mooncake, 30 s for NIXL); no request to the prefiller itself frees it. So the KV of a request that was cancelled or
expired after its prefill goes through a decode worker once: one token, thrown away.

Drains are not urgent: at most `MAX_CONCURRENT` run at once, each on the decode worker with the most free slots. After a
worker that certainly has not taken the request (no connection, 429, 503; 401, 403, 404: it has another model or key)
the next one is tried; after any other failure none, because kv_transfer_params may be used only once. While no worker
takes a drain, it waits for as long as its KV may be pulled, unless all have another model or key. A drain may kill
workers, as any request may: those of one `DrainGroup`, the choices of a client's request, run one after another, and
none after one that was not pulled. KV that can't be drained counts as orphaned until the connector drops it.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from balanceroute.config import place_of
from balanceroute.core.types import Role, WorkerState
from balanceroute.errors import CannotConnect, ConnectFailed, UpstreamError, UpstreamTimeout
from balanceroute.proxy.admission.tickets import Tickets
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.payloads import drain_body
from balanceroute.proxy.workers.circuit import CircuitState
from balanceroute.proxy.workers.fleet import Fleet, Worker
from balanceroute.proxy.workers.pins import Pin, stand_in

log = logging.getLogger(__name__)

MAX_CONCURRENT: Final = 4
TIMEOUT_S: Final = 20.0  # for a pull and one step, behind a full decoder's queue; less than any KV timeout
PAUSE_S: Final = 0.5  # pause after all workers have refused; doubled after each further round
MAX_PAUSE_S: Final = 4.0
SAFE_SHARE: Final = 0.8  # usable share of the connector's timeout; the rest is for the transfer and differing clocks
LOOK_S: Final = 0.1  # between two looks at all workers, which take milliseconds; drains come by the thousand
_REPLY_LIMIT: Final = 64 * 2**20  # bytes; a reply repeats the prompt's ids
_OTHER_MODEL: Final = frozenset((401, 403, 404))  # of a worker with another model or key
_UNSEEN: Final = frozenset((429, 503)) | _OTHER_MODEL  # the worker's engine has not seen the request


@dataclass(slots=True, eq=False)
class DrainGroup:
    """Drains of one client's request. `busy`: one is under way. `failed`: one was not pulled."""

    busy: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Pinned KV to be freed: its request, its prefiller, and its unused parameters.

    `request_id` is the X-Request-Id that its prefiller was sent. Before vllm-ascend 0.14 a decode worker names its own
    request to the prefiller when it has pulled, so under another id the KV stays pinned.
    """

    request_id: str
    request: ClientRequest
    kv_transfer_params: bytes
    headers: bytes  # the client's headers for workers
    pinned_s: float  # the earliest time of its pinning, by the loop's clock
    group: DrainGroup = field(default_factory=DrainGroup)
    pin: Pin | None = None  # its record, if any


class Drainer:
    """The queue of drains and the tasks that work on it.

    `pin_s`: the connector's own timeout. `elsewhere`: drains at relays.
    """

    def __init__(self, fleet: Fleet, tickets: Tickets, metrics: Metrics, pin_s: float | None) -> None:
        self._fleet, self._tickets, self._metrics, self.pin_s = fleet, tickets, metrics, pin_s
        self.elsewhere = 0
        self._queue: deque[Drain] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_room: list[Worker] = []
        self._looked_s = -math.inf

    @property
    def pending(self) -> int:
        """Drains queued or under way, here or at a relay."""
        return len(self._queue) + len(self._tasks) + self.elsewhere

    def drain(self, job: Drain) -> None:
        """Free this KV soon."""
        self._queue.append(job)
        working = sum(not task.done() for task in self._tasks)  # one that found the queue empty is still in the set
        if working < MAX_CONCURRENT:
            task = self._tickets.loop.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def drain_left(self, pins: Iterable[Pin], headers: bytes) -> None:
        """Free the KV that a former router has left pinned on our prefillers, if it is certainly still there."""
        now, places = self._tickets.now(), {place_of(worker.spec.url) for worker in self._fleet.of(Role.PREFILL)}
        drains = dropped = 0
        for pin in pins:
            age_s = pin.age_s()
            if age_s < 0 or self.too_old(now - age_s) or place_of(pin.prefiller_url) not in places:
                pin.release()
                dropped += 1
                continue
            request, params = stand_in(pin), pin.kv_transfer_params
            self.drain(Drain(pin.request_id, request, params, headers, now - age_s, pin=pin))
            drains += 1
        if drains or dropped:
            log.info("draining KV that a router left behind", extra={"drains": drains, "dropped": dropped})

    def orphan(self, pinned_s: float | None = None) -> None:
        """Count pinned KV that can't be drained, until its prefiller drops it. `pinned_s`: since when; None: now."""
        if self.pin_s is None:
            return
        left_s = self.pin_s if pinned_s is None else self.pin_s - (self._tickets.now() - pinned_s)
        if left_s > 0:
            self._metrics.orphaned_kv += 1
            self._tickets.loop.call_later(left_s, self._dropped)

    def too_old(self, pinned_s: float) -> bool:
        """Whether KV pinned at that time may be dropped before a worker that gets its parameters now can pull it."""
        return self.pin_s is not None and self._tickets.now() - pinned_s > self.pin_s * SAFE_SHARE

    def may_be_gone(self, pinned_s: float, silent_since_s: float) -> bool:
        """Whether KV pinned at that time may be gone; a decoder silent since `silent_since_s` has kept none alive."""
        now, pin_s = self._tickets.now(), self.pin_s
        return pin_s is not None and now - pinned_s > pin_s and now - silent_since_s > pin_s * (1 - SAFE_SHARE)

    async def close(self) -> None:
        """Drop the remaining drains."""
        self._queue.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _dropped(self) -> None:
        self._metrics.orphaned_kv -= 1

    async def _work(self) -> None:
        while (job := self._next()) is not None:
            job.group.busy = True
            try:
                drained = not job.group.failed and await self._pull_anywhere(job)
            except Exception as error:  # after a bug the other drains must go on
                self._metrics.tasks_failed.inc("drainer")
                log.error("internal error", exc_info=error, extra={"where": "drainer", "request": job.request_id})
                drained = False
            finally:
                job.group.busy = False
            job.group.failed = not drained
            self._metrics.drains.inc("drained" if drained else "orphaned")
            if not drained:
                self.orphan(job.pinned_s)
                if job.pin is not None:
                    job.pin.release()

    def _next(self) -> Drain | None:
        """The first drain in the queue whose group has none under way; None: there is none."""
        for position, job in enumerate(self._queue):
            if not job.group.busy:
                del self._queue[position]
                return job
        return None

    async def _pull_anywhere(self, job: Drain) -> bool:
        """Have a worker pull the KV; returns whether one did.

        Another worker is tried only if the last one certainly has not seen the parameters.
        """
        tried: set[str] = set()
        others: set[str] = set()  # which have another model or key
        pause_s = PAUSE_S
        while (left_s := self._left_s(job)) > 0:
            worker = self._choose(tried | others)
            if worker is None and others and not tried:
                break
            if worker is None:  # all are down, or silent, or refuse
                await asyncio.sleep(min(pause_s, left_s))
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
                tried.clear()
                continue
            status = await self._pull(job, worker, min(TIMEOUT_S, left_s))
            if status not in _UNSEEN:
                return status == 200
            (others if status in _OTHER_MODEL else tried).add(worker.id)
        return False

    def _left_s(self, job: Drain) -> float:
        """The time left in which the KV may be pulled: after the connector's timeout its blocks may hold other data."""
        pin_s = TIMEOUT_S if self.pin_s is None else self.pin_s * SAFE_SHARE
        return pin_s - (self._tickets.now() - job.pinned_s)

    def _choose(self, tried: set[str]) -> Worker | None:
        """The untried decode worker with the most free slots; one that rests after a failure only if no other is up."""
        resting: Worker | None = None
        for worker in self._decoders():
            if worker.id in tried or not _is_there(worker) or not self._fleet.has(worker):
                continue
            if _serves(worker):
                return worker
            resting = resting or worker
        return resting

    def _decoders(self) -> list[Worker]:
        """The decode workers as they were `LOOK_S` ago at most, those with the most free slots first.

        A relay hears of states, and that a worker has left, before it gets the view with them.
        """
        now, fleet = self._tickets.now(), self._fleet
        if now - self._looked_s >= LOOK_S:
            views = [view for view in self._tickets.view().decoders if view.id in fleet]
            views.sort(key=lambda view: (-view.free_slots, view.load_tokens))
            self._looked_s, self._by_room = now, [fleet[view.id] for view in views]
        return self._by_room

    async def _pull(self, job: Drain, worker: Worker, left_s: float) -> int:
        """The status of the worker that was asked to pull the KV; see `_ask`."""
        status = await self._ask(job, worker, left_s)
        if status in _UNSEEN and job.pin is not None:
            job.pin.hold()
        return status

    async def _ask(self, job: Drain, worker: Worker, left_s: float) -> int:
        """The worker's status; without one 503 if it certainly has not got the request, else 502."""
        worker.take()
        try:
            async with asyncio.timeout(left_s):
                reply = await worker.upstream.request(
                    "POST",
                    job.request.path,
                    drain_body(job.request, job.kv_transfer_params),
                    worker.headers_of(job.request_id, job.headers),
                    retry_stale=False,  # the worker may have pulled the KV before the connection broke
                    about_to_send=None if job.pin is None else job.pin.release,
                )
                await reply.read(_REPLY_LIMIT)
            return reply.status
        except (UpstreamError, TimeoutError) as error:
            if not isinstance(error, CannotConnect):  # which is this process's own lack
                kind = error.kind if isinstance(error, UpstreamError) else UpstreamTimeout.kind
                self._metrics.upstream_errors.inc(worker.id, Role.DECODE.value, f"drain_{kind}")
            return 503 if isinstance(error, ConnectFailed) and not error.sent else 502
        finally:
            worker.release()


def _is_there(worker: Worker) -> bool:
    """Whether it is up, or rests or was drained; else it is down, or has to answer a health check before."""
    paused = worker.drained or worker.leaving or worker.circuit.state is not CircuitState.CLOSED
    return worker.state is WorkerState.UP or (worker.state is WorkerState.DRAINING and paused)


def _serves(worker: Worker) -> bool:
    """Whether it is up, and its last request did not fail: a relay hears only later that it rests."""
    return worker.state is WorkerState.UP and not worker.circuit.doubtful

"""Moves requests off silent workers, unless a move would not help.

The reaper calls it several times per second. `workers/silence.py` decides which workers and groups are silent,
`moves.py` which requests leave and how many at a time. This module gathers their inputs and carries the decisions out:

    a worker is out, alone       its last bytes are read first (`SETTLE_S`): they tell which requests it died under.
                                 Then requests without a token there leave, streams after
                                 `retry.resume_after_silence_s`, as fast as the prefill tier takes them again
    a group is frozen            its requests stay; /ready names it. Those that are late by `health.group_wait_s` beyond
                                 their own limit leave after all, as fast as the prefill tier takes them
    this process was stopped     nothing is judged until the sockets' contents have been read, and the time does not
                                 count: workers may have stood still with it
    all workers of a role down   requests that wait for one are refused after `queue.no_worker_grace_s`, as new ones are
"""

import logging
import math
from collections.abc import Sequence
from functools import partial

from balanceroute.core.types import Phase, Role, WorkerState
from balanceroute.core.view import DecoderView, PrefillerView
from balanceroute.proxy.admission.decider import MOST_ENDED, Refusal, no_workers
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.life.moves import Stuck, choose, room
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.telemetry.turns import over_turns
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.silence import ALL_WORKERS, SETTLE_S, Vitals, frozen_groups

log = logging.getLogger(__name__)


class Mover:
    """Moves requests off silent workers, called by the reaper."""

    def __init__(self, services: LifeServices, judges: bool) -> None:
        """With `judges` it also updates the services' `frozen`."""
        self._services, self._judges = services, judges
        self._tickets, self._fleet, self._frozen = services.tickets, services.fleet, services.frozen
        self._legs: set[Leg] = services.legs
        self._out_since_s: dict[str, float] = {}
        self._moving: dict[str, str] = {}  # requests that left a worker and are not prefilled again yet
        self._none_up_since_s: dict[Role, float] = {}
        self._attentive = True
        self._movable = False  # a worker could take requests that leave, now or soon

    def look(self, now: float, period_s: float) -> None:
        """One look; `period_s` is the time between two."""
        self._attentive = self._services.attention.look(now, period_s)
        if not self._attentive:
            self._give_back(self._services.attention.paused_s, now)
            return
        self._note_out(now)
        if self._judges:
            self._note_frozen(now)
        if self._out_since_s or self._frozen:
            self._move(now)
        self._refuse_waiting(now)

    def tolerates(self, leg: Leg, now: float) -> bool:
        """Whether a late leg stays at its worker: the silence may be due to this process, or the leg waits for its
        move.
        """
        if not self._attentive:
            return True
        worker = self._worker_of(leg)
        if worker is None or not leg.answer.may_move:
            return False
        wait_s = self._services.config.health.group_wait_s
        if self._is_frozen(worker):
            return not leg.late(now - (2 * wait_s if self._movable else wait_s))
        return self._movable and worker.id in self._out_since_s and not leg.late(now - wait_s)

    def _give_back(self, paused_s: float, now: float) -> None:
        """Give every try the time that this process stood still. After a long pause a worker that stood still with it
        may need seconds until it is at work again, so what is left then is no less than the pause, or than one token's
        time.

        Not that time after any pause: one that comes again within it would let no worker ever be late.
        """
        if not paused_s:
            return
        earliest_s = now + min(paused_s, self._services.config.limits.idle_timeout_s)
        for leg in self._legs:
            leg.try_deadline_s = max(earliest_s, paused_s + max(leg.try_deadline_s, leg.last_token_s + leg.idle_s))

    # -- what is seen

    def _note_out(self, now: float) -> None:
        out = {worker.id for worker in self._fleet if worker.out}
        self._out_since_s = {name: self._out_since_s.get(name, now) for name in out}

    def _note_frozen(self, now: float) -> None:
        window_s = self._services.config.health.silence_window_s
        awaited = self._services.awaited()
        vitals = [_vitals(worker, awaited.get(worker.id)) for worker in self._fleet]
        before = {group.name for group in self._frozen}
        self._frozen[:] = frozen_groups(vitals, now, window_s)
        for group in self._frozen:
            if group.name not in before:
                log.warning("workers fell silent together", extra={"group": group.name, "workers": group.workers})
        for name in before - {group.name for group in self._frozen}:
            log.warning("workers are no longer silent together", extra={"group": name})

    def _is_frozen(self, worker: Worker) -> bool:
        return any(group.name in (worker.spec.barrier_group, ALL_WORKERS) for group in self._frozen)

    def _worker_of(self, leg: Leg) -> Worker | None:
        """The worker of the leg, if it is at one; decode first, the prefiller that works for it, if that is out."""
        name = leg.at_worker
        if name and self._awaits_push(leg):
            name = leg.prefiller_id
        return self._fleet[name] if name in self._fleet else None

    def _awaits_push(self, leg: Leg) -> bool:
        """Whether, decode first, its prefiller is out. Tokens show that the KV came, even if the prefiller's reply has
        not.
        """
        return leg.ticket.pushing and not leg.answer.decodes and leg.prefiller_id in self._out_since_s

    # -- what follows

    def _move(self, now: float) -> None:
        view, bounds, config = self._tickets.view(), self._tickets.bounds, self._services.config
        self._movable = _any_up(view.decoders) and _any_up(view.prefillers)
        self._moving = {name: worker for name, worker in self._moving.items() if self._is_moving(name, worker)}
        pool_room = (bounds.max_pooled or 2**31) - view.pooled - view.prefilling
        free = room(
            view.prefillers,
            bounds.kv_usage_limit,
            bounds.max_prefill_inflight,
            pool_room,
            len(self._moving),
            self._services.movers,
        )
        if not free or not self._movable:
            return
        at = [(leg, worker) for leg in self._legs if (worker := self._worker_of(leg)) is not None]
        stuck = {leg.id: (leg, worker, found) for leg, worker in at if (found := self._stuck(leg, worker, now))}
        for name in choose([found for _, _, found in stuck.values()], free, config.retry.resume_after_silence_s):
            leg, worker, _ = stuck[name]
            self._moving[name] = worker.id
            self._services.metrics.moves.inc(worker.tier)
            log.debug("request moved", extra={"request": name, "worker": worker.id})
            leg.move(worker)

    def _stuck(self, leg: Leg, worker: Worker, now: float) -> Stuck | None:
        """How long the leg is stuck at this worker; None: it stays."""
        if leg.blocked_by_client or not leg.answer.may_move:
            return None
        since_s = -math.inf
        if self._is_frozen(worker):
            if not leg.late(now - self._services.config.health.group_wait_s):
                return None
        else:
            since_s = self._out_since_s.get(worker.id, math.inf)
            if now - since_s < SETTLE_S or leg.last_token_s > since_s:
                return None
        return Stuck(leg.id, leg.streaming_from is not None, leg.ticket.order, now - since_s)

    def _is_moving(self, request_id: str, left: str) -> bool:
        """Whether a moved request still needs its prefill: it is bound to its former worker, or is queued."""
        ticket = self._tickets.by_id.get(request_id)
        if ticket is None:
            return False
        if ticket.phase is Phase.DECODING:
            return ticket.decoder == left
        return ticket.phase is not Phase.POOLED or self._tickets.decode_first

    def _refuse_waiting(self, now: float) -> None:
        """End requests that wait for a prefiller or decoder while there is none, with the refusal of a new request."""
        workers = list(self._fleet)
        if not self._judges and not workers:
            return  # the brain's judgement is not known yet
        for role in (Role.PREFILL, Role.DECODE):
            if any(worker.state is not WorkerState.DOWN for worker in workers if worker.spec.role is role):
                self._none_up_since_s.pop(role, None)
                continue
            since_s = self._none_up_since_s.setdefault(role, now)
            if now - since_s < self._services.config.queue.no_worker_grace_s:
                continue
            waiting = [leg for leg in self._legs if self._needs(role, leg)]
            if waiting:  # a view of many workers is dear
                refuse = partial(self._refuse, role, no_workers(self._tickets.view()))
                over_turns(self._services.loop, waiting, refuse, MOST_ENDED)

    def _refuse(self, role: Role, refusal: Refusal, leg: Leg) -> None:
        """Refuse a leg, if it still waits."""
        if self._needs(role, leg):
            leg.interrupt(refusal.error())

    def _needs(self, role: Role, leg: Leg) -> bool:
        """Whether a leg waits for a worker of that role, or for the answer of a prefiller that is out.

        While it waits for the first tier it waits for the second, too: no decode worker could pull, or free, the KV of
        its prefill; decode first, one would wait for KV that nobody computes.
        """
        ticket, decode_first = leg.ticket, self._tickets.decode_first
        if role is Role.DECODE:
            return ticket.phase is Phase.POOLED or (ticket.phase is Phase.QUEUED and ticket.spec.decodes)
        if ticket.phase is Phase.QUEUED or ticket.asking or (ticket.phase is Phase.POOLED and decode_first):
            return True
        if ticket.phase is Phase.PREFILLING:
            return leg.prefiller_id in self._out_since_s
        return self._awaits_push(leg)


def _any_up(workers: Sequence[DecoderView] | Sequence[PrefillerView]) -> bool:
    return any(worker.state is WorkerState.UP for worker in workers)


def _vitals(worker: Worker, awaited_since_s: float | None) -> Vitals:
    """A worker's last sign of life; see `silence.py`."""
    since_s, mute = math.inf, False
    if awaited_since_s is not None:
        since_s = max(worker.progress_s, awaited_since_s)
        mute = worker.progress_s < awaited_since_s
    elif worker.checks_failed:
        since_s = max(worker.progress_s, worker.answered_s)
    votes = worker.in_use > 0 or not worker.out
    return Vitals(worker.id, worker.spec.barrier_group, since_s, mute, votes)

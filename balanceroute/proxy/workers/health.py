"""Health checks: which workers are alive, and make progress.

Every URL's `/health` is checked every `health.interval_s`. A worker is out after `failure_threshold` failures in a row;
at once if it answers 503 (vLLM's status for a dead engine) or was never healthy, so that a router that starts before
its workers waits for them. One good answer brings it back.

Silence is weaker evidence than a refusal. A check that times out does not count if the worker showed life within
`interval_s` + `timeout_s` (a token, an answered probe: an overloaded API server answers `/health` last), or if the
router's own loop was late. A worker that has shown no life since a check was sent gets no new requests, and is checked
again at once, until it answers or is out.

So a frozen worker gets no new requests after `interval_s + timeout_s` (5 s) at the latest. It is out, and its requests
may leave, after `failure_threshold` counted checks of `timeout_s` each: the first is sent up to `interval_s` after the
freeze, and one that ends within `interval_s + timeout_s` of the last token does not count. By default that takes 9 to
11 s, or 12 to 14 s if tokens came until the freeze. It is long because a wrong verdict costs a new prefill of all
requests on the worker, and overloaded API servers were seen to leave /health unanswered for several seconds.
`health.timeout_s: 1` makes it 3 to 6 s, for workers whose machines are never that busy.

`/health` is 200 on a decoder whose ranks hang in a collective, so progress counts more: a decoder with running requests
and no token for `stall_after_s` is out until it sends one, or has none left. Of answers in one piece only those count
that a slow engine, too, would have completed (`Leg.expects_tokens`).

A worker that an operator adds is checked `join_attempts` times, `join_interval_s` apart, and dropped if it never
answers.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from balanceroute.config import Config
from balanceroute.core.types import Role
from balanceroute.errors import UpstreamError
from balanceroute.proxy.workers.fleet import Fleet, Worker, why_not_healthy
from balanceroute.proxy.workers.liveness import health_status
from balanceroute.proxy.workers.polling import Polling, Silent, answer_of, still_here
from balanceroute.proxy.workers.silence import Attention

log = logging.getLogger(__name__)


class HealthMonitor:
    """Checks every worker every `health.interval_s`: `polling` calls it."""

    def __init__(
        self,
        fleet: Fleet,
        loop: asyncio.AbstractEventLoop,
        config: Callable[[], Config],
        attention: Attention,
        awaited_since_s: Callable[[str], float],
        on_bug: Callable[[str, Exception, str], None],
    ) -> None:
        """`config`: called for each check, so a reload takes effect. `awaited_since_s`: since when requests wait for a
        worker's next token; infinite: none does. `on_bug`: called with the place, the error and the workers.
        """
        self._fleet, self._loop, self._config, self._attention = fleet, loop, config, attention
        self._awaited_since_s, self._on_bug = awaited_since_s, on_bug
        self.polling = Polling(fleet, self._look, self._uncheckable)

    async def run(self) -> None:
        """Check until cancelled."""
        await self.polling.run(lambda: self._config().health.interval_s)

    def check_now(self) -> None:
        """Begin to check all workers, except those that are being checked."""
        self.polling.start()

    async def _look(self, workers: list[Worker]) -> None:
        """Check one URL and judge its workers; repeat while in doubt."""
        while await self._leaves_doubts(workers):
            pass

    async def _leaves_doubts(self, workers: list[Worker]) -> bool:
        silent, asked_s, timeout_s = False, self._loop.time(), self._config().health.timeout_s
        if not (asked := still_here(self._fleet, workers)):
            return False
        answer: int | str
        try:
            answer = await answer_of(health_status(asked[0], 2 * timeout_s), timeout_s)
        except Silent as silence:
            if silence.ours:
                return False
            silent, answer = True, f"no answer within {timeout_s:g} s"
        except UpstreamError as error:  # the connection was refused or broke
            answer = str(error)
        present = still_here(self._fleet, asked)
        if asked[0] not in present:
            return True
        for worker in present:
            worker.doubted = silent and worker.progress_s < asked_s
            if silent and self._makes_progress(worker):
                self._fleet.update(worker)
            else:
                self._judge(worker, answer, silent)
        return any(worker.doubted and worker.healthy for worker in present)

    def _uncheckable(self, workers: list[Worker], error: Exception) -> None:
        """Treat a worker whose check failed by a bug like one that does not answer."""
        for worker in still_here(self._fleet, workers):
            self._judge(worker, "it could not be asked", silent=True)
        self._on_bug("health", error, workers[0].id)

    def _judge(self, worker: Worker, answer: int | str, silent: bool) -> None:
        """Judge a worker by the status of its /health, or by the reason that there is none.

        `silent`: the reason is no answer, which says nothing of whether its process runs.
        """
        if isinstance(answer, int) and 200 <= answer < 300:
            self._passed(worker)
        else:
            self._failed(worker, answer, silent)

    def _passed(self, worker: Worker) -> None:
        worker.checks_failed, worker.seen_healthy, worker.joining = 0, True, None
        worker.answered_s = self._loop.time()
        stalled = self._is_stalled(worker)
        before, worker.stalled = worker.stalled, stalled
        if stalled and not before:
            log.warning("worker makes no progress", extra={"worker": worker.id})
            worker.circuit.open(self._loop.time(), "it generated no tokens")
        self._fleet.set_healthy(worker, True)

    def _failed(self, worker: Worker, answer: int | str, silent: bool) -> None:
        worker.checks_failed += 1
        worker.health_answer = answer
        often = worker.checks_failed >= self._config().health.failure_threshold
        out = often or answer == 503 or not worker.seen_healthy
        if out and (worker.healthy or worker.checks_failed == 1):  # an added worker was never up
            log.warning("worker unhealthy", extra={"worker": worker.id, "reason": why_not_healthy(worker)})
        if worker.joining is not None:
            self._join(worker)
        if out and worker.healthy and (answer == 503 or not (silent or isinstance(answer, int))):
            worker.ended_at = time.time()
        if out:
            self._fleet.set_healthy(worker, False)
        else:
            self._fleet.update(worker)

    def _makes_progress(self, worker: Worker) -> bool:
        """Whether the worker makes progress although it does not answer."""
        health = self._config().health
        return self._loop.time() - worker.progress_s < health.interval_s + health.timeout_s

    def _is_stalled(self, worker: Worker) -> bool:
        """Whether this decoder has sent no token for too long although it owes some to clients that read."""
        if worker.spec.role is not Role.DECODE or not worker.in_use:
            return False
        limit_s = self._config().health.stall_after_s
        silent_since_s = max(worker.progress_s, self._awaited_since_s(worker.id))
        return self._attention.attended_since_s(silent_since_s, limit_s) <= self._loop.time() - limit_s

    def _join(self, worker: Worker) -> None:
        lifecycle, now = self._config().lifecycle, self._loop.time()
        assert worker.joining is not None
        attempts, next_s = worker.joining
        if now < next_s:
            return
        attempts -= 1
        worker.joining = (attempts, now + lifecycle.join_interval_s)
        if attempts <= 0:
            log.warning("worker not ready, dropped", extra={"worker": worker.id, "reason": why_not_healthy(worker)})
            worker.joining = None
            self._fleet.leave(worker)

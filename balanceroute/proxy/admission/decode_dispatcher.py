"""The second coroutine: it admits requests of the prompt pool to decode workers, by the policy.

It sleeps until a decision is due. The event loop calls it only after every socket that was ready has been read, so
prefills that finish together and slots that free together are one decision over all of them, not several greedy ones.

Requests that stay in the pool wait for the next change: a slot, an arrival, a worker. If the policy holds a request
back although a slot is free (target_fit does, to keep the envelope), loads change with every token, so it decides again
after `HOLD_S`.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Final

from balanceroute.core.types import Admit
from balanceroute.proxy.admission.decision_log import DecisionLog
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.telemetry.instruments import Histogram

log = logging.getLogger(__name__)

HOLD_S: Final = 0.02  # about one decode step: the loads a held request waits for don't change faster


class DecodeDispatcher:
    """Decides whenever `ledger.decision_due` is set; calls `on_admit` with each admission."""

    def __init__(
        self,
        ledger: Ledger,
        duration: Histogram,
        on_admit: Callable[[Admit], None],
        decisions: DecisionLog | None = None,
    ) -> None:
        self._ledger, self._duration, self._on_admit = ledger, duration, on_admit
        self._decisions = decisions or DecisionLog(ledger)
        self._again: asyncio.TimerHandle | None = None  # one timer, however many requests arrive while one is held

    async def run(self) -> None:
        """Decide until cancelled."""
        due = self._ledger.decision_due
        while True:
            await due.wait()
            self.step()

    def step(self) -> None:
        """Take one decision, and set what the next one waits for."""
        ledger = self._ledger
        self._decisions.before()
        started = perf_counter()
        admissions = ledger.admit()
        self._duration.observe(perf_counter() - started)
        self._decisions.after(admissions)
        for admission in admissions:
            self._on_admit(admission)
        if log.isEnabledFor(logging.DEBUG):
            for admission in admissions:
                log.debug("admit", extra=asdict(admission))
        ledger.decision_due.clear()
        if ledger.scheduler.snapshot.pool.size and ledger.decision_possible and self._again is None:
            self._again = ledger.loop.call_later(HOLD_S, self._ask_again)

    def _ask_again(self) -> None:
        self._again = None
        self._ledger.decision_due.set()

"""The services of the process that decides, made by `app.build_services`: those of client requests, and the ledger."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from balanceroute.build import policy_settings, scheduler_config
from balanceroute.core.policies import knobs_of
from balanceroute.proxy.admission.decision_log import DecisionLog
from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.workers.fleet import Worker


@dataclass(slots=True, eq=False, kw_only=True)
class Services(ClientServices):
    """The services of the process that decides.

    `keep_changes` writes operators' changes down for the next brain, before the operator gets an answer. Raises:
    AnotherLeads: the next leader does not know the change. `changing` is held while a change of the configuration is
    made, which may take seconds: one change at a time. `changing_workers` is held while workers are changed, by that or
    by an operator, which takes some turns of the loop. `check_health` is called when workers have joined: they get
    requests once they have answered, and all others of their tier may have left with the same change. `reloads`: how
    often another configuration was applied.
    """

    ledger: Ledger
    decisions: DecisionLog
    forecasts: Forecasts | None = None
    keep_changes: Callable[[], None] = lambda: None
    check_health: Callable[[], None] = lambda: None
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    changing_workers: asyncio.Lock = field(default_factory=asyncio.Lock)
    reloads: int = 0

    def begin_drain(self) -> None:
        """Refuse every new request from now on."""
        self.ledger.drain()

    @property
    def pin_s(self) -> float | None:
        """How long prefillers keep KV that nobody can drain."""
        return self.drainer.pin_s

    def relays_hold(self, exchanges: int, drains: int, orphans: int) -> None:
        """Take the numbers of all relays' client requests, drains and undrainable KV."""
        self.exchanges, self.drainer.elsewhere, self.metrics.orphaned_elsewhere = exchanges, drains, orphans

    def relay_given_up(self, counts: bytes) -> None:
        """Go on from the counts of a relay that will not return."""
        self.metrics.continue_from(counts)
        self.forget_absent_workers()

    def note_connector(self, worker: Worker, connector: str | None) -> None:
        """See `LifeServices`; a shorter KV time may shorten the policy's `max_wait_s`, too."""
        before_s = self.config.max_wait_s
        ClientServices.note_connector(self, worker, connector)
        settings = policy_settings(self.config)
        if settings.max_wait_s != before_s and "max_wait_s" in knobs_of(settings.policy):
            self.ledger.reroute(settings, scheduler_config(self.config), self.ledger.forecasts)

"""The services that requests use."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from balanceroute.build import scheduler_config
from balanceroute.config import Config
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.proxy.admission.decider import MOST_ENDED
from balanceroute.proxy.admission.prompt_estimates import PromptEstimates
from balanceroute.proxy.admission.tickets import Tickets
from balanceroute.proxy.life.suspicion import Suspicions
from balanceroute.proxy.telemetry.conditions import CONNECTOR
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.telemetry.turns import Gate, Spread
from balanceroute.proxy.wire.connectors import Callbacks
from balanceroute.proxy.wire.prompt_blocks import PromptBlocks
from balanceroute.proxy.workers.connector_check import note_connector, shortened
from balanceroute.proxy.workers.drainer import Drainer
from balanceroute.proxy.workers.fleet import Fleet, Worker
from balanceroute.proxy.workers.pins import PinRecord
from balanceroute.proxy.workers.silence import Attention, FrozenGroup


@dataclass(slots=True, eq=False, kw_only=True)
class LifeServices:
    """Shared by all requests of one router; `config` is replaced by a reload, the rest stays."""

    config: Config
    tickets: Tickets
    fleet: Fleet
    metrics: Metrics
    drainer: Drainer
    callbacks: Callbacks  # none where prefill comes first
    pins: PinRecord | None = None  # the record of pinned KV
    prompt_estimates: PromptEstimates = field(default_factory=PromptEstimates)
    prompt_blocks: PromptBlocks = field(default_factory=PromptBlocks)
    suspicions: Suspicions = field(default_factory=Suspicions)
    legs: set[Any] = field(default_factory=set)  # every `Leg` that runs; its module imports this one
    abandoned: Spread[Any] = field(default_factory=lambda: Spread(_abandon, MOST_ENDED))  # legs whose clients have left
    lost: Gate = field(default_factory=lambda: Gate(MOST_ENDED))  # for legs whose connections broke
    attention: Attention = field(default_factory=Attention)
    frozen: list[FrozenGroup] = field(default_factory=list)  # groups of workers that fell silent together
    last_look_s: float = -math.inf  # the reaper's last look; bytes that came before have been read

    def __post_init__(self) -> None:
        self.metrics.catch_up = self.count_tokens

    def count_tokens(self) -> None:
        """Count the new tokens of all answers under way. O(requests)."""
        for leg in self.legs:
            leg.count_tokens()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one event loop."""
        return self.tickets.loop

    @property
    def knows_prefixes(self) -> bool:
        """Whether the choice of a prefiller uses prefix hashes."""
        return self.config.prefill.knows_prefixes

    @property
    def movers(self) -> int:
        """How many processes, this one too, move requests away from silent workers."""
        return 1

    def awaited(self) -> dict[str, float]:
        """The decode workers whose next token a client waits for, here or at a relay, and since when at the earliest.

        A request that waits for something else, such as its client, has no part in that time.
        """
        since_s = {worker.id: min(worker.awaited.values()) for worker in self.fleet if worker.awaited}
        for leg in self.legs:
            if leg.expects_tokens:
                name = leg.decoder_id
                since_s[name] = min(since_s.get(name, math.inf), leg.generates_from_s)
        return since_s

    def configure(self, config: Config) -> None:
        """Use other settings from now on."""
        self.config = config
        self.tickets.decider.configure(self.bounds(config))
        self.drainer.pin_s = config.kv_pin_s
        self.fleet.configure(config)

    def bounds(self, config: Config) -> SchedulerConfig:
        """The bounds for the decider."""
        return scheduler_config(config)

    def forget_absent_workers(self) -> None:
        """Drop the series of workers that are not here, which another process may have counted."""
        self.metrics.forget_workers_but([worker.id for worker in self.fleet])

    def note_connector(self, worker: Worker, connector: str | None) -> None:
        """Note which connector a worker runs; None: its parameters do not tell. Raises: WrongConnector."""
        found = note_connector(worker, connector, self.config, self.metrics.conditions)
        if found is not None:
            self.configure(shortened(self.config, [found]))

    def doubt_connector(self, worker: Worker, reason: str) -> None:
        """Tell operators why a worker whose connector is not known may have another than the configured one."""
        if worker.kv_connector is None:
            self.metrics.conditions.hold(CONNECTOR, worker.id, reason)


def _abandon(leg: Any) -> None:
    leg.abandon()

"""The services of a process that serves clients."""

import asyncio
import logging
from dataclasses import dataclass, field

from balanceroute.errors import Draining
from balanceroute.proxy.admission.decider import MOST_ENDED
from balanceroute.proxy.admission.forecasts import Keys
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.perimeter.tls import Tls
from balanceroute.proxy.telemetry.turns import over_turns

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class ClientServices(LifeServices):
    """The services of legs, and those of client requests. A reload replaces `perimeter` and `keyer`."""

    perimeter: Perimeter
    tls: Tls
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # the coroutines, once they run, by name
    keyer: Keys | None = None  # makes keys of prompts for a predictor
    exchanges: int = 0  # client requests under way
    strict: bool = False  # in tests bugs are fatal

    @property
    def degraded_by(self) -> list[str]:
        """The conditions of the router, one line each."""
        silent = [f"{', '.join(group.workers)}: fell silent together ({group.name})" for group in self.frozen]
        return [*self.metrics.conditions.reasons, *silent]

    def keys_elsewhere(self, relay: str, keys: tuple[KeyUse, ...]) -> None:
        """Take the key use of another process."""
        if self.perimeter.keys is not None:
            self.perimeter.keys.used_elsewhere(relay, keys, self.loop.time())

    async def know_workers(self, within_s: float) -> None:
        """Wait until the workers are known. Raises: NoHealthyWorkers: that takes too long."""

    def begin_drain(self) -> None:
        """Refuse every new request from now on."""
        raise NotImplementedError

    def internal_error(self, where: str, error: Exception, worker: str) -> None:
        """Count a bug, and log it with its traceback. Raises: `error`, if bugs are fatal."""
        self.metrics.tasks_failed.inc(where)
        log.error("internal error", exc_info=error, extra={"where": where, "worker": worker})
        if self.strict:
            raise error

    def abort_all(self) -> None:
        """End every request now: the clients get a 503, or an error event and an unclean end."""
        over_turns(self.loop, list(self.legs), _shut_down, MOST_ENDED)


def _shut_down(leg: Leg) -> None:
    leg.interrupt(Draining("The router is shutting down."))

"""Compares the ledger with workers' own figures, and warns when they differ for long.

Both are taken at different moments, so one difference means nothing. A worker's surplus that lasts for `WINDOW` polls
is a finding: a decoder runs requests that the ledger does not have (of another router, or after an abort that it
missed), or a prefiller holds KV for which the ledger has no request. A decoder that reports fewer requests than the
ledger is no finding: the newest ones are not in its report yet.
"""

import logging
from collections import defaultdict, deque
from typing import Final

from balanceroute.core.types import Role

log = logging.getLogger(__name__)

WINDOW: Final = 10  # polls; at the default interval ten seconds, longer than any decode worker's metrics are old
IDLE_USAGE: Final = 0.005  # KV usage below this counts as none: vLLM keeps one block of its own


class Divergence:
    """Differences per worker over the last `WINDOW` polls."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._logged: set[str] = set()

    def see(self, worker_id: str, role: Role, samples: dict[str, float], *, held: int, orphans: int) -> None:
        """Compare one poll with the ledger.

        Args: held: the ledger's requests on this worker (at a prefiller: in flight or pinned). orphans: pinned KV, at
        any prefiller, that waits for its timeout; it explains any prefiller's usage.
        """
        if role is Role.DECODE:
            running = samples.get("num_requests_running")
            if running is None:
                return
            difference = max(0.0, running + samples.get("num_requests_waiting", 0.0) - held)
        else:
            usage = samples.get("kv_cache_usage_perc", 0.0)
            difference = usage if held == 0 and orphans == 0 and usage > IDLE_USAGE else 0.0
        self._seen[worker_id].append(difference)
        self._log_change(worker_id, role)

    def lasting(self, worker_id: str) -> float:
        """The smallest difference of the last `WINDOW` polls; 0: at least one agreed."""
        seen = self._seen.get(worker_id)
        if seen is None or len(seen) < WINDOW:
            return 0.0
        return min(seen)

    def forget(self, worker_id: str) -> None:
        """Drop the polls of a worker that has left or is down."""
        self._seen.pop(worker_id, None)
        self._logged.discard(worker_id)

    def workers(self) -> list[str]:
        """The workers that were polled."""
        return list(self._seen)

    def _log_change(self, worker_id: str, role: Role) -> None:
        divergence = self.lasting(worker_id)
        if divergence and worker_id not in self._logged:
            self._logged.add(worker_id)
            what = "requests" if role is Role.DECODE else "KV usage that nothing of ours explains"
            log.warning("worker and ledger disagree", extra={"worker": worker_id, "by": divergence, "what": what})
        elif not divergence and worker_id in self._logged:
            self._logged.discard(worker_id)
            log.info("worker and ledger agree again", extra={"worker": worker_id})

"""The third coroutine: what the workers say of themselves.

Prefillers are asked for their KV usage, the back-pressure of the prefill dispatcher; a read that fails counts as full,
so that a prefiller nobody can reach is never preferred. Decoders are asked too, but what they report is only compared
with our own ledger (`reported` in the snapshot), never put in its place: ours is exact and theirs is old.

Workers of one URL share one read; their ranks are told apart by the `engine` label.
"""

import asyncio
import logging
import re
from collections import defaultdict
from typing import Final

from balanceroute.core.types import Role
from balanceroute.errors import UpstreamError
from balanceroute.proxy.fleet import Worker
from balanceroute.proxy.rounds import Rounds
from balanceroute.proxy.services import Services

log = logging.getLogger(__name__)

_LIMIT: Final = 8 * 2**20
_SAMPLE = re.compile(
    rb"^vllm:(kv_cache_usage_perc|num_requests_running|num_requests_waiting)\{([^}]*)\} (\S+)", re.MULTILINE
)
_ENGINE = re.compile(rb'engine="([^"]*)"')
FULL: Final = 1.0


def read_samples(text: bytes) -> dict[str, dict[str, float]]:
    """KV usage, running and waiting requests per engine (DP rank as text); others are skipped unparsed."""
    engines: dict[str, dict[str, float]] = defaultdict(dict)
    for match in _SAMPLE.finditer(text):
        engine = _ENGINE.search(match[2])
        try:
            value = float(match[3])
        except ValueError:
            continue
        engines[engine[1].decode() if engine else "0"][match[1].decode()] = value
    return dict(engines)


def of_worker(engines: dict[str, dict[str, float]], dp_rank: int | None) -> dict[str, float] | None:
    """The samples of one worker: its rank's, or where it has none those of the only engine; None when unknown.

    Several engines behind one URL without ranks are seen as their maximum: as full as the fullest.
    """
    if dp_rank is not None and str(dp_rank) in engines:
        return engines[str(dp_rank)]
    if dp_rank is not None and len(engines) > 1:
        return None
    merged: dict[str, float] = {}
    for samples in engines.values():
        for name, value in samples.items():
            merged[name] = max(merged.get(name, value), value)
    return merged or None


class MetricsPoller:
    """Reads every URL's /metrics once per `prefill.poll_interval_s`."""

    def __init__(self, services: Services) -> None:
        self._s = services
        self._watchdog = services.metrics.watchdog
        self._rounds = Rounds(services.fleet, self._read)

    async def run(self) -> None:
        """Until cancelled."""
        await self._rounds.run(lambda: self._s.config.prefill.poll_interval_s)

    async def _read(self, workers: list[Worker]) -> None:
        engines: dict[str, dict[str, float]] = {}
        try:
            async with asyncio.timeout(self._s.config.health.timeout_s):
                reply = await workers[0].upstream.request("GET", "/metrics")
                text = await reply.read(_LIMIT)
            if reply.status == 200:
                engines = read_samples(text)
        except (UpstreamError, TimeoutError) as error:
            log.debug("scrape failed", extra={"worker": workers[0].id, "error": str(error)})
        for worker in workers:
            if worker.id in self._s.fleet:
                self._report(worker, of_worker(engines, worker.spec.dp_rank))

    def _report(self, worker: Worker, samples: dict[str, float] | None) -> None:
        if samples is None:
            self._s.metrics.scrapes_failed.inc(worker.id)
        if worker.spec.role is Role.PREFILL:
            usage = FULL if samples is None else samples.get("kv_cache_usage_perc", FULL)
            self._s.ledger.report_prefiller(worker.id, usage)
        else:
            self._s.ledger.scheduler.snapshot.worker(worker.id).reported = samples or {}
        if samples is not None:
            self._watchdog.see(worker, samples, held=self._held(worker), orphans=self._s.metrics.orphaned_kv)

    def _held(self, worker: Worker) -> int:
        if worker.spec.role is Role.DECODE:
            return worker.in_use
        prefiller = self._s.ledger.scheduler.snapshot.prefiller(worker.id)
        return prefiller.inflight + prefiller.pinned + self._s.drainer.pending

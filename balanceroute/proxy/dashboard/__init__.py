"""`GET /dashboard`: the cluster at a glance, in one page without any asset from elsewhere.

The page polls `GET /dashboard/data`, which is `/state` without its lists of requests: a few numbers per worker. Rates
and quantiles are made in the browser from differences of counters, so the router keeps no history for it; the page's
own history is as long as it has been open, three minutes at most.
"""

from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute import __version__
from balanceroute.core.types import Outcome
from balanceroute.proxy.instruments import Histogram
from balanceroute.proxy.services import Services

# nothing from elsewhere may run or be shown in the page, whatever a worker's name is
_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


class Dashboard:
    """The two handlers; `services` is called per request, because they exist only while the application runs."""

    def __init__(self, services: Callable[[], Services]) -> None:
        self._services = services
        self._page = (files(__name__) / "page.html").read_bytes()

    def routes(self) -> list[Route]:
        """Page and data."""
        return [
            Route("/dashboard", self.page, methods=["GET"]),
            Route("/dashboard/data", self.data, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """The page."""
        headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}
        return Response(self._page, headers=headers, media_type="text/html; charset=utf-8")

    async def data(self, request: Request) -> Response:
        """What the page draws."""
        body = orjson.dumps(overview(self._services()))
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")


def overview(services: Services) -> dict[str, Any]:
    """A few numbers per worker, and the router's counters; no request is named. O(workers + running requests)."""
    services.ledger.settle()
    snapshot, metrics = services.ledger.scheduler.snapshot, services.metrics
    running_tokens = sum(tracker.age_tokens for tracker in snapshot.decoding())
    return {
        "version": __version__,
        "policy": services.config.routing.policy,
        "now_s": services.ledger.now(),
        "draining": services.ledger.scheduler.draining,
        "workers": [
            {
                "id": worker.spec.id,
                "state": worker.state.value,
                "load_tokens": worker.load,
                "active": len(worker.active),
                "slots": worker.spec.slots,
            }
            for worker in snapshot.workers
        ],
        "prefillers": [
            {
                "id": prefiller.spec.id,
                "state": prefiller.state.value,
                "kv_usage": prefiller.kv_usage,
                "inflight": prefiller.inflight,
                "pinned_tokens": prefiller.pinned_tokens,
            }
            for prefiller in snapshot.prefillers
        ],
        "waiting": {
            "queued": len(snapshot.queued),
            "prefilling": sum(prefiller.inflight for prefiller in snapshot.prefillers),
            "pooled": len(snapshot.pool),
            "pooled_tokens": snapshot.pool.tokens,
        },
        "generated_tokens": metrics.tokens.value() + running_tokens,
        "requests": {outcome.value: metrics.requests.value(outcome.value) for outcome in Outcome},
        "ttft_s": _histogram(metrics.ttft),
        "tpot_s": _histogram(metrics.tpot),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts}

"""`GET /dashboard`: the cluster at a glance, in one page without any asset from elsewhere.

The page polls `GET /dashboard/data`, which is `/state` without its lists of requests: a few numbers per worker. Rates
and quantiles are made in the browser from differences of counters, so the router keeps no history for it; the page's
own history is as long as it has been open, three minutes at most.

Where an admin token is set, a browser without it gets a page that asks for the token and posts it, as the bearer token
of `/dashboard/session`, for a cookie that shows the dashboard for a week and opens nothing else.
"""

import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute import __version__
from balanceroute.core.types import Outcome
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.ops.guard import closed_headers
from balanceroute.proxy.perimeter.access import SESSION_COOKIE, SESSION_S
from balanceroute.proxy.telemetry.instruments import Histogram

# nothing from elsewhere may run or be shown in the page, whatever a worker's name is
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
DASHBOARD_PATH: Final = "/dashboard"


def _page(name: str, status: int = 200) -> Response:
    headers = {**closed_headers(), "content-security-policy": _POLICY, "referrer-policy": "no-referrer"}
    return Response((files(__name__) / name).read_bytes(), status, headers, media_type="text/html; charset=utf-8")


SIGN_IN: Final = _page("sign_in.html", 401)


class Dashboard:
    """The handlers; `services` is called per request, because they exist only while the application runs."""

    def __init__(self, services: Callable[[], ClientServices]) -> None:
        self._services = services
        self._page = _page("page.html")

    def routes(self) -> list[Route]:
        """Page and data."""
        return [
            Route(DASHBOARD_PATH, self.page, methods=["GET"]),
            Route(f"{DASHBOARD_PATH}/data", self.data, methods=["GET"]),
            Route(f"{DASHBOARD_PATH}/session", self.session, methods=["POST"]),
        ]

    async def page(self, request: Request) -> Response:
        """The page."""
        return self._page

    async def data(self, request: Request) -> Response:
        """What the page draws."""
        body = orjson.dumps(overview(self._services()))
        return Response(body, headers=closed_headers(), media_type="application/json")

    async def session(self, request: Request) -> Response:
        """For who has shown the admin token: a cookie, so that the browser need not keep the token."""
        response = Response(status_code=204, headers=closed_headers())
        response.set_cookie(
            SESSION_COOKIE,
            self._services().perimeter.admin.new_session(time.time()),
            max_age=SESSION_S,
            path=DASHBOARD_PATH,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response


def overview(services: ClientServices) -> dict[str, Any]:
    """A few numbers per worker, and the router's counters; no request is named. O(workers + running requests)."""
    services.ledger.settle()
    view, metrics = services.ledger.view(), services.metrics
    return {
        "version": __version__,
        "policy": services.config.routing.policy,
        "now_s": services.ledger.now(),
        "degraded_by": services.degraded_by,
        "draining": view.draining,
        "workers": [
            {
                "id": worker.id,
                "state": worker.state.value,
                "load_tokens": worker.load_tokens,
                "active": worker.active,
                "foreign_requests": worker.foreign_requests,
                "foreign_tokens": worker.foreign_tokens,
                "slots": worker.slots,
            }
            for worker in view.decoders
        ],
        "prefillers": [
            {
                "id": prefiller.id,
                "state": prefiller.state.value,
                "kv_usage": prefiller.kv_usage,
                "inflight": prefiller.inflight,
                "pinned_tokens": prefiller.pinned_tokens,
            }
            for prefiller in view.prefillers
        ],
        "waiting": {
            "queued": view.queued,
            "prefilling": view.prefilling,
            "pooled": view.pooled,
            "pooled_tokens": view.pooled_tokens,
        },
        "generated_tokens": metrics.tokens.value() + services.ledger.running_tokens(),
        "requests": {outcome.value: metrics.requests.value(outcome.value) for outcome in Outcome},
        "ttft_s": _histogram(metrics.ttft),
        "tpot_s": _histogram(metrics.tpot),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts}

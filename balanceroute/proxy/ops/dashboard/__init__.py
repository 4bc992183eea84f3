"""`GET /dashboard`: one page about the cluster, which loads nothing from other servers.

    /dashboard             the page; /dashboard/assets/* its script, style and uPlot
    /dashboard/data        the present and the last 15 minutes (`recorder`), read once
    /dashboard/stream      then every second: the present, the newest sample, new events and the last decisions, as
                           server-sent events; one of them, if the client does not accept `text/event-stream`. To the
                           first of them all events are new: some may have come since /dashboard/data was read
    /dashboard/what_if     what other policies would do in the present state
    /decisions             the last decisions, for other clients (`balanceroute decisions`)

`/dashboard/data` contains no request ids; decisions do, as `/state` does.

If an admin token is set, a browser without it gets a page that asks for the token and posts it, as the bearer token, to
`/dashboard/session`. The answer sets a cookie that is valid for a week and shows the dashboard only: changes (drain,
another policy) need the token itself.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from itertools import islice
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from balanceroute import __version__
from balanceroute.build import policy_settings
from balanceroute.core.policies import KNOBS, POLICIES
from balanceroute.core.types import Outcome, WorkerState
from balanceroute.errors import ConfigError, InputError, InvalidRequest
from balanceroute.explain import Outlook, outlook
from balanceroute.proxy.admission.decision_log import ROWS, Decision
from balanceroute.proxy.ops.admin import state
from balanceroute.proxy.ops.dashboard.recorder import Recorder
from balanceroute.proxy.ops.guard import closed_headers
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.perimeter.access import DASHBOARD_PATH, SESSION_COOKIE, SESSION_S
from balanceroute.proxy.telemetry.instruments import Histogram
from balanceroute.proxy.workers.fleet import why_not_up

# the page runs and shows nothing from other servers, whatever a worker's name contains
_OF_PAGES: Final = "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
_POLICY: Final = (
    f"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; {_OF_PAGES}"
)
_SIGN_IN_POLICY: Final = (
    f"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; {_OF_PAGES}"
)
_MEDIA_TYPES: Final = {
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
}
_WRITE: Final = orjson.OPT_SERIALIZE_NUMPY
_MOST_POLICIES: Final = 4
_SHOWN: Final = 20  # admissions per policy in a what-if, and decisions in the log


def _page(name: str, policy: str, status: int = 200) -> Response:
    headers = {**closed_headers(), "content-security-policy": policy, "referrer-policy": "no-referrer"}
    return Response((files(__name__) / name).read_bytes(), status, headers, media_type="text/html; charset=utf-8")


def _asset(name: str, media_type: str) -> Response:
    return Response((files(__name__) / "assets" / name).read_bytes(), headers=closed_headers(), media_type=media_type)


# read at import: a process that is forked later must not find the files of a version installed meanwhile
SIGN_IN: Final = _page("sign_in.html", _SIGN_IN_POLICY, 401)
_PAGE: Final = _page("page.html", _POLICY)
_ASSETS: Final = {name: _asset(name, media_type) for name, media_type in _MEDIA_TYPES.items()}


class Dashboard:
    """The handlers; `services` is called per request, because they exist only while the application runs."""

    def __init__(self, services: Callable[[], Services]) -> None:
        self._services = services
        self.recorder = Recorder(services)
        self._asking = asyncio.Lock()  # one what-if at a time

    def routes(self) -> list[Route]:
        """Page and data."""
        return [
            Route("/", self.front, methods=["GET"]),
            Route(DASHBOARD_PATH, self.page, methods=["GET"]),
            Route(f"{DASHBOARD_PATH}/assets/{{name}}", self.asset, methods=["GET"]),
            Route(f"{DASHBOARD_PATH}/data", self.data, methods=["GET"]),
            Route(f"{DASHBOARD_PATH}/stream", self.stream, methods=["GET"]),
            Route(f"{DASHBOARD_PATH}/what_if", self.what_if, methods=["GET"]),
            Route(f"{DASHBOARD_PATH}/session", self.session, methods=["POST"]),
            Route("/decisions", self.decisions, methods=["GET"]),
        ]

    async def front(self, request: Request) -> Response:
        """Redirect `/` to the dashboard."""
        return RedirectResponse(DASHBOARD_PATH)

    async def page(self, request: Request) -> Response:
        """Send the page, or the form for the token."""
        return _PAGE

    async def asset(self, request: Request) -> Response:
        """Send a file of the page."""
        asset = _ASSETS.get(request.path_params["name"])
        if asset is None:
            raise InvalidRequest("There is no such file.", status=404)
        return asset

    async def data(self, request: Request) -> Response:
        """Send what the page draws first: the present and the recorded past."""
        recorder, services = self.recorder, self._services()
        recorder.look()
        whole = {**overview(services, recorder), "past": recorder.past(), "events": _events(recorder, 0)}
        return _json(whole)

    async def stream(self, request: Request) -> Response:
        """Stream what is new, every second."""
        if "text/event-stream" not in request.headers.get("accept", ""):
            return _json(self._update(0))
        headers = {**closed_headers(), "x-accel-buffering": "no"}
        return StreamingResponse(self._events(), headers=headers, media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        recorder, services, seen = self.recorder, self._services(), 0
        token = services.config.auth.admin_token
        while services.config.auth.admin_token == token:  # with another perimeter the page has to ask again
            if services.ledger.draining and not services.exchanges:
                return  # the router ends, and must not wait for this stream
            services.decisions.watch()
            message, seen = self._update(seen), recorder.event_count
            yield b"data: " + orjson.dumps(message, option=_WRITE) + b"\n\n"
            async with recorder.new_sample:
                await recorder.new_sample.wait()

    def _update(self, seen_events: int) -> dict[str, Any]:
        recorder, services = self.recorder, self._services()
        recorder.look()
        rows = [row for row in services.decisions.rows if row.runner_up is not None]
        return {
            **overview(services, recorder),
            "sample": recorder.newest() if recorder.count else None,
            "events": _events(recorder, seen_events),
            "decision_count": services.decisions.count,
            "decisions": _decisions(rows, _SHOWN, services.ledger.now()),
        }

    async def decisions(self, request: Request) -> Response:
        """The last `?last=` admissions, newest first, and their number so far; this counts as watching
        (`DecisionLog.watch`).
        """
        last, log = request.query_params.get("last", str(_SHOWN)), self._services().decisions
        if not (re.fullmatch("[0-9]{1,9}", last) and 1 <= int(last) <= ROWS):
            raise InvalidRequest(f"last must be a number from 1 to {ROWS}.", param="last")
        log.watch()
        now, unix = self._services().ledger.now(), time.time()
        dated = [{"at": round(unix - row["age_s"], 3), **row} for row in _decisions(log.rows, int(last), now)]
        return _json({"count": log.count, "decisions": dated})

    async def what_if(self, request: Request) -> Response:
        """What each of the named policies would do in the present state."""
        names = request.query_params.getlist("policy")
        services = self._services()
        if not 1 <= len(names) <= _MOST_POLICIES or any(name not in POLICIES for name in names):
            raise InvalidRequest(f"policy must be given 1 to {_MOST_POLICIES} times, each one of {_known()}.")
        try:
            async with self._asking:
                services.ledger.settle()
                document = state(services)
                found = [await asyncio.to_thread(outlook, document, name) for name in names]
        except (ConfigError, InputError) as error:
            raise InvalidRequest(str(error)) from None
        return _json({"waiting": len(document["waiting"]), "policies": [_outlook(each) for each in found]})

    async def session(self, request: Request) -> Response:
        """Give a browser that has sent the admin token a cookie, so that it need not keep the token."""
        # relays ask the brain without TLS, whether or not the browser uses it
        over_tls = request.scope["scheme"] == "https" or self._services().config.tls.cert_file is not None
        response = Response(status_code=204, headers=closed_headers())
        response.set_cookie(
            SESSION_COOKIE,
            self._services().perimeter.admin.new_session(time.time()),
            max_age=SESSION_S,
            path=DASHBOARD_PATH,
            secure=over_tls,
            httponly=True,
            samesite="strict",
        )
        return response


def _json(data: dict[str, Any]) -> Response:
    return Response(orjson.dumps(data, option=_WRITE), headers=closed_headers(), media_type="application/json")


def _known() -> str:
    return ", ".join(sorted(POLICIES))


def overview(services: Services, recorder: Recorder) -> dict[str, Any]:
    """Figures per worker and the router's counters, without request ids. O(workers + running requests)."""
    services.ledger.settle()
    view, served = services.ledger.view(), recorder.served()
    settings = policy_settings(services.config)
    knobs = KNOBS.get(settings.policy, ())
    return {
        "version": __version__,
        "policy": settings.policy,
        "knobs": {name: _shown(getattr(settings, name)) for name in knobs},
        "policies": sorted(POLICIES),
        "predictor": services.config.predictor.kind,
        "prefill_policy": services.config.prefill.policy,
        "needs_token": services.config.auth.admin_token is not None,
        "now_s": services.ledger.now(),
        "unix_s": time.time(),
        "clock_sets": recorder.clock_sets,
        "degraded_by": services.degraded_by,
        "draining": view.draining,
        "workers": [
            {
                "load_tokens": worker.load_tokens,
                "active": worker.active,
                "foreign_requests": worker.foreign_requests,
                "foreign_tokens": worker.foreign_tokens,
                "slots": worker.slots,
                **_standing(services, recorder, worker.id, worker.state),
            }
            for worker in view.decoders
        ],
        "prefillers": [
            {
                "kv_usage": prefiller.kv_usage,
                "inflight": prefiller.inflight,
                "pinned_tokens": prefiller.pinned_tokens,
                "prompt_tokens": prefiller.prompt_tokens,
                "hit_tokens": prefiller.hit_tokens,
                "predicted_tokens": prefiller.predicted_tokens if services.knows_prefixes else None,
                **_standing(services, recorder, prefiller.id, prefiller.state),
            }
            for prefiller in view.prefillers
        ],
        "waiting": {
            "queued": view.queued + view.asking,
            "prefilling": view.prefilling,
            "pooled": view.pooled,
            "pooled_tokens": view.pooled_tokens,
        },
        "generated_tokens": served and served.tokens,
        "requests": {outcome.value: served and served.requests.value(outcome.value) for outcome in Outcome},
        "ttft_s": served and _histogram(served.ttft),
        "tpot_s": served and _histogram(served.tpot),
    }


def _standing(services: Services, recorder: Recorder, worker_id: str, now: WorkerState) -> dict[str, Any]:
    """A worker's name and state; if it is not up, the reason and, if known, since when."""
    worker = services.fleet[worker_id]
    seen, since = recorder.states.get(worker_id, (None, None))
    return {
        "id": worker_id,
        "url": worker.spec.url,
        "state": now.value,
        "drained": worker.drained,
        "why": "" if now is WorkerState.UP else why_not_up(worker),
        "since": since if seen is now else None,
    }


def _shown(value: object) -> object:
    """A setting as a JSON value."""
    if value is None:
        return "the number of decode workers"
    return "no limit" if value == float("inf") else value


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts}


def _events(recorder: Recorder, seen: int) -> list[dict[str, Any]]:
    """All events but the first `seen`."""
    new = min(len(recorder.events), recorder.event_count - seen)
    newest = list(recorder.events)[len(recorder.events) - new :]
    return [{"at": event.at, "kind": event.kind, "text": event.text} for event in newest]


def _decisions(rows: Sequence[Decision], last: int, now: float) -> list[dict[str, Any]]:
    """The newest of these decisions, newest first."""
    return [
        {
            "number": row.number,
            "age_s": now - row.at_s,
            "policy": row.policy,
            **asdict(row.admission),
            "runner_up": row.runner_up,
            "runner_up_score": row.runner_up_score,
        }
        for row in islice(reversed(rows), last)
    ]


def _outlook(found: Outlook) -> dict[str, Any]:
    return {
        "policy": found.policy,
        "admitted": len(found.admissions),
        "left_waiting": found.left_waiting,
        "reason": found.reason,
        "max_load_tokens": found.max_load_tokens,
        "mean_load_tokens": found.mean_load_tokens,
        "admissions": [asdict(admission) for admission in found.admissions[:_SHOWN]],
    }

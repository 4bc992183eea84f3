"""Everything that is not hot and is the router's own: health, state, metrics, the set of workers.

`/health` says that the process lives, `/ready` that a request would be served; a drain fails readiness first. The
example proxy's routes keep their keys (`/healthcheck`, `/instances/add`, `/instances/remove`).
"""

import hmac
import logging
from collections.abc import Callable
from typing import Any, Final

import orjson
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.build import policy_settings
from balanceroute.config import DecodeWorker, normalised_url
from balanceroute.config import Worker as WorkerConfig
from balanceroute.core.snapshot_json import snapshot_to_dict
from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.errors import BalanceRouteError, InvalidRequest
from balanceroute.proxy.fleet import Worker
from balanceroute.proxy.responses import body_of, error_body, extra_headers, status_of
from balanceroute.proxy.services import Services

log = logging.getLogger(__name__)

_ROLES: Final = {"prefill": Role.PREFILL, "decode": Role.DECODE}


def json_response(data: Any, status: int = 200) -> Response:
    """Data as a JSON response."""
    return Response(orjson.dumps(data), status, media_type="application/json")


def error_response(error: BalanceRouteError) -> Response:
    """An error as its status and an OpenAI error body."""
    headers = {name.decode(): value.decode() for name, value in extra_headers(error)}
    return Response(body_of(error), status_of(error), headers, media_type="application/json")


async def http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method: in the form of every other error."""
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def post_only(request: Request) -> Response:
    """Stands for the two hot routes, whose POSTs never come here."""
    raise HTTPException(405, headers={"allow": "POST"})


class Admin:
    """The handlers; `services` is called per request, because they exist only while the application runs."""

    def __init__(self, services: Callable[[], Services]) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """All routes but the two hot ones."""
        return [
            Route("/v1/completions", post_only),
            Route("/v1/chat/completions", post_only),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/healthcheck", self.healthcheck, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/state", self.state, methods=["GET"]),
            Route("/instances/add", self.add_instances, methods=["POST"]),
            Route("/instances/remove", self.remove_instances, methods=["POST"]),
            Route("/instances/drain", self.drain_instances, methods=["POST"]),
            Route("/instances/undrain", self.undrain_instances, methods=["POST"]),
        ]

    # -- what runs

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A request sent now would be served."""
        scheduler = self._services().ledger.scheduler
        up = {
            "prefill": sum(p.state is not WorkerState.DOWN for p in scheduler.snapshot.prefillers),
            "decode": sum(w.state is not WorkerState.DOWN for w in scheduler.snapshot.workers),
        }
        ready = not scheduler.draining and all(up.values())
        status = "draining" if scheduler.draining else "ready" if ready else "no healthy workers"
        return json_response({"status": status, "workers_up": up}, 200 if ready else 503)

    async def healthcheck(self, request: Request) -> Response:
        """The example proxy's keys."""
        services = self._services()
        return json_response(
            {
                "status": "ok",
                "prefill_instances": len(services.fleet.of(Role.PREFILL)),
                "decode_instances": len(services.fleet.of(Role.DECODE)),
                "request_num": services.exchanges,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """The Prometheus text format."""
        services = self._services()
        services.ledger.settle()
        return Response(services.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def state(self, request: Request) -> Response:
        """The snapshot and the policy that decides on it: the input of `balanceroute explain`."""
        services = self._services()
        services.ledger.settle()
        return json_response(state(services))

    # -- the set of workers

    async def add_instances(self, request: Request) -> Response:
        """Workers join, as soon as they answer; `{"type": "prefill"|"decode", "instances": "host:port" or a list}`."""
        return await self._change(request, self._add)

    async def remove_instances(self, request: Request) -> Response:
        """Workers get nothing new and leave when they hold nothing."""
        return await self._change(
            request, lambda services, role, url, entry: _each(services, role, url, services.fleet.leave)
        )

    async def drain_instances(self, request: Request) -> Response:
        """Workers get nothing new, and stay."""
        return await self._change(
            request, lambda services, role, url, entry: _each(services, role, url, services.fleet.drain)
        )

    async def undrain_instances(self, request: Request) -> Response:
        """Drained workers take requests again."""
        return await self._change(
            request,
            lambda services, role, url, entry: _each(
                services, role, url, lambda worker: services.fleet.drain(worker, drained=False)
            ),
        )

    async def _change(self, request: Request, act: Callable[[Services, Role, str, dict[str, Any]], None]) -> Response:
        services = self._services()
        try:
            self._authorize(request)
            role, entries = _instances(await request.body())
            for url, entry in entries:
                act(services, role, url, entry)
        except BalanceRouteError as error:
            return error_response(error)
        services.fleet.sweep()
        return json_response(
            {
                "message": f"{request.url.path.rsplit('/', 1)[-1]}: {', '.join(url for url, _ in entries)}",
                "current_prefill_instances": _addresses(services, Role.PREFILL),
                "current_decode_instances": _addresses(services, Role.DECODE),
            }
        )

    def _authorize(self, request: Request) -> None:
        token = self._services().config.auth.admin_token
        if token is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.get_secret_value().encode()):
            raise InvalidRequest("This route needs the admin token as a bearer token.", status=401)

    def _add(self, services: Services, role: Role, url: str, entry: dict[str, Any]) -> None:
        decode = services.config.decode
        try:
            worker: WorkerConfig
            if role is Role.DECODE:
                decoder = worker = DecodeWorker.model_validate({**entry, "url": url})
                spec = WorkerSpec(
                    worker.worker_id, role, worker.url, worker.dp_rank, decode.slots_of(decoder), decoder.speed
                )
            else:
                worker = WorkerConfig.model_validate({**entry, "url": url})
                spec = WorkerSpec(worker.worker_id, role, worker.url, worker.dp_rank)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidRequest(f"instance {url}: {first['msg']}", param="instances") from None
        services.fleet.add(spec, services.config.lifecycle.join_attempts)


def state(services: Services) -> dict[str, Any]:
    """What `GET /state` returns."""
    settings = policy_settings(services.config)
    params = {name: getattr(settings, name) for name in type(settings).__slots__ if name != "policy"}
    ledger = services.ledger
    return {
        "policy": settings.policy,
        "params": params,
        **snapshot_to_dict(ledger.scheduler.snapshot, ledger.now()),
        "draining": ledger.scheduler.draining,
        "exchanges": services.exchanges,
        "drains_pending": services.drainer.pending,
    }


def _instances(body: bytes) -> tuple[Role, list[tuple[str, dict[str, Any]]]]:
    """Role and (url, further fields) of a change. Raises: InvalidRequest."""
    try:
        data = orjson.loads(body)
        role = _ROLES[data["type"]]
        instances = data["instances"]
        entries = instances if isinstance(instances, list) else [instances]
        parsed = []
        for entry in entries:
            fields = {"url": entry} if isinstance(entry, str) else dict(entry)
            url = fields.pop("url")
            parsed.append((normalised_url(url if "://" in url else f"http://{url}"), fields))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise InvalidRequest(
            'The body must be {"type": "prefill" or "decode", "instances": "HOST:PORT" or a list of them}.',
            param="instances",
        ) from None
    return role, parsed


def _each(services: Services, role: Role, url: str, act: Callable[[Worker], None]) -> None:
    workers = [worker for worker in services.fleet.of(role) if worker.spec.url == url]
    if not workers:
        raise InvalidRequest(f"There is no {role.value} worker {url}.", status=404, param="instances")
    for worker in workers:
        act(worker)


def _addresses(services: Services, role: Role) -> list[str]:
    return [worker.spec.url.partition("://")[2] for worker in services.fleet.of(role) if not worker.leaving]

"""Everything that is not hot and is the router's own: health, state, metrics, the set of workers.

`/health` says that the process lives, `/ready` that a request would be served; a drain fails readiness first. The
example proxy's routes keep their keys (`/healthcheck`, `/instances/add`, `/instances/remove`).
"""

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
from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.errors import BalanceRouteError, InvalidRequest, InvariantError, Rejected
from balanceroute.proxy.client.asgi import REQUEST_ID
from balanceroute.proxy.ops.guard import error_response, tell
from balanceroute.proxy.ops.services import OperatorServices
from balanceroute.proxy.ops.workers import why_not_up
from balanceroute.proxy.perimeter.routes import ACCESS
from balanceroute.proxy.wire.responses import error_body
from balanceroute.proxy.workers.fleet import Worker

_ROLES: Final = {"prefill": Role.PREFILL, "decode": Role.DECODE}

log = logging.getLogger(__name__)


def json_response(data: Any, status: int = 200) -> Response:
    """Data as a JSON response."""
    return Response(orjson.dumps(data), status, media_type="application/json")


async def http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method: in the form of every other error.

    A slash too many is told by a path alone: with a host, which the client chooses, an answer could lead anywhere.
    """
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    told = {"request": request.scope.get(REQUEST_ID, ""), "peer": request.client.host if request.client else ""}
    log.info("not served", extra={**told, "method": request.method, "path": path, "status": error.status_code})
    if error.status_code == 404 and path.endswith("/") and path[:-1] in ACCESS:
        query = request.scope["query_string"].decode("latin-1")
        return Response(status_code=307, headers={"location": f"{path[:-1]}{'?' * bool(query)}{query}"})
    body = error_body(error.status_code, f"{request.method} {path}: {error.detail}")
    headers = dict(error.headers or {})
    if "Allow" in headers:  # of a set, whose order every process has its own of
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    return Response(body, error.status_code, headers, media_type="application/json")


async def internal_error(request: Request, error: Exception) -> Response:
    """A bug of ours: the server logs it, the client learns nothing from it."""
    text = "Internal error of the router; see its log."
    return Response(error_body(500, text), 500, media_type="application/json")


async def hot(request: Request) -> Response:
    """Stands for the hot routes, whose POSTs never come here."""
    raise InvariantError("a POST to a hot route came by ASGI")


class Admin:
    """The handlers; `services` is called per request, because they exist only while the application runs."""

    def __init__(self, services: Callable[[], OperatorServices]) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """All routes but the hot ones."""
        return [
            Route("/v1/completions", hot, methods=["POST"]),
            Route("/v1/chat/completions", hot, methods=["POST"]),
            Route("/v1/messages", hot, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET", "POST"]),
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
        """A request sent now would be served, if not as well as it should be; then `reasons` says what is wrong.

        Workers that are down are named with why, and are no reason where others of their tier serve.
        """
        services = self._services()
        view = services.ledger.view()
        up = {
            "prefill": sum(p.state is not WorkerState.DOWN for p in view.prefillers),
            "decode": sum(w.state is not WorkerState.DOWN for w in view.decoders),
        }
        ready = not view.draining and all(up.values())
        status = "draining" if view.draining else "ready" if ready else "no healthy workers"
        answer: dict[str, Any] = {"status": status, "workers_up": up}
        down = [each.id for each in view.prefillers if each.state is WorkerState.DOWN]
        down += [each.id for each in view.decoders if each.state is WorkerState.DOWN]
        if down:
            answer["workers_down"] = {name: why_not_up(services.fleet[name]) for name in down}
        if services.frozen:
            answer["silent_groups"] = {group.name: list(group.workers) for group in services.frozen}
        if reasons := services.degraded_by:
            answer["status"], answer["reasons"] = "degraded" if ready else status, reasons
        return json_response(answer, 200 if ready else 503)

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
        try:
            page = services.metrics.exposition()
        except Rejected as error:  # other processes have yet to tell what they have counted
            return error_response(error)
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})

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
            request, lambda services, role, url, entry: _each(services, role, url, services.fleet.undrain)
        )

    async def _change(
        self, request: Request, act: Callable[[OperatorServices, Role, str, dict[str, Any]], None]
    ) -> Response:
        services = self._services()
        try:
            role, entries = _instances(await request.body())
            tell(request, role=role.value, instances=[url for url, _ in entries])
            for url, entry in entries:
                act(services, role, url, entry)
            services.fleet.sweep()
            services.keep_changes()
        except BalanceRouteError as error:
            return error_response(error)
        return json_response(
            {
                "message": f"{request.url.path.rsplit('/', 1)[-1]}: {', '.join(url for url, _ in entries)}",
                "current_prefill_instances": _addresses(services, Role.PREFILL),
                "current_decode_instances": _addresses(services, Role.DECODE),
            }
        )

    def _add(self, services: OperatorServices, role: Role, url: str, entry: dict[str, Any]) -> None:
        decode = services.config.decode
        try:
            worker: WorkerConfig
            if role is Role.DECODE:
                decoder = worker = DecodeWorker.model_validate({**entry, "url": url})
                spec = WorkerSpec(
                    worker.worker_id,
                    role,
                    worker.url,
                    worker.dp_rank,
                    decode.slots_of(decoder),
                    decoder.slowdown,
                    decode.barrier_group_of(decoder),
                    decode.request_tokens,
                )
            else:
                worker = WorkerConfig.model_validate({**entry, "url": url})
                spec = WorkerSpec(worker.worker_id, role, worker.url, worker.dp_rank)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidRequest(f"instance {url}: {first['msg']}", param="instances") from None
        services.fleet.add(spec, services.config.lifecycle.join_attempts)


def state(services: OperatorServices) -> dict[str, Any]:
    """What `GET /state` returns: the state document (`core.state`), and what else operators ask for."""
    ledger, keys = services.ledger, services.perimeter.keys
    return {
        **ledger.state(policy_settings(services.config)),
        "draining": ledger.draining,
        "exchanges": services.exchanges,
        "keys": {key.name: key.in_flight + key.elsewhere for key in keys or ()},
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
            parsed.append((_base_url(fields.pop("url")), fields))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise InvalidRequest(
            'The body must be {"type": "prefill" or "decode", "instances": "HOST:PORT" or a list of them}.',
            param="instances",
        ) from None
    return role, parsed


def _base_url(address: str) -> str:
    """An instance's URL, of which HOST:PORT is enough. Raises: InvalidRequest."""
    try:
        return normalised_url(address if "://" in address else f"http://{address}")
    except ValueError as error:
        raise InvalidRequest(f"instance {address[:200]!r}: {error}.", param="instances") from None


def _each(services: OperatorServices, role: Role, url: str, act: Callable[[Worker], None]) -> None:
    workers = [worker for worker in services.fleet.of(role) if worker.spec.url == url]
    if not workers:
        raise InvalidRequest(f"There is no {role.value} worker {url}.", status=404, param="instances")
    for worker in workers:
        act(worker)


def _addresses(services: OperatorServices, role: Role) -> list[str]:
    return [worker.spec.url.partition("://")[2] for worker in services.fleet.of(role) if not worker.leaving]

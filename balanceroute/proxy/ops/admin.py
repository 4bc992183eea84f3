"""The operators' routes that the router answers itself: health, readiness, state, metrics, the set of workers.

`/health` says that the process runs, `/ready` that a request would be served; a drain fails `/ready` first. The routes
of vllm-ascend's example proxy keep its JSON keys (`/healthcheck`, `/instances/add`, `/instances/remove`).
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.build import decoder_spec, policy_settings, prefiller_spec
from balanceroute.config import DecodeWorker, normalised_url, own_places, place_of, server_of
from balanceroute.config import Worker as WorkerConfig
from balanceroute.config.loading import problem
from balanceroute.config.sections.tiers import Decode
from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.errors import InvalidRequest, InvariantError
from balanceroute.proxy.client.asgi import REQUEST_ID, path_shown
from balanceroute.proxy.ops.guard import add_log_fields
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.ops.shared_answer import SharedAnswer
from balanceroute.proxy.perimeter.routes import ACCESS
from balanceroute.proxy.telemetry.turns import in_turns
from balanceroute.proxy.wire.responses import INTERNAL_ERROR, error_body
from balanceroute.proxy.workers.fleet import Fleet, Worker, why_not_up
from balanceroute.proxy.workers.places import Places

Entries = list[tuple[str, dict[str, Any]]]  # URL and further fields of each instance
Prepare = Callable[[Services, Role, Entries], Awaitable[list[Callable[[], object]]]]
"""What would change the workers, once all that is asked for is known to be possible; else raises InvalidRequest."""

FIRST_LOOKS: Final = 50  # for workers' first answers; all of them together take less than the time limit of any probe
FIRST_LOOK_S: Final = 0.01
AT_ONCE: Final = 16  # workers, in one turn of the loop; each takes some 0.2 ms

log = logging.getLogger(__name__)


def json_response(data: Any, status: int = 200) -> Response:
    """Data as a JSON response."""
    return Response(orjson.dumps(data), status, media_type="application/json")


def _knows_too_few(fleet: Fleet) -> bool:
    """Whether a tier has no worker that is up, but one that may be: it has not answered yet."""
    tiers = [fleet.of(role) for role in Role]
    return any(
        any(worker.unknown for worker in tier) and all(worker.state is not WorkerState.UP for worker in tier)
        for tier in tiers
    )


async def http_error(request: Request, error: Exception) -> Response:
    """404 or 405 as an OpenAI error body.

    The redirect for a trailing slash names the path only: the client chooses the Host, so a URL could lead anywhere.
    """
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    fields = {"request": request.scope.get(REQUEST_ID, ""), "peer": request.client.host if request.client else ""}
    fields |= {"method": request.method, "path": path_shown(path), "status": error.status_code}
    log.info("not served", extra=fields)
    if error.status_code == 404 and path.endswith("/") and path[:-1] in ACCESS:
        query = request.scope["query_string"].decode("latin-1")
        return Response(status_code=307, headers={"location": f"{path[:-1]}{'?' * bool(query)}{query}"})
    hint = meant(path) if error.status_code == 404 else ""
    body = error_body(error.status_code, f"{request.method} {path}: {error.detail}{hint}")
    headers = dict(error.headers or {})
    if "Allow" in headers:  # the order of a set differs from process to process
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    return Response(body, error.status_code, headers, media_type="application/json")


def meant(path: str) -> str:
    """The route that a client meant whose base URL lacks /v1, has it twice or ends with a slash; empty if that is no
    route either, or the path itself, which this router does not serve.
    """
    rest = re.sub("//+", "/", path)
    while rest.startswith("/v1/"):
        rest = rest.removeprefix("/v1")
    route = f"/v1{rest}"
    return f"; the route is {route}: see the client's base URL" if route in ACCESS and route != path else ""


async def internal_error(request: Request, error: Exception) -> Response:
    """500 for a bug of the router: the server logs it, the client gets no details."""
    request.app.services.metrics.tasks_failed.inc("request")
    return Response(error_body(500, INTERNAL_ERROR), 500, media_type="application/json")


async def hot(request: Request) -> Response:
    """A placeholder for the hot routes: `ClientApp` answers their POSTs before Starlette sees them."""
    raise InvariantError("a POST to a hot route came by ASGI")


class Admin:
    """The handlers; `services` is called per request, because they exist only while the application runs."""

    def __init__(self, services: Callable[[], Services]) -> None:
        self._services = services
        self._page = SharedAnswer(self._metrics_page)
        self._readiness = SharedAnswer(self._whether_ready)

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
        """200: the process runs."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a request sent now would be served."""
        return await self._readiness.get()

    async def _whether_ready(self) -> Response:
        """200 if a request sent now would be served; `reasons` says what is wrong in spite of that.

        Workers that are down, drained or removed are listed with the cause. They are no reason for 503 while others of
        their tier serve. At the start it waits a moment for workers' first answers, most of which take milliseconds.
        """
        services = self._services()
        for _ in range(FIRST_LOOKS):
            if not _knows_too_few(services.fleet):
                break
            await asyncio.sleep(FIRST_LOOK_S)
        view = services.ledger.view()
        tiers = {
            "prefill": {each.id: each.state for each in view.prefillers},
            "decode": {each.id: each.state for each in view.decoders},
        }
        down = [name for tier in tiers.values() for name, state in tier.items() if state is WorkerState.DOWN]
        down += [worker.id for worker in services.fleet if worker.unknown and worker.id not in down]
        withdrawn = services.fleet.withdrawn()
        up = {tier: len(states.keys() - withdrawn.union(down)) for tier, states in tiers.items()}
        ready = not view.draining and all(up.values())
        status = "draining" if view.draining else "ready" if ready else "no healthy workers"
        answer: dict[str, Any] = {"status": status, "workers_up": up}
        if down:
            answer["workers_down"] = {name: why_not_up(services.fleet[name]) for name in down}
        if drained := [worker.id for worker in services.fleet if worker.id in withdrawn.difference(down)]:
            answer["workers_drained"] = {name: why_not_up(services.fleet[name]) for name in drained}
        if services.frozen:
            answer["silent_groups"] = {group.name: list(group.workers) for group in services.frozen}
        if reasons := services.degraded_by:
            answer["status"], answer["reasons"] = "degraded" if ready else status, reasons
        return json_response(answer, 200 if ready else 503)

    async def healthcheck(self, request: Request) -> Response:
        """`/healthcheck` with the JSON keys of vllm-ascend's example proxy."""
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
        return Response(await self._page.get(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _metrics_page(self) -> bytes:
        services = self._services()
        services.ledger.settle()
        pieces = []
        for piece in services.metrics.pieces():
            pieces.append(piece)
            await asyncio.sleep(0)  # streams go on meanwhile
        return b"".join(pieces)

    async def state(self, request: Request) -> Response:
        """The snapshot and the policy that decides on it: the input of `balanceroute explain`."""
        services = self._services()
        services.ledger.settle()
        return json_response(state(services))

    # -- the set of workers

    async def add_instances(self, request: Request) -> Response:
        """Add workers, each from its first answer on; body `{"type": "prefill"|"decode", "instances": "host:port" or a
        list}`.
        """
        answer = await self._change(request, _joins)
        self._services().check_health()
        return answer

    async def remove_instances(self, request: Request) -> Response:
        """Remove workers: they get no new requests, and leave once they hold none."""
        return await self._change(request, partial(_each, act=Fleet.leave))

    async def drain_instances(self, request: Request) -> Response:
        """Drain workers: they get no new requests, and stay."""
        return await self._change(request, partial(_each, act=Fleet.drain))

    async def undrain_instances(self, request: Request) -> Response:
        """Give drained workers requests again."""
        return await self._change(request, partial(_each, act=Fleet.undrain, of_leaving=False))

    async def _change(self, request: Request, prepare: Prepare) -> Response:
        """Change all workers that the request names, or none; over several turns of the loop if they are many."""
        services = self._services()
        role, entries = await _instances(await request.body())
        descriptions = [_instance_text(url, fields) for url, fields in entries]
        add_log_fields(request, role=role.value, instances=descriptions)
        async with services.changing_workers:
            async for act in in_turns(await prepare(services, role, entries), AT_ONCE):
                act()
            gone = services.fleet.sweep()
            while gone:
                await asyncio.sleep(0)
                gone = services.fleet.sweep()
            services.keep_changes()
        return json_response(
            {
                "message": f"{request.scope['path'].rsplit('/', 1)[-1]}: {', '.join(descriptions)}",
                "current_prefill_instances": _addresses(services, Role.PREFILL),
                "current_decode_instances": _addresses(services, Role.DECODE),
            }
        )


def state(services: Services) -> dict[str, Any]:
    """The body of `GET /state`: the state document (`core/snapshot_json`) and figures for operators."""
    ledger, keys = services.ledger, services.perimeter.keys
    return {
        **ledger.state(policy_settings(services.config)),
        "draining": ledger.draining,
        "exchanges": services.exchanges,
        "keys": {key.name: key.in_flight + key.elsewhere for key in keys or ()},
        "drains_pending": services.drainer.pending,
    }


async def _instances(body: bytes) -> tuple[Role, Entries]:
    """Read the workers that a change names.

    Other fields beside them are ignored, as by vllm-ascend's example proxy, except those of an instance, which would
    change nothing there. Raises: InvalidRequest.
    """
    try:
        data = orjson.loads(body)
        role = Role(data.pop("type"))
        instances = data.pop("instances")
        entries = instances if isinstance(instances, list) else [instances]
        parsed = []
        async for entry in in_turns(entries, AT_ONCE):
            fields = {"url": entry} if isinstance(entry, str) else dict(entry)
            parsed.append((_base_url(fields.pop("url")), fields))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise InvalidRequest(
            'The body must be {"type": "prefill" or "decode", "instances": "HOST:PORT" or a list of them}.',
            param="instances",
        ) from None
    for name in data.keys() & DecodeWorker.model_fields:
        text = f'{name} is a field of an instance: {{"url": "HOST:PORT", "{name}": ...}}.'
        raise InvalidRequest(text, param=name)
    return role, parsed


def _base_url(address: str) -> str:
    """An instance's URL, from a URL or HOST:PORT. Raises: InvalidRequest."""
    try:
        url = normalised_url(address if "://" in address else f"http://{address}")
        if "://" not in address and urlsplit(url).port is None:  # of a URL it is that of its scheme
            raise ValueError("accepted is HOST:PORT or a URL")
        return url
    except ValueError as error:
        raise InvalidRequest(f"instance {address[:200]!r}: {error}.", param="instances") from None


async def _joins(services: Services, role: Role, entries: Entries) -> list[Callable[[], object]]:
    """Functions that add these workers. Raises: InvalidRequest: one is invalid, known already, or named twice.

    As in the configuration, a server may have one name only: with two it would get twice its share.
    """
    decode = services.config.decode
    specs = [_spec(decode, role, url, entry) async for url, entry in in_turns(entries, AT_ONCE)]
    places = Places(worker.spec for worker in services.fleet if not worker.leaving)
    ours = own_places(services.config)
    named: set[str] = set()
    for spec in specs:
        services.fleet.check_new(spec)
        if place_of(spec.url) in ours:
            raise InvalidRequest(f"worker {spec.id} is this router's own address (listen)", param="instances")
        if spec.id in named:
            raise InvalidRequest(f"worker {spec.id} is named twice", param="instances")
        named.add(spec.id)
        if (other := places.take(spec)) != spec.id:
            raise InvalidRequest(f"worker {spec.id} is the server of worker {other}", param="instances")
    return [partial(services.fleet.add, spec, services.config.lifecycle.join_attempts) for spec in specs]


def _spec(decode: Decode, role: Role, url: str, entry: dict[str, Any]) -> WorkerSpec:
    """The worker that an operator describes. Raises: InvalidRequest."""
    try:
        if role is Role.PREFILL:
            return prefiller_spec(WorkerConfig.model_validate({**entry, "url": url}))
        return decoder_spec(DecodeWorker.model_validate({**entry, "url": url}), decode)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        first["loc"] = (role.value, "workers", *first["loc"])
        raise InvalidRequest(f"instance {url}: {problem(first, '', {})}", param="instances") from None


async def _each(
    services: Services,
    role: Role,
    entries: Entries,
    act: Callable[[Fleet, Worker], None],
    of_leaving: bool = True,
) -> list[Callable[[], object]]:
    """Functions that `act` on each worker of these servers, or on those with the `dp_rank` and `id` of an entry.

    The scheme of a server may be left out, as in listings. `of_leaving`: also on workers that are leaving.
    Raises: InvalidRequest: there is no such worker, or only ones that are leaving.
    """
    at_server: dict[str, list[Worker]] = {}
    for worker in services.fleet.of(role):
        at_server.setdefault(place_of(worker.spec.url), []).append(worker)
    acts: list[Callable[[], object]] = []
    async for url, entry in in_turns(entries, AT_ONCE):
        _spec(services.config.decode, role, url, entry)  # refuses unknown fields
        wanted = {field: entry[field] for field in ("id", "dp_rank") if entry.get(field) is not None}
        here = at_server.get(place_of(url), ())
        workers = [worker for worker in here if all(getattr(worker.spec, name) == wanted[name] for name in wanted)]
        if not workers:
            raise InvalidRequest(
                f"There is no {role.value} worker {_instance_text(url, wanted)}.", status=404, param="instances"
            )
        if not of_leaving and all(worker.leaving for worker in workers):
            text = f"The {role.value} worker {_instance_text(url, wanted)} was removed, and leaves; add it again."
            raise InvalidRequest(text, param="instances")
        acts += [partial(act, services.fleet, worker) for worker in workers if of_leaving or not worker.leaving]
    return acts


def _instance_text(url: str, named: dict[str, Any]) -> str:
    """How an instance is written in answers and in the log."""
    which = ", ".join(f"{name} {str(named[name])[:200]}" for name in ("id", "dp_rank") if name in named)
    return f"{url} ({which})" if which else url


def _addresses(services: Services, role: Role) -> list[str]:
    return [server_of(worker.spec.url) for worker in services.fleet.of(role) if not worker.leaving]

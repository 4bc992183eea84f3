"""One server of the emulated cluster as an ASGI application: vLLM's routes over the workers of one URL."""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from balanceroute.emulator import metrics
from balanceroute.emulator.connectors import CLASS_NAMES
from balanceroute.emulator.errors import ENGINE_DEAD, ApiError
from balanceroute.emulator.faults import WORKER_KINDS, Fault, FaultKind, sse_writer
from balanceroute.emulator.prefill import PrefillWorker
from balanceroute.emulator.replies import Call, JsonCall, StreamCall
from balanceroute.emulator.requests import (
    GenerationRequest,
    chat_prompt,
    check_model,
    ids_to_decode,
    parse_body,
    parse_generation,
    text_prompts,
)
from balanceroute.emulator.shape import ClusterShape
from balanceroute.emulator.sse import Connection
from balanceroute.emulator.worker import Worker
from balanceroute.engine.tokens import decode

CONNECTION = "balanceroute.connection"  # ASGI extension: the transport under the exchange, see `sse.Connection`
VERSION = "0.32.0"  # of the vLLM whose captures this follows


class Control(Protocol):
    """The cluster as the admin routes see it."""

    def state(self) -> dict[str, Any]:
        """State of all workers."""

    async def inject(self, worker: str, fault: Fault) -> None:
        """Put a fault on a worker."""

    def kv(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a decode rank of another process (`remote.py`)."""


class Site:
    """The workers behind one URL, and the picking of one."""

    def __init__(self, workers: Sequence[Worker], shape: ClusterShape, control: Control) -> None:
        self.workers = list(workers)
        self.shape = shape
        self.control = control
        self.tasks: set[asyncio.Task[None]] = set()

    def take_fault(self, path: str) -> Fault | None:
        """The fault that strikes this request; with several ranks behind the URL, any rank's."""
        for worker in self.workers:
            fault = worker.faults.take(path)
            if fault is not None:
                return fault
        return None

    def pick(self, rank_header: str | None) -> Worker:
        """The rank of `X-data-parallel-rank`, else the least busy one. Raises: ApiError 400 when out of range."""
        size = len(self.workers)
        if rank_header is not None:
            with contextlib.suppress(ValueError):  # vLLM ignores what is no number
                rank = int(rank_header)
                if not 0 <= rank < size:
                    raise ApiError(f"data_parallel_rank {rank} is out of range [0, {size}).")
                return self.workers[rank]
        return min(self.workers, key=_queue_score)


def _queue_score(worker: Worker) -> int:
    running, waiting, deferred = worker.queue_counts()
    return 4 * waiting + running + deferred  # vLLM's own score until 0.26


class _NoConnection:
    """Stands in when the server has no transport to offer: the fault becomes an exception in the application."""

    def close(self) -> None:
        raise ConnectionAbortedError("emulator: connection closed by an injected fault")

    def reset(self) -> None:
        raise ConnectionResetError("emulator: connection reset by an injected fault")


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One ASGI conversation: its two ends, the transport under it, and the fault that strikes it."""

    receive: Receive
    send: Send
    connection: Connection
    fault: Fault | None


class GenerationEndpoint:
    """`/v1/completions` or `/v1/chat/completions` as a bare ASGI application, since it is the hot path."""

    def __init__(self, site: Site, *, chat: bool) -> None:
        self._site = site
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = (scope.get("extensions") or {}).get(CONNECTION) or _NoConnection()
        exchange = _Exchange(receive, send, connection, self._site.take_fault(scope["path"]))
        try:
            if await self._struck(exchange):
                return
            raw = await _read_body(receive)
            if raw is None:
                return
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            request, base_id = self._parse(raw, headers)
            worker = self._site.pick(headers.get("x-data-parallel-rank"))
            if worker.dead:
                raise ApiError(ENGINE_DEAD, status=500)
        except ApiError as error:
            await _send_json(send, error.status, error.body())
            return
        if request.stream:
            await self._stream(worker, request, base_id, exchange)
        else:
            await self._answer(worker, request, base_id, exchange)

    def _parse(self, raw: bytes, headers: dict[str, str]) -> tuple[GenerationRequest, str]:
        body = parse_body(raw, headers.get("content-type"))
        shape = self._site.shape
        request = parse_generation(body, chat=self._chat, model=shape.model, max_model_len=shape.context_tokens)
        return request, headers.get("x-request-id") or request.request_id or uuid.uuid4().hex[:16]

    async def _struck(self, exchange: _Exchange) -> bool:
        """Faults that come before any work; True when the exchange is over."""
        fault = exchange.fault
        if fault is None:
            return False
        if fault.kind is FaultKind.STATUS:
            await _read_body(exchange.receive)
            error = ApiError("Injected failure", status=fault.status)
            await _send_json(exchange.send, error.status, error.body())
        elif fault.kind is FaultKind.RESET_BEFORE_REPLY:
            exchange.connection.reset()
            await _until_disconnect(exchange.receive)
        elif fault.kind is FaultKind.STALL and fault.after_events == 0:
            await _until_disconnect(exchange.receive)
        else:
            return False
        return True

    async def _stream(self, worker: Worker, request: GenerationRequest, base_id: str, exchange: _Exchange) -> None:
        shape = self._site.shape
        sse = sse_writer(exchange.send, self._site.tasks, exchange.fault, exchange.connection, shape.time_scale)
        await sse.start()
        call = StreamCall(request, base_id, sse, shape.stream_interval)
        await _run(worker, call, exchange.fault, sse.completed, exchange.receive)

    async def _answer(self, worker: Worker, request: GenerationRequest, base_id: str, exchange: _Exchange) -> None:
        call = JsonCall(request, base_id)
        if not await _run(worker, call, exchange.fault, call.result, exchange.receive):
            return
        status, body = call.result.result()
        kind, send, connection = None, exchange.send, exchange.connection
        if exchange.fault is not None:
            kind = exchange.fault.kind
        if kind is FaultKind.GARBAGE:
            body = b"\x80{not json" + body[:20]
        if kind in (FaultKind.HALF_EVENT, FaultKind.CLOSE, FaultKind.RESET):
            await _send_head(send, status, len(body))
            await send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
            connection.reset() if kind is FaultKind.RESET else connection.close()
            await _until_disconnect(exchange.receive)
            return
        if kind is FaultKind.STALL:
            await _until_disconnect(exchange.receive)
            return
        await _send_json(send, status, body)


async def _run(
    worker: Worker, call: Call, fault: Fault | None, completed: asyncio.Future[Any], receive: Receive
) -> bool:
    """Let a worker serve a call until it is complete (True) or the client has gone; frees it in either case."""
    gone = asyncio.get_running_loop().create_task(_until_disconnect(receive))
    try:
        worker.submit(call, fault)
        await asyncio.wait({gone, completed}, return_when=asyncio.FIRST_COMPLETED)
        return completed.done()
    finally:
        gone.cancel()
        worker.abort(call)


async def _read_body(receive: Receive) -> bytes | None:
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(chunks)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _send_head(send: Send, status: int, length: int) -> None:
    headers = [(b"content-length", str(length).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_json(send: Send, status: int, body: bytes) -> None:
    await _send_head(send, status, len(body))
    await send({"type": "http.response.body", "body": body, "more_body": False})


def json_response(body: Any, status: int = 200) -> Response:
    """Data as a JSON response."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def create_app(site: Site) -> Starlette:
    """The application of one URL."""
    routes = _SideRoutes(site)

    def get(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, handler, methods=["GET"])

    def post(path: str, handler: Any) -> Route:
        return Route(path, handler, methods=["POST"])

    return Starlette(
        routes=[
            post("/v1/completions", GenerationEndpoint(site, chat=False)),
            post("/v1/chat/completions", GenerationEndpoint(site, chat=True)),
            get("/v1/models", routes.models),
            get("/v1/models/{model:path}", routes.model),
            get("/health", routes.health),
            Route("/ping", routes.health, methods=["GET", "POST"]),
            get("/metrics", routes.metrics),
            get("/version", routes.version),
            get("/load", routes.load),
            get("/server_info", routes.server_info),
            post("/tokenize", routes.tokenize),
            post("/detokenize", routes.detokenize),
            post("/reset_prefix_cache", routes.reset_prefix_cache),
            get("/_emulator/state", routes.state),
            post("/_emulator/fault", routes.fault),
            post("/_emulator/kv/{what:str}", routes.kv),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},
    )


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = json_response({"detail": error.detail}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, media_type="application/json")


class _SideRoutes:
    """Everything that does not generate."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def _struck(self, request: Request) -> None:
        """Raise or wait as a fault on this route says."""
        fault = self._site.take_fault(request.url.path)
        if fault is None:
            return
        if fault.kind is FaultKind.STATUS:
            raise ApiError("Injected failure", status=fault.status)
        await _until_disconnect(request.receive)

    def _model_card(self) -> dict[str, Any]:
        shape = self._site.shape
        return {
            "id": shape.model,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": shape.model,
            "parent": None,
            "max_model_len": shape.context_tokens,
            "permission": [],
        }

    async def models(self, request: Request) -> Response:
        await self._struck(request)
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._site.shape.model:
            raise ApiError(f"The model `{name}` does not exist.", status=404, param="model")
        return json_response(self._model_card())

    async def health(self, request: Request) -> Response:
        await self._struck(request)
        return Response(status_code=503 if any(worker.dead for worker in self._site.workers) else 200)

    async def metrics(self, request: Request) -> Response:
        await self._struck(request)
        return Response(metrics.render(self._site.workers), headers={"content-type": metrics.CONTENT_TYPE})

    async def version(self, _: Request) -> Response:
        return json_response({"version": VERSION})

    async def load(self, _: Request) -> Response:
        return json_response({"server_load": 0})  # vLLM says 0 unless tracking is switched on

    async def server_info(self, request: Request) -> Response:
        """vLLM's `/server_info` of development mode: the fields that `check-config --probe` compares."""
        shape, prefills = self._site.shape, isinstance(self._site.workers[0], PrefillWorker)
        settings = {
            "scheduler_config": {"max_num_seqs": shape.max_num_seqs},
            "cache_config": {"block_size": shape.block_size, "enable_prefix_caching": shape.prefix_caching},
            "kv_transfer_config": {
                "kv_connector": CLASS_NAMES[shape.connector],
                "kv_role": "kv_producer" if prefills else "kv_consumer",
            },
        }
        as_json = request.query_params.get("config_format") == "json"
        return json_response({"vllm_config": settings if as_json else str(settings), "vllm_env": {}, "system_env": {}})

    async def tokenize(self, request: Request) -> Response:
        body = await self._tokenizer_body(request)
        prompts = chat_prompt(body, None) if "messages" in body else text_prompts(body.get("prompt"))
        limit = self._site.shape.context_tokens
        ids = list(prompts[0])
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        return json_response({"prompt": decode(ids_to_decode(await self._tokenizer_body(request)))})

    async def _tokenizer_body(self, request: Request) -> dict[str, Any]:
        body = parse_body(await request.body(), request.headers.get("content-type"))
        check_model(body, self._site.shape.model)
        return body

    async def reset_prefix_cache(self, _: Request) -> Response:
        for worker in self._site.workers:
            if isinstance(worker, PrefillWorker):
                worker.reset_prefix_cache()
        return Response(status_code=200)

    async def state(self, _: Request) -> Response:
        return json_response(self._site.control.state())

    async def kv(self, request: Request) -> Response:
        body = parse_body(await request.body(), request.headers.get("content-type"))
        try:
            return json_response(self._site.control.kv(request.path_params["what"], body))
        except KeyError as error:
            raise ApiError(f"KV exchange: no {error}") from error

    async def fault(self, request: Request) -> Response:
        body = parse_body(await request.body(), request.headers.get("content-type"))
        fault = Fault.from_json(body)
        worker = str(body.get("worker") or self._site.workers[0].name)
        await self._site.control.inject(worker, fault)
        return json_response({"worker": worker, "kind": fault.kind, "at_once": fault.kind in WORKER_KINDS})

"""Routes that any one worker can answer: models, versions, tokens; and those that nobody can answer well.

    /v1/models, /v1/models/{id}, /version      the first worker that answers, prefillers before decoders
    /tokenize, /detokenize                     the same: every worker has the tokenizer
    /reset_prefix_cache                        every worker, once per URL; 500 with the list of those that failed
    /v1/responses, /v1/messages                501

A worker that can't be reached, is late, or answers 5xx is passed over for the next; its last word is the client's only
when nobody had a better one. Responses and messages would go through a decoder whose recomputed requests look complete
on these routes, so that answers would be cut short silently.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.core.types import WorkerState
from balanceroute.errors import BalanceRouteError, InvalidRequest, NoHealthyWorkers, UpstreamError
from balanceroute.proxy.fleet import Worker
from balanceroute.proxy.intake import ClientGone, read_body, read_head
from balanceroute.proxy.responses import body_of, error_body, extra_headers, status_of
from balanceroute.proxy.services import Services

TIMEOUT_S: Final = 30.0
GET_TIMEOUT_S: Final = 3.0  # per worker, as on the example proxy
_LIMIT: Final = 64 * 2**20


class Forwarding:
    """The handlers; `services` is called per request, because they exist only while the application runs."""

    def __init__(self, services: Callable[[], Services]) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/models", self.forward, methods=["GET"]),
            Route("/v1/models/{model:path}", self.forward, methods=["GET"]),
            Route("/version", self.forward, methods=["GET"]),
            Route("/tokenize", self.forward, methods=["POST"]),
            Route("/detokenize", self.forward, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/v1/responses", self.not_implemented, methods=["POST"]),
            Route("/v1/responses/{rest:path}", self.not_implemented, methods=["GET", "POST", "DELETE"]),
            Route("/v1/messages", self.not_implemented, methods=["POST"]),
            Route("/v1/messages/{rest:path}", self.not_implemented, methods=["POST"]),
        ]

    async def forward(self, request: Request) -> Response:
        """Pass the request to the first worker that has an answer."""
        services = self._services()
        try:
            path, headers = _target(request), self._headers(request)
            limits = services.config.limits
            body = await read_body(request.receive, limits.max_body_bytes, limits.client_header_timeout_s)
        except ClientGone:
            return Response(status_code=400)  # nobody reads it
        except BalanceRouteError as error:
            return _error(error)
        failed, last = [], None
        for worker in sorted(services.fleet, key=lambda worker: worker.state is WorkerState.DOWN):
            try:
                last = await _ask(worker, request.method, path, body, headers)
            except (UpstreamError, TimeoutError) as error:
                failed.append(f"{worker.id}: {error or 'no answer in time'}")
            else:
                if last.status_code < 500:
                    return last
        return last or _error(NoHealthyWorkers(f"No worker answered ({'; '.join(failed)})."))

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Every worker, side by side."""
        try:
            path, headers = _target(request), self._headers(request)
        except BalanceRouteError as error:
            return _error(error)
        first_of = {worker.spec.url: worker for worker in self._services().fleet}

        async def one(worker: Worker) -> str | None:
            try:
                response = await _ask(worker, "POST", path, b"", headers)
            except (UpstreamError, TimeoutError) as error:
                return f"{worker.id}: {error or 'no answer in time'}"
            return None if response.status_code == 200 else f"{worker.id}: status {response.status_code}"

        failed = [text for text in await asyncio.gather(*map(one, first_of.values())) if text is not None]
        answer: dict[str, Any] = {"failed": failed} if failed else {"status": "ok"}
        return Response(orjson.dumps(answer), 500 if failed else 200, media_type="application/json")

    async def not_implemented(self, request: Request) -> Response:
        """Not through prefill and decode."""
        path = request.scope["route"].path.partition("/{")[0]
        text = f"{path} is not served through prefill/decode disaggregation; use /v1/chat/completions."
        return Response(error_body(501, text), 501, media_type="application/json")

    def _headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        key = self._services().config.auth.worker_api_key
        head = read_head(request.headers.raw, None, None if key is None else key.get_secret_value().encode())
        content_type = request.headers.get("content-type")
        kind = [] if content_type is None else [(b"content-type", content_type.encode("latin-1"))]
        return head.forwarded + kind


def _target(request: Request) -> str:
    """Path and query as the client wrote them: decoded, they could hold what ends a request line."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    query: bytes = request.scope["query_string"]
    target = raw + (b"?" + query if query else b"")
    if not target.isascii() or any(byte <= 0x20 or byte == 0x7F for byte in target):
        raise InvalidRequest("The path must be percent-encoded.")
    return target.decode("ascii")


async def _ask(worker: Worker, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> Response:
    async with asyncio.timeout(GET_TIMEOUT_S if method == "GET" else TIMEOUT_S):
        reply = await worker.upstream.request(method, path, body, headers)
        answer = await reply.read(_LIMIT)
    kind = reply.header(b"content-type")
    return Response(answer, reply.status, media_type=kind.decode("latin-1") if kind else None)


def _error(error: BalanceRouteError) -> Response:
    headers = {name.decode(): value.decode() for name, value in extra_headers(error)}
    return Response(body_of(error), status_of(error), headers, media_type="application/json")

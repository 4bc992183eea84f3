"""Routes that the router forwards to workers (models, versions, tokenizer, caches, profiles), and those it refuses.

    /v1/models, /v1/models/{id}, /version      the first worker that answers: those that are up before those that get
                                               no requests, these before those that are down; prefillers first
    /tokenize, /detokenize                     the same: every worker has the tokenizer
    /v1/messages/count_tokens                  the same, as /tokenize of the chat that it would become
    /reset_prefix_cache, /start_profile,       every worker, once per URL; 500 with the list of those that failed
    /stop_profile
    /v1/responses, the rest of /v1/messages    404

A worker gets a path of this list, never the client's URL; only calls to every worker have a query. Answers are JSON or
empty.

A relay that was just started waits until the brain has named the workers.

If a worker can't be reached, is late, or answers 5xx, 408, 429, or what is neither a 200 nor an error, the next one is
asked, for `TRYING_S` at most: of hundreds that are silent each would take its whole time. Ranks of one server count as
one. The client gets the last failure only if all fail. A worker that answers 401, 403 or 404 may have another model or
key than the others, so `WITNESSES` must say so. The request's own time limit (X-Request-Timeout,
`limits.request_timeout_s`) ends this with 504, as on the hot routes. The log says which worker failed and how; the
client, which may be anybody (`/version`), gets no names of workers. `/v1/responses` is refused because on that route an
answer that the decoder gave up for recomputation looks complete, so answers would be cut short unnoticed. The status is
404, because OpenAI's clients repeat every 5xx.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.core.types import Role, WorkerState
from balanceroute.errors import (
    BadUpstreamReply,
    InvalidRequest,
    NoHealthyWorkers,
    NotJson,
    UpstreamError,
)
from balanceroute.proxy.admission.decider import NO_WORKERS_RETRY_AFTER_S
from balanceroute.proxy.client.intake import read_head, unread_coding
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.life.errors import TOO_LONG, DeadlineExceeded
from balanceroute.proxy.ops.guard import route_of
from balanceroute.proxy.ops.shared_answer import SharedAnswer
from balanceroute.proxy.wire.bounds import token_count
from balanceroute.proxy.wire.message_errors import MESSAGES_PATH
from balanceroute.proxy.wire.message_requests import tokenize_body
from balanceroute.proxy.wire.responses import error_body
from balanceroute.proxy.workers.fleet import Worker

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 30.0
GET_TIMEOUT_S: Final = 3.0  # per worker, as in vllm-ascend's example proxy
WITNESSES: Final = 2  # few: a client may ask for an unknown model as often as it likes
TRYING_S: Final = 40.0  # after this no other worker is asked; more than the longest that one may take
RESET_PREFIX_CACHE: Final = "/reset_prefix_cache"
_LIMIT: Final = 64 * 2**20
_OTHER_MODEL: Final = frozenset((401, 403, 404))  # of a worker with another model or key
_ASK_ANOTHER: Final = _OTHER_MODEL | frozenset((408, 429))
_MAX_NAME: Final = 512  # characters of a model's name
_ORDER: Final = (WorkerState.UP, WorkerState.DRAINING, WorkerState.DOWN)
_FLAG: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_json: Final = msgspec.json.Decoder(msgspec.Raw)  # checks JSON and makes nothing of it: it may be millions of token ids


class _Count(msgspec.Struct):
    """What `count_tokens` takes of an answer to `/tokenize`."""

    count: int


_counts: Final = msgspec.json.Decoder(_Count)


class Forwarding:
    """The handlers; `services` is called per request, because they exist only while the application runs."""

    def __init__(
        self, services: Callable[[], ClientServices], forget_prefixes: Callable[[str], None] = lambda worker_id: None
    ) -> None:
        """`forget_prefixes` is called with each prefiller whose prefix cache has been emptied."""
        self._services, self._forget_prefixes = services, forget_prefixes
        self._version = SharedAnswer(self._ask_version)

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/models", self.forward, methods=["GET"]),
            Route("/v1/models/{model:path}", self.forward, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/tokenize", self.forward, methods=["POST"]),
            Route("/detokenize", self.forward, methods=["POST"]),
            Route(RESET_PREFIX_CACHE, self.to_all, methods=["POST"]),
            Route("/start_profile", self.to_all, methods=["POST"]),
            Route("/stop_profile", self.to_all, methods=["POST"]),
            Route("/v1/responses", self.not_served, methods=["POST"]),
            Route("/v1/responses/{rest:path}", self.not_served, methods=["GET", "POST", "DELETE"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/messages/batches{rest:path}", self.not_served, methods=["GET", "POST", "DELETE"]),
        ]

    async def forward(self, request: Request) -> Response:
        """Answer with the reply of the first worker that has one."""
        path, (headers, deadline_s) = _target(request), _read(request, self._services())
        # HEAD as GET: our client of workers waits for the body that a length announces, and HEAD has none
        method = "GET" if request.method == "HEAD" else request.method
        return await self._first_answer(method, path, await request.body(), headers, deadline_s)

    async def version(self, request: Request) -> Response:
        """The engines' version; anybody may ask, so all who do so together are one caller of a worker."""
        return await self._version.get()

    async def _ask_version(self) -> Response:
        authorization = self._services().perimeter.authorization_for([])
        return await self._first_answer(
            "GET", "/version", b"", [(b"authorization", authorization)] if authorization else []
        )

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's count of a prompt's tokens, by the engines' own tokenizer and chat template."""
        headers, deadline_s = _read(request, self._services())
        try:
            body = tokenize_body(await request.body())
        except NotJson as error:
            raise unread_coding(request.headers.raw) or error from None
        answer = await self._first_answer("POST", "/tokenize", body, headers, deadline_s)
        if answer.status_code != 200:
            return answer
        try:
            count = token_count(_counts.decode(answer.body).count, "count")
        except ValueError as error:
            text = f"its answer is no count of tokens ({error})"
            raise BadUpstreamReply(text, worker="", tier="tokenize") from None
        return Response(orjson.dumps({"input_tokens": count}), media_type="application/json")

    async def _first_answer(
        self, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]], deadline_s: float = math.inf
    ) -> Response:
        services, now = self._services(), asyncio.get_running_loop().time
        await services.know_workers(min(TIMEOUT_S, services.config.queue.deadline_s, deadline_s - now()))
        failed, last, refusals = [], None, 0
        until_s = now() + TRYING_S
        first_of: dict[str, Worker] = {}
        for worker in sorted(services.fleet, key=lambda worker: _ORDER.index(worker.state)):
            first_of.setdefault(worker.spec.url, worker)
        for worker in first_of.values():
            if now() >= until_s:
                break
            try:
                last = _checked(await _ask(worker, method, path, body, headers, deadline_s), worker)
            except DeadlineExceeded:
                raise
            except (UpstreamError, TimeoutError) as error:
                failed.append(_failure(worker, error))
            else:
                refusals += last.status_code in _OTHER_MODEL
                if refusals >= WITNESSES or not (last.status_code >= 500 or last.status_code in _ASK_ANOTHER):
                    return last
        if last is not None:
            return last
        log.info("no worker answered", extra={"path": path, "failed": failed})
        text = f"None of {len(failed)} workers answered; GET /ready says more." if failed else "There is no worker."
        raise NoHealthyWorkers(text, retry_after_s=NO_WORKERS_RETRY_AFTER_S)

    async def to_all(self, request: Request) -> Response:
        """Call every worker, all at the same time."""
        path = _target(request) + _flags(request)
        headers, deadline_s = _read(request, self._services())
        first_of = {worker.spec.url: worker for worker in self._services().fleet}
        reset: set[str] = set()

        async def one(worker: Worker) -> str | None:
            try:
                response = await _ask(worker, "POST", path, b"", headers, deadline_s)
            except (UpstreamError, TimeoutError) as error:
                return _failure(worker, error)
            if response.status_code != 200:
                return f"{worker.id}: status {response.status_code}"
            reset.add(worker.spec.url)
            return None

        failed = [text for text in await asyncio.gather(*map(one, first_of.values())) if text is not None]
        if route_of(request) == RESET_PREFIX_CACHE:
            for worker in self._services().fleet.of(Role.PREFILL):
                if worker.spec.url in reset:
                    self._forget_prefixes(worker.id)
        answer: dict[str, Any] = {"failed": failed} if failed else {"status": "ok"}
        return Response(orjson.dumps(answer), 500 if failed else 200, media_type="application/json")

    async def not_served(self, request: Request) -> Response:
        """404: this route does not go through prefill and decode."""
        asked, other = route_of(request).partition("/{")[0], "/v1/chat/completions"
        if request.scope["path"].startswith(MESSAGES_PATH):
            asked, other = request.scope["path"], MESSAGES_PATH
        text = f"{asked} is not served through prefill/decode disaggregation; use {other}."
        return Response(error_body(404, text), 404, media_type="application/json")


def _read(request: Request, services: ClientServices) -> tuple[list[tuple[bytes, bytes]], float]:
    """The headers for workers, and the request's own deadline on the loop's clock. Raises: InvalidRequest."""
    head = read_head(request.headers.raw, None, services.perimeter.authorization_for(request.headers.raw))
    head.check()
    # whatever the client called it, as curl -d does: vLLM refuses a body that is not declared as JSON
    declared = [(b"content-type", b"application/json")] if request.method == "POST" else []
    within_s = min(head.timeout_s, services.config.limits.request_timeout_s)
    return head.forwarded + declared, asyncio.get_running_loop().time() + within_s


def _target(request: Request) -> str:
    """The path for the workers: the route's own, with the model's name if it has one, without a query.

    Raises: InvalidRequest: a server on the way may take the name for another path. HTTPException: there is no name.
    """
    route = route_of(request)
    stem, _, rest = route.partition("{")
    if not rest:
        return route
    name: str = request.path_params["model"]
    if not name:
        raise HTTPException(404)  # a trailing slash
    parts = name.split("/")
    is_ambiguous = any(part in ("", ".", "..") for part in parts) or "\\" in name or not name.isprintable()
    if is_ambiguous or len(name) > _MAX_NAME:
        raise InvalidRequest("The model name is not valid.", status=404, param="model")
    return stem + quote(name, safe="/")


def _flags(request: Request) -> str:
    """The query for a call to all workers, of checked flags. Raises: InvalidRequest."""
    query: bytes = request.scope["query_string"]
    if not query:
        return ""
    try:
        fields = parse_qsl(query.decode("ascii"), strict_parsing=True, max_num_fields=16)
    except ValueError:
        raise InvalidRequest("The query must be NAME=VALUE, percent-encoded.") from None
    if not all(_FLAG.fullmatch(part) for field in fields for part in field):
        raise InvalidRequest("Names and values of the query are letters, digits, - and _.")
    return "?" + urlencode(fields)


async def _ask(
    worker: Worker, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]], deadline_s: float
) -> Response:
    late_s = asyncio.get_running_loop().time() + (GET_TIMEOUT_S if method == "GET" else TIMEOUT_S)
    try:
        async with asyncio.timeout_at(min(late_s, deadline_s)):
            reply = await worker.upstream.request(method, path, body, headers)
            answer = await reply.read(_LIMIT)
    except TimeoutError:
        if deadline_s > late_s:
            raise
        raise DeadlineExceeded(f"{TOO_LONG}.", worker=worker.id, tier="") from None
    return Response(answer, reply.status, media_type="application/json")


def _failure(worker: Worker, error: UpstreamError | TimeoutError) -> str:
    return f"{worker.id}: {str(error) or 'no answer in time'}"


def _checked(answer: Response, worker: Worker) -> Response:
    """The body of a worker's answer, if it is JSON, whatever its Content-Type.

    Raises: BadUpstreamReply: it is a page or a redirect, which a browser would take for the router's.
    """
    try:
        if answer.status_code != 200 and answer.status_code < 400:
            raise ValueError(f"status {answer.status_code}")
        _json.decode(answer.body)
    except (ValueError, RecursionError) as error:
        raise worker.failure(BadUpstreamReply, f"its answer is no JSON ({error})") from None
    return answer

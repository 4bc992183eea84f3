"""Sends the requests of a trace at their times (open loop) and reports what the client saw.

Every request asks for exactly the trace's number of output tokens (`max_tokens` with `ignore_eos`) as a
stream with a final usage record. An answer counts as complete when the stream ended with its end marker, a
finish reason, and as many tokens as asked for by the server's own count; anything else is counted by what
went wrong. `late` says how far behind the trace's times the client itself was: figures of a client that
cannot keep up say nothing about the server.
"""

import asyncio
import collections
import json
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np

from balanceroute import report
from balanceroute.errors import InputError
from balanceroute.loadgen.client import Client, ExchangeFailed, Reply, checked, checked_secret
from balanceroute.loadgen.prompts import PromptText
from balanceroute.report import Distribution
from balanceroute.traces import BLOCK_TOKENS, Trace

END_MARKER = b"[DONE]"
MOST_TIME_SCALE = 1e6
MOST_PROMPT_TOKENS = 10_000_000  # more than any engine takes, and 40 MB of a request
MOST_DAYS = 366  # from the first request to the last: who would wait longer has mistyped a number
MOST_MESSAGE = 200  # characters
Progress = Callable[[int, int], None]  # requests sent so far, requests ended so far


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Where to send, and how to play the trace."""

    base_url: str  # without /v1
    model: str | None = None  # None: the first of /v1/models
    api_key: str | None = None
    time_scale: float = 1.0  # seconds of wall clock per second of the trace; below 1 is faster
    timeout_s: float | None = None  # longest time for one answer
    seed: int = 0  # of the prompts
    extra_body: dict[str, Any] = field(default_factory=dict)
    block_tokens: int = BLOCK_TOKENS  # that each name of a prompt's blocks stands for, where the trace has them

    def checked(self) -> None:
        """Raises: InputError that names the first value which makes no sense."""
        checked(self.base_url)
        checked_secret("api key", self.api_key)
        if not 0 < self.time_scale <= MOST_TIME_SCALE:
            raise InputError(
                f"time scale {self.time_scale:g}: accepted is a number above 0 and at most {MOST_TIME_SCALE:g}"
            )
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InputError(f"timeout {self.timeout_s:g}: accepted is a number of seconds above 0")


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request as the client saw it; times are seconds from the start of the run."""

    sent_s: float
    late_s: float
    error: str | None  # None: complete
    message: str = ""  # what the endpoint says of the error
    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None
    output_tokens: int = 0
    itl_s: np.ndarray[Any, np.dtype[np.float32]] = field(default_factory=lambda: np.empty(0, dtype=np.float32))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The outcome of a run; latencies are of complete answers only."""

    requests: int
    completed: int
    errors: dict[str, int]  # what went wrong, with what the endpoint said of it the first time -> how often
    duration_s: float
    requests_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    latency_s: Distribution
    late_s: Distribution


async def run_load(
    trace: Trace, options: LoadOptions, on_progress: Progress | None = None, stop: asyncio.Event | None = None
) -> LoadReport:
    """Send a trace and report. With `stop` set the report is of what was sent until then, at once.

    Raises: InputError when the endpoint cannot be used at all.
    """
    options.checked()
    check_sendable(trace, options)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    client = Client(options.base_url, headers)
    results: dict[int, RequestResult] = {}

    async def play() -> None:
        model = options.model or await first_model(client)
        await Run(trace, options, client, model, results, on_progress).run()

    try:
        await _unless(stop or asyncio.Event(), play())
    finally:
        client.close()
    return summarise([results[row] for row in sorted(results)])


def check_sendable(trace: Trace, options: LoadOptions) -> None:
    """Raises: InputError: the last request would never be sent, or one is larger than memory has room for."""
    largest = int(trace.prompt_tokens.max())
    if largest > MOST_PROMPT_TOKENS:
        raise InputError(f"a prompt of {largest:,} tokens: at most {MOST_PROMPT_TOKENS:,} are sent")
    last_s = (float(trace.arrival_s[-1]) - float(trace.arrival_s[0])) * options.time_scale
    if not last_s <= MOST_DAYS * 86_400:  # NaN is not, of infinite arrivals
        raise InputError(f"the last request would be sent more than {MOST_DAYS} days after the first")


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Do the work, to its end or until the event is set."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait((working,))
    if not working.cancelled():
        working.result()


async def first_model(client: Client) -> str:
    """The id of the first model that the endpoint serves."""
    try:
        reply = await client.get("/v1/models")
    except ExchangeFailed as error:
        raise InputError(f"{client.url.geturl()}: {error}") from error
    try:
        return str(json.loads(reply.tail)["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        message = message_of(reply.tail)
        status = f"status {reply.status}: {message}" if message else f"status {reply.status}"
        hint = "; set --api-key or OPENAI_API_KEY to one of its keys" if reply.status == 401 else ""
        raise InputError(f"{client.url.geturl()}: no model list ({status}){hint}") from error


class Run:
    """One run under way."""

    def __init__(
        self,
        trace: Trace,
        options: LoadOptions,
        client: Client,
        model: str,
        results: dict[int, RequestResult],
        on_progress: Progress | None,
    ) -> None:
        """`results`: where each request's result goes, by its row."""
        self.results = results
        self.trace = trace
        self.options = options
        self.client = client
        self.on_progress = on_progress
        self.prompts = PromptText(options.seed)
        body = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "ignore_eos": True,
            **options.extra_body,
        }
        self.body_head = json.dumps(body)[:-1].encode()
        self.start_s = 0.0
        self.sent = 0
        self.ended = 0

    async def run(self) -> None:
        """Send everything on time and wait for all answers; what is cut short by a cancellation is `interrupted`."""
        self.start_s = monotonic()
        due = (self.trace.arrival_s - self.trace.arrival_s[0]) * self.options.time_scale
        async with asyncio.TaskGroup() as group:
            for row, due_s in enumerate(due.tolist()):
                await asyncio.sleep(max(0.0, self.start_s + due_s - monotonic()))
                group.create_task(self.one(row, due_s))
                self.sent += 1
                self.tell()

    def tell(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self.sent, self.ended)

    def body_of(self, row: int) -> bytes:
        """The request body of one row; rows without a key have a prompt of their own."""
        key, tokens = str(self.trace.prompt_key[row]) or f"row {row}", int(self.trace.prompt_tokens[row])
        if self.trace.prefix:
            prompt = self.prompts.of_blocks(self.trace.prefix[row], self.options.block_tokens, f"row {row}", tokens)
        else:
            prompt = self.prompts.prompt(key, tokens)
        return b'%b, "max_tokens": %d, "prompt": %b}' % (
            self.body_head,
            int(self.trace.output_tokens[row]),
            prompt,
        )

    async def one(self, row: int, due_s: float) -> None:
        """One request, from sending it to its result."""
        body = self.body_of(row)
        sent = monotonic()
        sent_s = sent - self.start_s
        late_s = max(0.0, sent_s - due_s)  # a timer may be a millisecond early
        self.results[row] = RequestResult(sent_s, late_s, "interrupted")
        try:
            async with asyncio.timeout(self.options.timeout_s):
                reply = await self.client.post("/v1/completions", body)
            self.results[row] = result_of(reply, sent, sent_s, late_s, int(self.trace.output_tokens[row]))
        except ExchangeFailed as error:
            self.results[row] = RequestResult(sent_s, late_s, str(error))
        except TimeoutError:
            self.results[row] = RequestResult(sent_s, late_s, "timed out")
        finally:
            self.ended += 1
            self.tell()


def result_of(reply: Reply, sent: float, sent_s: float, late_s: float, wanted_tokens: int) -> RequestResult:
    """Judge one reply: is it complete, and how fast was it."""
    if reply.status != 200:
        return RequestResult(sent_s, late_s, f"status {reply.status}", message_of(reply.tail))
    ending = Ending.of(reply.tail)
    times = reply.event_times_s[: len(reply.event_times_s) - ending.events_without_token]
    tokens = ending.completion_tokens if ending.completion_tokens is not None else len(times)
    error = ending.error
    if error is None and tokens != wanted_tokens:
        error = "too few tokens" if tokens < wanted_tokens else "too many tokens"
    if not times:
        return RequestResult(sent_s, late_s, error or "no tokens", ending.message)
    return RequestResult(
        sent_s,
        late_s,
        error,
        ending.message,
        ttft_s=report.ttft_s(sent, times[0]),
        tpot_s=report.tpot_s(times[0], times[-1], tokens),
        latency_s=times[-1] - sent,
        output_tokens=tokens,
        # where chunks carry several tokens, which ones is not known: the gaps are then those between chunks
        itl_s=report.itl_s(times, [1] * len(times)).astype(np.float32),
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """The contents of the last events of a stream."""

    events_without_token: int
    completion_tokens: int | None
    error: str | None
    message: str

    @classmethod
    def of(cls, tail: bytes) -> "Ending":
        """Parse the last bytes of a stream; the first event in them may be cut off and is then ignored."""
        without_token, tokens, error, message = 0, None, None, ""
        marked = finished = False
        for payload in payloads(tail):
            if payload == END_MARKER:
                marked = True
                without_token += 1
                continue
            event = object_in(payload)
            if not event:
                continue
            if "error" in event:
                error, message = f"error event: {error_kind(event['error'])}", message_of(payload)
                without_token += 1
                continue
            choices = event.get("choices")
            choices = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
            finished = finished or any(choice.get("finish_reason") for choice in choices)
            without_token += not choices
            usage = event.get("usage")
            if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
                tokens = usage["completion_tokens"]
        if error is None and not marked:
            error = "no end marker"
        if error is None and not finished:
            error = "no finish reason"
        return cls(without_token, tokens, error, message)


def payloads(tail: bytes) -> list[bytes]:
    """The data of the events that end in these bytes."""
    return [line.removeprefix(b"data:").strip() for line in tail.splitlines() if line.startswith(b"data:")]


def object_in(text: bytes) -> dict[str, Any]:
    """The JSON object that the text is; an empty one for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def message_of(body: bytes) -> str:
    """The message in an error's body, in one line; empty: the form is unknown."""
    found = object_in(body)
    error = found.get("error", found)
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(message.split())[:MOST_MESSAGE] if isinstance(message, str) else ""


def error_kind(error: Any) -> str:
    """A short name for an error object of a stream."""
    if isinstance(error, dict):
        return str(error.get("type") or error.get("code") or "unnamed")
    return "unnamed"


def counted(failed: list[RequestResult]) -> dict[str, int]:
    """How often each error came, the most frequent first; messages may name requests, so the first stands for all."""
    first: dict[str | None, str] = {}
    for result in failed:
        if result.message:
            first.setdefault(result.error, result.message)
    counts = collections.Counter(result.error for result in failed).most_common()
    return {f"{error}: {first[error]}" if error in first else str(error): count for error, count in counts}


def summarise(results: list[RequestResult]) -> LoadReport:
    """Counts, rates and distributions over all requests."""
    complete = [result for result in results if result.error is None]
    ends = [result.sent_s + result.latency_s for result in results if result.latency_s is not None]
    duration = max(ends, default=0.0)
    tokens = sum(result.output_tokens for result in results)
    return LoadReport(
        requests=len(results),
        completed=len(complete),
        errors=counted([result for result in results if result.error]),
        duration_s=duration,
        requests_per_s=len(complete) / duration if duration else 0.0,
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration if duration else 0.0,
        ttft_s=Distribution.of([r.ttft_s for r in complete if r.ttft_s is not None]),
        tpot_s=Distribution.of([r.tpot_s for r in complete if r.tpot_s is not None]),
        itl_s=Distribution.of(np.concatenate([r.itl_s for r in complete]) if complete else []),
        latency_s=Distribution.of([r.latency_s for r in complete if r.latency_s is not None]),
        late_s=Distribution.of([result.late_s for result in results]),
    )

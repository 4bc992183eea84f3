"""Serves a client request with several answers: `n` > 1, or a list of prompts.

A KV transfer carries one prompt and one answer, so such a request becomes a leg per choice, each with its own prefill,
place in the pool and decode worker. Their answers are merged here:

    stream        the legs' events as they come, each with its choice's index, under one id; then one usage, one [DONE]
    otherwise     one object with all choices in order, usage summed

A prompt counts once in the usage, as on vLLM, however many answers it has. If one leg fails, the others are abandoned
and the whole request fails.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.client.outlets import PartAnswer
from balanceroute.proxy.life.errors import ClientGone
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.wire.answer_identity import ModelName, Part
from balanceroute.proxy.wire.answers import opened
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.closing import DONE_EVENT, event_bytes, event_head, usage_of
from balanceroute.proxy.wire.derived_requests import split
from balanceroute.proxy.wire.usage import summed

MAX_COPIED_BYTES: Final = 256 * 2**20  # each choice sends its prompt and all other fields again


def parts_of(request: ClientRequest, max_choices: int, body_bytes: int) -> list[ClientRequest]:
    """The request of each choice, made of a request whose body has `body_bytes`.

    Raises: InvalidRequest: more than `max_choices`, or together more than `MAX_COPIED_BYTES`.
    """
    choices = request.n * request.prompts
    if choices > max_choices:
        raise InvalidRequest(
            f"At most {max_choices} choices per request (n times prompts), not {choices}.",
            param="n" if request.n > 1 else "prompt",
        )
    prompt_bytes = len(request.prompt_json)
    copied_bytes = request.n * prompt_bytes + choices * max(0, body_bytes - prompt_bytes)
    if copied_bytes > MAX_COPIED_BYTES:
        raise InvalidRequest(
            f"All choices together make {copied_bytes} bytes of requests to the workers, at most {MAX_COPIED_BYTES}.",
            param="n" if request.n > 1 else "prompt",
        )
    return split(request)


def common_part(request: ClientRequest, request_id: str) -> Part:
    """What the parts of all choices have in common; the id is as vLLM makes it from a request id."""
    kind = "chatcmpl" if request.endpoint == "chat" else "cmpl"
    public_id = f"{kind}-{request_id}"
    return Part(public_id=public_id, created=int(time.time()), closing_events=False, model=ModelName())


async def run_all(legs: Sequence[Leg]) -> None:
    """Run legs side by side; the first failure abandons the others and is raised when all have left."""
    failure = await _failure_of(legs)
    if failure is not None:
        try:
            raise failure
        finally:  # else the failure and this frame, which its traceback holds, keep each other alive
            del failure


async def _failure_of(legs: Sequence[Leg]) -> BaseException | None:
    """Run legs; returns the first failure. That the client has gone is returned only if no leg failed otherwise."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(leg.run()) for leg in legs]
    cancelled: tuple[Any, ...] | None = None
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            for leg in legs:
                leg.abandon()
            await asyncio.wait(pending)
    except asyncio.CancelledError as error:
        cancelled = error.args
    if cancelled is not None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise asyncio.CancelledError(*cancelled)
    failures = [ClientGone() if task.cancelled() else task.exception() for task in tasks]
    raised = [failure for failure in failures if failure is not None]
    return next((failure for failure in raised if not isinstance(failure, ClientGone)), raised[0] if raised else None)


def merged_usage(request: ClientRequest, legs: Sequence[Leg]) -> dict[str, Any]:
    """The usage of all legs together."""
    of_prompts = legs[:: request.n]
    prompt_tokens = sum(leg.answer.prompt_tokens for leg in of_prompts)
    completion_tokens = sum(leg.answer.scanner.tokens for leg in legs)
    usage: dict[str, Any] = {**usage_of(prompt_tokens, completion_tokens)}
    if details := summed(leg.answer.prompt_details for leg in of_prompts):
        usage["prompt_tokens_details"] = details
    return usage


def _completion_details(usages: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """The details of all choices; empty where one has none, as after a resume: its share is unknown."""
    details = [(usage or {}).get("completion_tokens_details") for usage in usages]
    return summed(details) if all(details) else {}


def closing_events(request: ClientRequest, common: Part, legs: Sequence[Leg]) -> bytes:
    """The end of a merged stream: usage, if asked for or sent unasked, and [DONE], when all legs have ended."""
    unasked = not request.counted_by_usage and any(leg.answer.scanner.usage for leg in legs)
    if not (request.include_usage or unasked):
        return DONE_EVENT
    usage = merged_usage(request, legs)
    if details := _completion_details(leg.answer.scanner.usage for leg in legs):
        usage["completion_tokens_details"] = details
    model = legs[0].answer.scanner.identity.model  # which all share
    head = event_head(common.public_id, common.created, model, chat=request.endpoint == "chat")
    event: dict[str, Any] = {**head, "choices": [], "usage": usage}
    if fingerprint := next((leg.answer.scanner.fingerprint for leg in legs if leg.answer.scanner.fingerprint), None):
        event["system_fingerprint"] = fingerprint
    return event_bytes(event) + DONE_EVENT


def merged_answer(request: ClientRequest, common: Part, legs: Sequence[Leg], outlets: Sequence[PartAnswer]) -> bytes:
    """One object with all choices."""
    answers = [opened(outlet.answer(leg)) for leg, outlet in zip(legs, outlets, strict=True)]
    whole = answers[0]
    whole["id"] = common.public_id
    whole["choices"] = [{**answer["choices"][0], "index": index} for index, answer in enumerate(answers)]
    details = _completion_details(answer.get("usage") for answer in answers)
    whole["usage"] = {
        **(whole.get("usage") or {}),
        **merged_usage(request, legs),
        "completion_tokens_details": details or None,
    }
    if "metrics" in whole:
        whole["metrics"] = None  # those of one choice; vLLM tells none of several
    return orjson.dumps(whole)

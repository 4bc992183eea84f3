"""What the checks of `real_vllm.py` ask, what a right answer is, and what the router says of itself."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from balanceroute.demo.processes import total
from scripts.chaos_run.aftermath import held_by_router
from scripts.e2e.harness import wait_for
from scripts.e2e.vllm_servers import BASE, DECODE, MODEL

HALVED = "half of a character"
"""How an error says that the client has token ids of a character that is not whole: no other decoder can end it."""
# The model is of bfloat16, and its largest logits are between 16 and 32, where bfloat16 goes in steps of 0.125. A lost
# or a wrong token makes gaps of 5 to 25 among those that follow.
ROUNDING_NATS = 0.2


def a_prompt(seed: int, length: int = 60) -> list[int]:
    """Token ids that depend on the seed alone."""
    return [random.Random(seed * 7919 + position).randrange(10, 1000) for position in range(length)]


def a_body(seed: int, max_tokens: int = 40, **more: Any) -> dict[str, Any]:
    """A greedy completions request."""
    body = {"model": MODEL, "prompt": a_prompt(seed), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | more


def completion(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """The one choice of a completion that is not streamed."""
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300, trust_env=False)
    reply.raise_for_status()
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def completion_ids(port: int, body: dict[str, Any]) -> list[int]:
    """Token ids of a non-streamed completion."""
    ids: list[int] = completion(port, body | {"return_token_ids": True})["token_ids"]
    return ids


def completion_text(port: int, body: dict[str, Any]) -> str:
    """Text of a non-streamed completion."""
    return str(completion(port, body)["text"])


def events_of(body: dict[str, Any], request_id: str) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion through the router."""
    url, headers = f"{BASE}/v1/completions", {"x-request-id": request_id}
    with httpx.stream(
        "POST", url, json=body | {"stream": True}, headers=headers, timeout=300, trust_env=False
    ) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def streamed_ids(
    body: dict[str, Any],
    on_event: Callable[[int], None] | None = None,
    request_id: str = "any",
    may_be_halved: bool = False,
) -> tuple[list[int], str | None]:
    """Token ids of a streamed completion through the router, and its finish reason (None: it ended unfinished).

    `may_be_halved`: its decoder is taken from it, which may be within a character: its reason is then `HALVED`.
    """
    ids: list[int] = []
    reason = None
    for event in events_of(body | {"return_token_ids": True}, request_id):
        if "error" in event:
            if may_be_halved and ids and HALVED in str(event["error"]):
                return ids, HALVED
            raise RuntimeError(f"error event: {event['error']}")
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
            reason = choice.get("finish_reason") or reason
        if on_event is not None:
            on_event(len(ids))
    return ids, reason


def streamed_text(body: dict[str, Any], on_event: Callable[[], None], request_id: str) -> tuple[str, str | None]:
    """Text of a streamed completion through the router, and that of its error event."""
    text = ""
    for event in events_of(body, request_id):
        if "error" in event:
            return text, str(event["error"]["message"])
        text += "".join(choice["text"] or "" for choice in event["choices"])
        on_event()
    return text, None


def outcome_of(body: dict[str, Any]) -> str:
    """complete, a status, or what broke the stream."""
    try:
        ids, reason = streamed_ids(body)
    except httpx.HTTPStatusError as error:
        return str(error.response.status_code)
    except RuntimeError:
        return "error event"
    except httpx.TransportError as error:
        return type(error).__name__
    return "complete" if reason == "length" and len(ids) == body["max_tokens"] else "truncated"


@contextmanager
def under_way(
    bodies: Sequence[dict[str, Any]], spare: int = 0, may_be_halved: bool = False
) -> Iterator[tuple[ThreadPoolExecutor, list[Future[tuple[list[int], str | None]]]]]:
    """Streams of these bodies that have all given tokens, and their threads with so many to spare."""
    reached: set[int] = set()

    def one(number: int) -> tuple[list[int], str | None]:
        return streamed_ids(
            bodies[number], lambda tokens: reached.add(number) if tokens > 5 else None, may_be_halved=may_be_halved
        )

    with ThreadPoolExecutor(len(bodies) + spare) as pool:
        streams = [pool.submit(one, number) for number in range(len(bodies))]
        wait_for("all streams are under way", lambda: len(reached) == len(bodies), 120)
        yield pool, streams


def assert_greedy(bodies: Sequence[dict[str, Any]], got: Sequence[tuple[list[int], str | None]]) -> None:
    """Every stream is whole, and each token is the one that the engine holds for the likeliest after those before it.

    One that ended within a character, which only `may_be_halved` lets through, is right as far as it goes.

    Two runs of the engine itself need not be equal: where two tokens come out as likely as each other, its kernels for
    one request and those for a batch may choose differently, and a stream that a fault moves is in several batches.
    """
    wrong = []
    for number, (body, (ids, reason)) in enumerate(zip(bodies, got, strict=True)):
        far = [index for index, gap in enumerate(greedy_gaps_nats(body, ids)) if gap > ROUNDING_NATS]
        whole = reason == "length" and len(ids) == body["max_tokens"]
        if far or not (whole or reason == HALVED):
            wrong.append(f"{number}: tokens {far[:9]} of {len(ids)} ({body['max_tokens']} asked for, {reason})")
    assert not wrong, f"{len(wrong)} of {len(got)} streams are not what the engine answers: {'; '.join(wrong)}"


def greedy_gaps_nats(body: dict[str, Any], ids: list[int]) -> list[float]:
    """By how much the likeliest token is likelier than each that came: zeros for a greedy answer."""
    prompt = completion(DECODE[1], body | {"max_tokens": 1, "return_token_ids": True})["prompt_token_ids"]
    again = body | {"prompt": prompt + ids, "max_tokens": 1, "prompt_logprobs": 1}
    logprobs = completion(DECODE[1], again)["prompt_logprobs"][len(prompt) :]
    return [
        max(entry["logprob"] for entry in entries.values()) - entries[str(token)]["logprob"]
        for token, entries in zip(ids, logprobs, strict=True)
    ]


def metric(port: int, name: str) -> float:
    """Sum of a metric over its labels; 0 when the server does not have it."""
    return total(httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=10).text, name)


def ready(port: int) -> dict[str, Any]:
    """What the router on this port says of its readiness; its status code as `code`."""
    reply = httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False)
    return {**reply.json(), "code": reply.status_code}


def router_state() -> dict[str, Any]:
    """What the router says of itself."""
    state: dict[str, Any] = httpx.get(f"{BASE}/state", trust_env=False).json()
    return state


def held() -> Counter[str]:
    """What the router still holds."""
    return Counter(held_by_router(router_state()))


def nothing_held() -> bool:
    """Whether all of the router's counters are zero."""
    return not held()


def all_prefilled() -> bool:
    """Whether no prompt is being prefilled, or waits for that, and some wait for a decoder."""
    now = held()
    return now["waiting"] >= 8 and not now["queued"] and not now["inflight"]


def workers_up() -> int:
    """Decode workers that the router takes as up."""
    return sum(worker["state"] == "up" for worker in router_state()["workers"])


def decoder_of(begun: set[str], streams: Sequence[Future[Any]]) -> tuple[int, int]:
    """The decoder that has most of these streams, by their request ids, and how many: two at least.

    Raises: AssertionError: all have ended before.
    """
    wait_for("two streams have begun", lambda: len(begun) >= 2, 240)
    while not all(stream.done() for stream in streams):
        held = [[each["id"].rpartition("-")[0] for each in worker["active"]] for worker in router_state()["workers"]]
        counts = [len(begun.intersection(names)) for names in held]
        if max(counts) >= 2:
            return DECODE[counts.index(max(counts))], max(counts)
    raise AssertionError("the streams ended before a decoder had two of them")

"""Checks workers' answers: each shape and number that the router reads has a bound.

A worker may be broken, or not an engine at all. A value that no engine sends makes the answer invalid
(`BadUpstreamReply`, or `StreamEnd.MALFORMED` in a stream), before it reaches the ledger, `/state` or a client.
"""

from typing import Any, Final

import orjson

from balanceroute.errors import BadUpstreamReply, ReplyTooLarge
from balanceroute.proxy.wire.json_size import MAX_FIELDS, count_nodes, excess_of

MAX_NODES: Final = 2**22  # strings, arrays, objects of a whole answer: 32,000 tokens with 20 logprobs
MAX_NODES_UNASKED: Final = 2**18  # beside logprobs, or where the client asked for nothing of it; read in 0.1 s
MAX_COMMAS: Final = 5_000_000  # between all values of a whole answer, or of an event
MAX_TOKENS: Final = 2**24  # of a prompt or an answer; the longest published context windows hold 10 million
MAX_RETRY_AFTER_S: Final = 3600.0
MAX_PARAMS_BYTES: Final = 16 * 2**20  # of kv_transfer_params: the block ids of a prompt of millions of tokens
MAX_PROMPT_DETAILS_BYTES: Final = 64 * 1024  # of a prefiller's usage, kept as long as the request; engines send some 50
ABORT: Final = "abort"  # vLLM's finish reason for all its requests when it is stopped (SIGTERM, /pause)
RECOMPUTED: Final = "recomputed"  # vllm-ascend's stop reason for a request that it gives back
UNCOUNTED: Final = -1  # cached_tokens of engines whose scheduler has not counted them: what vLLM begins with
MAX_ERROR_BYTES: Final = 2**20  # vLLM before 0.32 quotes a whole invalid body, and for each of its faults again
MAX_CHOICES: Final = 128  # of an event, though a worker is asked for one
_MAX_INDEX: Final = 2**16  # of a choice, as `limits.max_choices` may be
_MAX_NAME: Final = 64  # characters of a finish reason
_MAX_DETAILS: Final = 256  # values in a part of a usage's details; engines have one to three
_MAX_DETAIL_DEPTH: Final = 4  # levels below a part of a usage's details; engines have one
_COUNTS: Final = ("prompt_tokens", "completion_tokens", "total_tokens")
_DETAILS: Final = ("prompt_tokens_details", "completion_tokens_details")
_ERROR_FIELDS: Final = ("error", "message", "detail")  # in which engines and their frameworks put an error's text
# The types of a choice's fields; null counts as absent.
_FIELDS: Final[tuple[tuple[str, type], ...]] = (
    ("finish_reason", str),
    ("delta", dict),
    ("message", dict),
    ("logprobs", dict),
    ("text", str),
    ("token_ids", list),
)


def check_size(answer: bytes, worker: str, tier: str, max_nodes: int = MAX_NODES) -> None:
    """Count the values of a whole answer before it is read. Raises: ReplyTooLarge: there are too many."""
    if excess := excess_of(answer, max_nodes, MAX_COMMAS):
        raise ReplyTooLarge(f"its answer holds {excess}", worker=worker, tier=tier)


def check_whole(answer: bytes, worker: str, tier: str) -> None:
    """As `check_size`, but what looks like a value within a text counts, too: to tell them apart takes ten times as
    long, and none has so many. Raises: ReplyTooLarge.
    """
    if count_nodes(answer) > MAX_NODES or answer.count(b",") > MAX_COMMAS:
        text = f"its answer holds more than {MAX_NODES} strings, arrays and objects, or {MAX_COMMAS} values"
        raise ReplyTooLarge(text, worker=worker, tier=tier)


def token_count(value: object, name: str) -> int:
    """Check a number of tokens; `name`: for the error. Raises: ValueError."""
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    raise ValueError(f"{name} is {_shown(value)}, no number of tokens")


def checked_usage(usage: object) -> dict[str, Any]:
    """Check a `usage`; returns {} if there is none. Raises: ValueError: a count is out of bounds."""
    if usage is None:
        return {}
    if not isinstance(usage, dict):
        raise ValueError(f"usage is {_shown(usage)}")
    check_fields(usage)
    for name in _COUNTS:
        count = usage.get(name)
        if count is not None and (type(count) is not int or not 0 <= count <= MAX_TOKENS):
            token_count(count, f"usage.{name}")
    for name in _DETAILS:
        details = usage.get(name)
        if details is not None:
            _check_details(name, details)
    return usage


def _check_details(name: str, details: object) -> None:
    if not isinstance(details, dict):
        raise ValueError(f"usage.{name} is {_shown(details)}")
    check_fields(details)
    for part, value in details.items():
        name_of_field = f"usage.{name}.{part[:_MAX_NAME]}"
        if part == "cached_tokens":
            if value not in (None, UNCOUNTED):
                token_count(value, name_of_field)
        else:
            _check_counts(value, name_of_field, _MAX_DETAIL_DEPTH, _MAX_DETAILS)


def _check_counts(value: object, name: str, depth: int, most: int) -> int:
    """Check the numbers in `value`; returns how many of `most` values are left.

    Raises: ValueError: one is no count, or there are more than `depth` levels or `most` values.

    vLLM's `multimodal_tokens` is an object. Values that are not numbers are ignored: nothing sums them.
    """
    if isinstance(value, int):
        token_count(value, name)
    elif isinstance(value, dict | list):
        if not depth:
            raise ValueError(f"{name} is nested too deeply")
        for inner in value.values() if isinstance(value, dict) else value:
            most = _check_counts(inner, name, depth - 1, most)
    if most <= 0:
        raise ValueError(f"{name} holds too many values")
    return most - 1


def check_fields(holder: dict[str, Any]) -> None:
    """Check how many fields an object of an answer has. Raises: ValueError: too many to look at each."""
    if len(holder) > MAX_FIELDS:
        raise ValueError(f"it has {len(holder)} fields")


def checked_choice(choice: object) -> dict[str, Any]:
    """Check the types and the number of a choice's fields, of an event or a whole answer. Raises: ValueError."""
    if not isinstance(choice, dict):
        raise ValueError(f"a choice is {_shown(choice)}")
    for name, kind in _FIELDS:
        value = choice.get(name)
        if value is not None and type(value) is not kind:
            raise ValueError(f"{name} is {_shown(value)}")
    check_fields(choice)
    if delta := choice.get("delta"):
        check_fields(delta)
    index = choice.get("index", 0)
    if type(index) is not int or not 0 <= index < _MAX_INDEX:
        raise ValueError(f"index is {_shown(index)}")
    reason = choice.get("finish_reason")
    if reason is not None and len(reason) > _MAX_NAME:
        raise ValueError(f"finish_reason is {_shown(reason)}")
    return choice


def is_given_back(choice: dict[str, Any], *, stops_so: bool) -> bool:
    """Whether an engine gives the request of this choice back.

    `stops_so`: the marker is also one of the client's stop strings. An answer that stops there has the tokens of that
    string, and a marker has none.
    """
    return choice.get("stop_reason") == RECOMPUTED and not (stops_so and choice.get("token_ids") != [])


def aborted(worker: str, tier: str) -> BadUpstreamReply:
    """The error for an answer with the finish reason `abort`: it is incomplete, and may continue at another engine."""
    return BadUpstreamReply("its engine has aborted the request", worker=worker, tier=tier)


def answers(answer_id: object, upstream_id: str) -> bool:
    """Whether an answer's `id` is made of the X-Request-Id that was sent: `cmpl-ID` or `chatcmpl-ID`."""
    return isinstance(answer_id, str) and answer_id.endswith(upstream_id)


def shown_id(answer_id: object, upstream_id: str, request_id: str) -> object:
    """The `id` for the client: the engine's, without the part that differs between tries of a request."""
    if upstream_id == request_id or not isinstance(answer_id, str) or not answer_id.endswith(upstream_id):
        return answer_id
    return answer_id.removesuffix(upstream_id) + request_id


def retry_after_s(header: bytes | None) -> float:
    """The Retry-After of a worker, in seconds, at most `MAX_RETRY_AFTER_S`; 0: none, or a date."""
    if header is None or not header.isdigit():
        return 0.0
    return MAX_RETRY_AFTER_S if len(header.lstrip(b"0")) > 5 else min(MAX_RETRY_AFTER_S, float(header))


def error_object(body: bytes) -> bytes | None:
    """A worker's error as one line of JSON; None: it is no JSON object with an error's text."""
    try:
        data = orjson.loads(body)
        return orjson.dumps(data) if isinstance(data, dict) and any(map(data.get, _ERROR_FIELDS)) else None
    except (ValueError, TypeError):  # TypeError: nested deeper than orjson writes
        return None


def _shown(value: object) -> str:
    if isinstance(value, int | float):
        return str(value)[:_MAX_NAME]
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}[type(value)]

"""Reads a prefiller's answer to a probe: the pinned KV, and the prompt's figures."""

from array import array
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from balanceroute.errors import NoCompletion
from balanceroute.proxy.wire.bounds import (
    ABORT,
    MAX_NODES_UNASKED,
    MAX_PARAMS_BYTES,
    MAX_PROMPT_DETAILS_BYTES,
    aborted,
    check_size,
    check_whole,
    checked_choice,
    checked_usage,
    token_count,
)
from balanceroute.proxy.wire.usage import prompt_details_of

_LONG: Final = ("prompt_logprobs", "top_logprobs")  # lists that are not read
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


@dataclass(slots=True)
class PrefillResult:
    """A prefiller's answer to a probe.

    `kv_transfer_params` is raw JSON, None if nothing was pinned. `prompt_details`: the usage's details of the prompt,
    such as `cached_tokens`. `reply_id`: the answer's `id`, of any length, until it is checked. `reply`: the whole
    answer, if the client has `PromptWishes`; its long lists are `orjson.Fragment`. `kept_bytes`: of all this.
    """

    kv_transfer_params: bytes | None
    prompt_tokens: int
    cached_tokens: int | None
    prompt_token_ids: "array[int] | None"
    reply_id: Any = None
    reply: dict[str, Any] | None = None
    kept_bytes: int = 0
    prompt_details: dict[str, Any] | None = None


def parse_probe_reply(body: bytes, *, worker: str, keep: bool = False) -> PrefillResult:
    """Parse the body of a 200. `keep`: keep the whole answer, for `PromptWishes`.

    Raises: ReplyTooLarge; NoCompletion; BadUpstreamReply: its engine has aborted it. Null `kv_transfer_params` are no
    error here; the caller retries.
    """
    if keep:
        check_whole(body, worker, "prefill")
    else:
        check_size(body, worker, "prefill", MAX_NODES_UNASKED)
    try:
        reply = _opened(body) if keep else orjson.loads(body)
        usage = checked_usage(reply.get("usage"))
        details = _checked_details(usage)
        choice = checked_choice(reply["choices"][0])
        if choice.get("finish_reason") == ABORT:
            raise aborted(worker, "prefill")
        ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        prompt_tokens = usage.get("prompt_tokens")
        if prompt_tokens is None:
            prompt_tokens = token_count(len(ids) if ids else 0, "prompt_token_ids")
        pinned = _checked_params(reply.get("kv_transfer_params"))
        if keep:
            _shrink_ids(reply, choice)
            orjson.dumps(reply)  # checked now: if it can't be serialised, another prefiller may still be asked
        told = array("I", ids) if ids else None
        return PrefillResult(
            kv_transfer_params=pinned,
            prompt_tokens=prompt_tokens,
            cached_tokens=None if details is None else details.get("cached_tokens"),
            prompt_token_ids=told,
            reply=reply if keep else None,
            kept_bytes=(len(body) if keep else 0) + len(pinned or b"") + (told.itemsize * len(told) if told else 0),
            reply_id=reply.get("id"),
            prompt_details=details,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as exc:
        raise NoCompletion(
            f"the prefiller's reply is not a completion ({type(exc).__name__}: {exc})",
            worker=worker,
            tier="prefill",
        ) from exc


def _shrink_ids(*holders: dict[str, Any]) -> None:
    """Keep a prompt's token ids as JSON, which takes less than numbers do."""
    for holder in holders:
        if isinstance(ids := holder.get("prompt_token_ids"), list):
            holder["prompt_token_ids"] = orjson.Fragment(orjson.dumps(ids))


def _checked_details(usage: dict[str, Any]) -> dict[str, Any] | None:
    """The usage's details of the prompt; None: there are none. Raises: ValueError: they are too large to be kept."""
    details = prompt_details_of(usage)
    if details is not None and len(orjson.dumps(details)) > MAX_PROMPT_DETAILS_BYTES:
        raise ValueError(f"the usage's details of the prompt are larger than {MAX_PROMPT_DETAILS_BYTES} bytes")
    return details


def _checked_params(params: object) -> bytes | None:
    """`kv_transfer_params` as JSON; None: nothing was pinned. Raises: ValueError: they are too large to be sent on."""
    pinned = orjson.dumps(params) if isinstance(params, dict) and params else None
    if pinned is not None and len(pinned) > MAX_PARAMS_BYTES:
        raise ValueError(f"kv_transfer_params are larger than {MAX_PARAMS_BYTES} bytes")
    return pinned


def _opened(body: bytes) -> dict[str, Any]:
    """The values of an answer, but for its long lists, which stay JSON until the decoder has answered: 20 logprobs of
    each token take 8 kB as values, and those of 9,000 tokens stopped the event loop for half a second.

    Raises: ValueError, KeyError: it is no answer.
    """
    body.decode()  # of what stays JSON nobody else checks it
    fields = _fields.decode(body)
    choices = _choices.decode(fields["choices"])
    fields["choices"] = msgspec.Raw(b"[]")  # each is read by itself
    reply = _without_long(fields)
    reply["choices"] = [_without_long(choice) for choice in choices]
    return reply


def _without_long(fields: dict[str, msgspec.Raw], *, within: bool = False) -> dict[str, Any]:
    """`within`: these are the fields of `logprobs`, in which no engine puts others: each level is a copy."""
    values: dict[str, Any] = {}
    for name, raw in fields.items():
        text = bytes(raw)
        if name in _LONG and text[:1] == b"[":
            if b"\n" in text or b"\r" in text:  # between values; an event ends there
                text = text.translate(None, b"\r\n")
            values[name] = orjson.Fragment(text)
        elif name == "logprobs" and text[:1] == b"{" and not within:
            values[name] = _without_long(_fields.decode(text), within=True)
        else:
            values[name] = orjson.loads(text)
    return values

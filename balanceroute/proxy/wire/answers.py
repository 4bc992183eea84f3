"""Non-stream answers: built from a worker's stream, or corrected on the way through.

For most unstreamed requests the router asks the worker for a stream (`ClientRequest.assembled`): it then knows their
progress token by token, and a recomputed answer continues instead of starting over. `AnswerAssembler` builds from the
scanner's events the JSON object that the worker would have sent.

Short answers, and those that it can't rebuild (echo, prompt_logprobs, fields not in `client_request.ASSEMBLED_FIELDS`),
stay unstreamed: `correct_answer` counts their tokens at the end. The client gets nothing of such an answer before it is
complete, so after a recompute it is generated again from the client's prompt.
"""

from array import array
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.wire.bounds import (
    MAX_NODES_UNASKED,
    check_size,
    check_whole,
    checked_choice,
    checked_usage,
    is_given_back,
    shown_id,
    token_count,
)
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.event_contents import REASONING_KEYS
from balanceroute.proxy.wire.event_stream import payloads_of
from balanceroute.proxy.wire.sse import EventScanner
from balanceroute.proxy.wire.usage import put_prompt_details

# fields of unstreamed answers, in engines' order; a stream leaves out null ones
_USAGE: Final = (
    *("prompt_tokens", "total_tokens", "completion_tokens"),
    *("prompt_tokens_details", "completion_tokens_details"),
)
_OF_CHOICES: Final = frozenset(
    ("index", "delta", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids")
)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_parts: Final = msgspec.json.Decoder(list[msgspec.Raw])
_choices: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_NO_CHOICES: Final = msgspec.Raw(b"[]")
_LONG: Final = {"logprobs": b"{", "prompt_logprobs": b"["}  # fields that are not read, and how their JSON begins
MAX_ANSWER_BYTES: Final = 256 * 2**20  # of all events; an answer of 128k tokens with 20 logprobs each has half of that


class UnreadableEvent(BadUpstreamReply):
    """An event that can't be part of the answer. Its tokens are counted already, so the answer can't be continued."""

    retryable = False


class AnswerAssembler:
    """Collects the events of an `EventScanner` (made with `want_usage=True`) over all segments of the answer.

    Attributes: `kept_bytes`: of the answer so far; a twentieth of what its events had.
    """

    def __init__(self, request: ClientRequest) -> None:
        """Start an answer to `request`."""
        self._chat = request.endpoint == "chat"
        self._want_ids = request.return_token_ids
        self._top: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._fed_bytes = self.kept_bytes = 0

    def feed(self, events: bytes) -> None:
        """Take the events that `EventScanner.feed` returned. Raises: UnreadableEvent: also if the last one is
        incomplete.
        """
        self._fed_bytes += len(events)
        if self._fed_bytes > MAX_ANSWER_BYTES:
            raise UnreadableEvent(f"the answer is larger than {MAX_ANSWER_BYTES} bytes", worker="", tier="decode")
        for payload in payloads_of(events):
            try:
                event = orjson.loads(payload)
            except ValueError:
                continue  # the scanner passes unreadable events on; one object has no place for them
            if not isinstance(event, dict):
                continue
            try:
                self._add(event)
            except (TypeError, AttributeError, ValueError) as exc:
                raise UnreadableEvent(f"an event is no part of an answer ({exc})", worker="", tier="decode") from exc

    def _add(self, event: dict[str, Any]) -> None:
        for name, value in event.items():
            if name != "choices" and (value is not None or name not in self._top):
                self._top[name] = value
        for part in event.get("choices") or ():
            checked_choice(part)
            index = part.get("index", 0)
            self.kept_bytes += self._choices.setdefault(index, _Choice()).add(part)

    def answer(self, scanner: EventScanner) -> bytes:
        """The complete answer; call it once the scanner's stream is `StreamEnd.DONE`. Raises: UnreadableEvent."""
        prompt_ids = scanner.generated.prompt_ids.tolist() if self._want_ids and scanner.generated.prompt_ids else None
        usage = scanner.usage or scanner.counted_usage()
        choices = [
            choice.chat(index, self._want_ids) if self._chat else choice.text(index, self._want_ids, prompt_ids)
            for index, choice in sorted(self._choices.items())
        ]
        whole: dict[str, Any] = {
            "id": self._top.get("id"),
            "object": "chat.completion" if self._chat else "text_completion",
            "created": self._top.get("created"),
            "model": self._top.get("model"),
            "choices": choices,
            "service_tier": self._top.get("service_tier"),
            "system_fingerprint": self._top.get("system_fingerprint") or scanner.fingerprint,
            "usage": {**dict.fromkeys(_USAGE), **usage},
        }
        if self._chat:
            whole["prompt_logprobs"] = None
            whole["prompt_token_ids"] = prompt_ids
        whole["kv_transfer_params"] = None
        # further fields of engines, such as `metrics` of the request
        whole |= {name: value for name, value in self._top.items() if name not in whole}
        try:
            return orjson.dumps(whole)
        except TypeError as exc:  # orjson reads deeper than it writes
            raise UnreadableEvent(f"the answer can't be written ({exc})", worker="", tier="decode") from exc


class _Choice:
    """One choice as its deltas have built it, in bytes that grow: as values they take ten times as many."""

    __slots__ = (
        "_scored_chars",
        "calls",
        "fields",
        "finish_reason",
        "further",
        "logprobs",
        "role",
        "stop_reason",
        "token_ids",
    )

    def __init__(self) -> None:
        self.role = "assistant"
        self.fields: dict[str, Any] = {}  # texts as a bytearray, else the last value
        self.logprobs: dict[str, Any] | None = None  # lists as a bytearray, their JSON without brackets
        self._scored_chars = 0  # of all tokens in `logprobs`
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.token_ids = bytearray()  # as those lists
        self.calls: dict[int, dict[str, Any]] = {}
        self.further: dict[str, Any] = {}  # fields that engines have beside these, such as `weight_versions`

    def add(self, part: dict[str, Any]) -> int:
        """Take one event's part of this choice; returns how many more bytes are kept."""
        delta, more_bytes = part.get("delta"), 0
        if delta is None:
            delta = {"text": part.get("text") or ""}
        for name, value in delta.items():
            if name == "tool_calls":
                more_bytes += sum(map(self._add_call, value or ()))
            elif name == "role":
                self.role = value or self.role  # some engines send null after the first event
            else:
                more_bytes += _append(self.fields, name, value)
        if part.get("logprobs") is not None:
            more_bytes += self._add_logprobs(part["logprobs"])
        more_bytes += _extend(self.token_ids, part.get("token_ids") or [])
        if part.get("finish_reason") is not None:
            self.finish_reason = part["finish_reason"]
            self.stop_reason = part.get("stop_reason")
        if not _OF_CHOICES.issuperset(part):
            self.further |= {name: part[name] for name in part.keys() - _OF_CHOICES if part[name] is not None}
        return more_bytes

    def _add_logprobs(self, more: dict[str, Any]) -> int:
        more_bytes = 0
        if self.logprobs is None:
            self.logprobs = {}
        if isinstance(more.get("text_offset"), list) and isinstance(tokens := more.get("tokens"), list):
            more["text_offset"] = self._offsets_of(tokens)
        for name, value in more.items():
            if isinstance(value, list):
                known = self.logprobs.get(name)
                if not isinstance(known, bytearray):
                    known = self.logprobs[name] = bytearray()
                more_bytes += _extend(known, value)
            elif value is not None or name not in self.logprobs:
                self.logprobs[name] = value
        return more_bytes

    def _offsets_of(self, tokens: list[str]) -> list[int]:
        """Where the next tokens begin: engines count the tokens before; in streams some count the text sent."""
        offsets = []
        for token in tokens:
            offsets.append(self._scored_chars)
            self._scored_chars += len(token)
        return offsets

    def _all_logprobs(self) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        return {
            name: _as_list(value) if isinstance(value, bytearray) else value for name, value in self.logprobs.items()
        }

    def _add_call(self, call: dict[str, Any]) -> int:
        index = call.get("index", len(self.calls))
        if not isinstance(index, int):
            raise TypeError("the index of a tool call is no number")
        known = self.calls.setdefault(index, {"function": {}})
        known |= {key: value for key, value in call.items() if value is not None and key not in ("index", "function")}
        function = {} if call.get("function") is None else call["function"]
        named = known["function"]
        named |= {key: value for key, value in function.items() if value is not None and key != "arguments"}
        return _append(named, "arguments", function["arguments"]) if "arguments" in function else 0

    def text(self, index: int, want_ids: bool, prompt_ids: list[int] | None) -> dict[str, Any]:
        """As a choice of /v1/completions."""
        return {
            "index": index,
            "text": _joined(self.fields).get("text", ""),
            "logprobs": self._all_logprobs(),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": _as_list(self.token_ids) if want_ids and self.token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt_ids,
            **self.further,
        }

    def chat(self, index: int, want_ids: bool) -> dict[str, Any]:
        """As a choice of /v1/chat/completions."""
        message: dict[str, Any] = {
            "role": self.role,
            "content": None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
            **_joined(self.fields),
        }
        # parsers for streams (vLLM's engine parsers, without `tools`) may end with arguments of a call that has no name
        calls = [_whole_call(call) for _, call in sorted(self.calls.items()) if call["function"].get("name")]
        unnamed = self.calls and not calls
        if calls:
            message["tool_calls"] = calls
        if calls or any(message.get(name) is not None for name in REASONING_KEYS):
            message["content"] = message["content"] or None
        return {
            "index": index,
            "message": message,
            "logprobs": self._all_logprobs(),
            "finish_reason": "stop" if unnamed and self.finish_reason == "tool_calls" else self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": _as_list(self.token_ids) if want_ids and self.token_ids else None,
            **self.further,
        }


def _whole_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with all fields that clients read, even if it was cut off after its name."""
    function = _joined(call["function"])
    function["arguments"] = function.get("arguments") or ""
    return {"type": "function", **call, "function": function}


def _append(fields: dict[str, Any], name: str, value: Any) -> int:
    """Add a text to that of a field, or set another value; returns how many more bytes of text are kept."""
    known = fields.get(name)
    if isinstance(value, str):
        if not isinstance(known, bytearray):
            known = fields[name] = bytearray()
        text = value.encode()
        known += text
        return len(text)
    if value is not None or known is None:
        fields[name] = value
    return 0


def _joined(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value.decode() if isinstance(value, bytearray) else value for name, value in fields.items()}


def _extend(listed: bytearray, values: list[Any]) -> int:
    """Add values to a list that is kept as JSON, without brackets; returns by how many bytes it grows."""
    if not values:
        return 0
    text = orjson.dumps(values)[1:-1]
    before = len(listed)
    listed += b"," + text if before else text
    return len(listed) - before


def _as_list(listed: bytearray) -> orjson.Fragment:
    return orjson.Fragment(b"".join((b"[", listed, b"]")))


@dataclass(slots=True)
class CorrectedAnswer:
    """An unstreamed answer for the client, and its progress.

    `prompt_ids`: how many token ids of the prompt it has told; 0: none.
    """

    body: bytes
    tokens: int
    recomputed: bool
    finish_reason: str | None
    usage: dict[str, Any]
    prompt_ids: int = 0
    reply_id: Any = None


def correct_answer(
    request: ClientRequest,
    body: bytes,
    *,
    worker: str,
    prompt_details: dict[str, Any] | None = None,
    upstream_id: str = "",
    request_id: str = "",
) -> CorrectedAnswer:
    """Count the tokens of a decode worker's unstreamed answer, and remove what the client did not ask for.

    `prompt_details`: the prefiller's. `upstream_id`: the X-Request-Id of this try; the client sees `request_id`
    instead.

    Raises: ReplyTooLarge. BadUpstreamReply: not a completion.
    """
    check_whole(body, worker, "decode")
    try:
        answer = _values_of(body, worker)
        first = answer["choices"][0]
        choice = checked_choice({name: value for name, value in first.items() if type(value) is not orjson.Fragment})
        usage = checked_usage(answer.get("usage"))
        tokens = _tokens_of(choice, usage)
        recomputed = is_given_back(choice, stops_so=request.stops_at_marker)
        prompt_ids = len(choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or ())
        reply_id = answer.get("id")
        if upstream_id != request_id:
            answer["id"] = shown_id(reply_id, upstream_id, request_id)
        corrected = _as_asked(request, answer, usage, prompt_details)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as exc:
        raise BadUpstreamReply(
            f"the decoder's reply is not a completion ({type(exc).__name__}: {exc})",
            worker=worker,
            tier="decode",
        ) from exc
    return CorrectedAnswer(
        body=corrected,
        tokens=tokens,
        recomputed=recomputed,
        finish_reason=choice.get("finish_reason"),
        usage=usage,
        prompt_ids=prompt_ids,
        reply_id=reply_id,
    )


def _values_of(body: bytes, worker: str) -> dict[str, Any]:
    """The values of a worker's whole answer, but for logprobs, which stay JSON.

    As values those of 16,000 tokens stopped the event loop for half a second.

    Raises: ReplyTooLarge; what Python and the parsers raise of other bodies.
    """
    body.decode()  # of what stays JSON nobody else checks it
    fields = _fields.decode(body)
    parts = _choices.decode(fields["choices"])
    fields["choices"] = _NO_CHOICES  # each is read by itself
    rest = b",".join([_without_long(holder) for holder in (fields, *parts)])
    check_size(rest, worker, "decode", MAX_NODES_UNASKED)
    answer = _read(fields)
    answer["choices"] = [_read(part) for part in parts]
    return answer


def _tokens_of(choice: dict[str, Any], usage: dict[str, Any]) -> int:
    """How many tokens were generated. Raises: ValueError, TypeError or OverflowError: those are no tokens' ids."""
    ids = choice.get("token_ids")
    tokens: int = token_count(len(ids), "token_ids") if ids is not None else usage.get("completion_tokens") or 0
    if ids is not None:
        array("I", ids)  # each is a token's id
    return tokens


def opened(answer: bytes) -> dict[str, Any]:
    """A whole answer with its usage and its first choice; their other fields stay JSON.

    As values the logprobs of some thousand tokens stopped the event loop for a second.
    """
    fields = _fields.decode(answer)
    choice = _fields.decode(_parts.decode(fields["choices"])[0])
    usage = orjson.loads(bytes(fields.get("usage", b"null")))
    return _still_json(fields) | {"choices": [_still_json(choice)], "usage": usage}


def _still_json(fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
    return {name: orjson.Fragment(bytes(value)) for name, value in fields.items()}


def with_usage(body: bytes, usage: dict[str, Any]) -> bytes:
    """The answer with a corrected usage, if the prefiller answered after the decoder."""
    return orjson.dumps(_still_json(_fields.decode(body)) | {"usage": usage})


def _is_long(name: str, value: msgspec.Raw) -> bool:
    return bytes(memoryview(value)[:1]) == _LONG.get(name)


def _without_long(fields: dict[str, msgspec.Raw]) -> bytes:
    return b",".join([bytes(value) for name, value in fields.items() if not _is_long(name, value)])


def _read(fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """The values of the fields, but for logprobs, which stay JSON."""
    return {
        name: orjson.Fragment(bytes(value)) if _is_long(name, value) else orjson.loads(bytes(value))
        for name, value in fields.items()
    }


def _as_asked(
    request: ClientRequest,
    answer: dict[str, Any],
    usage: dict[str, Any],
    prompt_details: dict[str, Any] | None,
) -> bytes:
    """The answer without fields that only the router asked for. Raises: TypeError: nested deeper than orjson writes."""
    choice = answer["choices"][0]
    if not request.return_token_ids:
        choice["token_ids"] = None
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None
        if "prompt_token_ids" in answer:
            answer["prompt_token_ids"] = None
    if "kv_transfer_params" in answer:
        answer["kv_transfer_params"] = None
    put_prompt_details(usage, prompt_details)
    return orjson.dumps(answer)

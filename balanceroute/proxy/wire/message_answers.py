r"""Translates a chat's answer into Anthropic's message: as a whole, or event by event.

    message_start                                                        usage of the prompt
    (content_block_start, content_block_delta ..., content_block_stop)*  thinking, text, tool_use
    message_delta                                                        stop_reason, usage of all
    message_stop

Only one block is open at a time. Text between a tool's arguments is held back until these are complete, then sent as
its own block. A block of thinking ends with a signature, because clients expect one; it proves nothing here.

Most events bypass this module: the scanner matches them, and writes their text into the `frame` of the open block.

Source: https://docs.anthropic.com/en/api/messages-streaming; fields as vLLM 0.32 fills them on its own `/v1/messages`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.wire.event_contents import REASONING_KEYS, reasoning_of

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP_REASONS: Final = {"length": "max_tokens", "content_filter": "refusal"}
_DELTA_END: Final = b'"}}\n\n'

Kind = Literal["text", "thinking", "tool_use"]
_KINDS: Final[dict[str, Kind]] = {**dict.fromkeys(REASONING_KEYS, "thinking"), "content": "text"}


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of the prompt, of its part that was cached at the prefiller (None: unknown), and of the answer."""

    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int

    def usage(self) -> dict[str, int]:
        """Anthropic's usage, in which cached tokens do not count as input."""
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": self.generated_tokens}
        if self.cached_tokens is not None:
            usage["input_tokens"] = max(0, self.prompt_tokens - self.cached_tokens)
            usage["cache_read_input_tokens"] = self.cached_tokens
        return usage


# ------------------------------------------------------------------------------------------------------- whole


def message_of(answer: bytes, message_id: str) -> bytes:
    """Translate a whole chat completion. Raises: BadUpstreamReply: it is none."""
    try:
        chat = orjson.loads(answer)
        choice = chat["choices"][0]
        message = choice["message"]
        calls = message.get("tool_calls") or ()
        content: list[dict[str, Any]] = []
        reasoning = reasoning_of(message)
        if reasoning:
            content.append({"type": "thinking", "thinking": reasoning, "signature": message_id})
        if message.get("content") or not (calls or reasoning):
            content.append({"type": "text", "text": message.get("content") or ""})
        complete = bool(calls)
        for place, call in enumerate(calls):
            arguments, is_whole = _input_of(call["function"].get("arguments"))
            complete &= is_whole
            call_id, name = call.get("id") or _call_id(message_id, place), call["function"].get("name") or ""
            content.append({"type": "tool_use", "id": call_id, "name": name, "input": arguments})
        stop_reason, stop_sequence = _stop_of(choice, used=bool(calls), complete=complete)
        usage = _counts_of(chat.get("usage") or {}).usage()
        return orjson.dumps(
            {
                "id": message_id,
                "type": "message",
                "role": "assistant",
                "model": chat.get("model"),
                "content": content,
                "stop_reason": stop_reason,
                "stop_sequence": stop_sequence,
                "usage": usage,
            }
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
        text = f"its answer is no chat completion ({type(exc).__name__}: {exc})"
        raise BadUpstreamReply(text, worker="", tier="decode") from exc


def _input_of(arguments: object) -> tuple[orjson.Fragment, bool]:
    """A call's arguments as the JSON that came, and whether they are complete; {} if they were cut off or not begun.

    To read and write them would round integers of more than 64 bits, such as amounts and ids.
    """
    text = arguments if isinstance(arguments, str) else ""
    try:
        complete = isinstance(orjson.loads(text), dict)
    except ValueError:
        complete = False
    return orjson.Fragment(text if complete else "{}"), complete


def _stop_of(choice: dict[str, Any], *, used: bool, complete: bool) -> tuple[str | None, str | None]:
    """`stop_reason` and `stop_sequence`.

    A call that a stop string has cut off must not be run, so the stop string is the reason. After a complete call it is
    not.
    """
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if reason in _STOP_REASONS:
        return _STOP_REASONS[reason], None
    if reason not in ("stop", "tool_calls"):
        return None, None
    if used and complete:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if used else "end_turn"), None


def _counts_of(usage: dict[str, Any]) -> Counts:
    details = usage.get("prompt_tokens_details") or {}
    return Counts(usage.get("prompt_tokens") or 0, details.get("cached_tokens"), usage.get("completion_tokens") or 0)


def _call_id(message_id: str, place: int) -> str:
    return f"toolu_{message_id.removeprefix('msg_')}_{place}"


# ------------------------------------------------------------------------------------------------------ stream


class MessageStream:
    """Translates the events of one chat into those of one message: the `Translation` of a scanner."""

    __slots__ = (
        "_arguments",
        "_call",
        "_calls_ended",
        "_choice",
        "_counts",
        "_delta_sent",
        "_id",
        "_index",
        "_kept",
        "_kind",
        "_last_fields",
        "_model",
        "_started",
        "_used",
    )

    def __init__(self, message_id: str, model: str | None, counts: Callable[[], Counts]) -> None:
        """`counts` is called at the beginning, and at an end without usage. `model`: the name that the client sent."""
        self._id, self._model, self._counts = message_id, model, counts
        self._started = self._delta_sent = self._used = False
        self._index = 0  # index of the open block, or else of the next one
        self._kind: Kind | None = None  # type of the open block
        self._call = 0  # index, in the chat, of the open tool_use
        self._calls_ended: set[int] = set()
        self._arguments: list[str] = []  # arguments of the last call
        self._kept: list[str] = []  # text held back during a call
        self._choice: dict[str, Any] = {}  # the choice that finished
        self._last_fields: list[str] = []  # the last event's fields with contents

    def check(self, choices: list[dict[str, Any]]) -> None:
        """Check an event's choices. Raises: ValueError: they have no place in a message."""
        for choice in choices:
            delta = choice.get("delta") or {}
            for key in _KINDS:
                _check_text(delta.get(key), key)
            calls = delta.get("tool_calls") or []
            if not isinstance(calls, list):
                raise ValueError("tool_calls are no list")
            for call in calls:
                self._check_call(call)

    def event(self, event: dict[str, Any]) -> bytes:
        """Translate an event of the chat."""
        out: list[bytes] = []
        if not self._started:
            self._start(event.get("model"), out)
        if event["choices"]:
            self._take(event["choices"][0], out)
        elif isinstance(event.get("usage"), dict):
            self._end(_counts_of(event["usage"]), out)
        return b"".join(out)

    def end(self) -> bytes:
        """The events at the end of the chat."""
        out: list[bytes] = []
        self._end(self._counts(), out)
        return b"".join((*out, _named("message_stop", {})))

    def frame(self, key: str) -> tuple[bytes, bytes] | None:
        """The bytes before and after a text under `key`; None: it does not belong to the open block."""
        kind = self._kind
        if kind is None or _KINDS.get(key) != kind or self._last_fields not in ([], [key]):
            return None
        empty = self._delta({"type": f"{kind}_delta", kind: ""})
        return empty[: -len(_DELTA_END)], _DELTA_END

    def _check_call(self, call: object) -> None:
        if not isinstance(call, dict) or not isinstance(call.get("function") or {}, dict):
            raise ValueError("a tool call is no object")
        function, index = call.get("function") or {}, call.get("index") or 0
        if not isinstance(index, int):
            raise ValueError("the index of a tool call is no number")
        for name, value in (("id", call.get("id")), *((name, function.get(name)) for name in ("name", "arguments"))):
            _check_text(value, f"the {name} of a tool call")
        if function.get("arguments") and index in self._calls_ended:
            raise ValueError(f"more of tool call {index}, which had ended")

    def _start(self, model: object, out: list[bytes]) -> None:
        self._started = True
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": model if isinstance(model, str) else self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._counts().usage(), "output_tokens": 0},
        }
        out += (_named("message_start", {"message": message}), PING)

    def _take(self, choice: dict[str, Any], out: list[bytes]) -> None:
        delta = choice.get("delta") or {}
        self._last_fields = [key for key in (*_KINDS, "tool_calls") if delta.get(key)]
        if reasoning := reasoning_of(delta):  # some engines send both names
            self._text("thinking", reasoning, out)
        if delta.get("content"):
            self._text("text", delta["content"], out)
        for call in delta.get("tool_calls") or ():
            self._tool_call(call, out)
        if choice.get("finish_reason") is not None:
            self._choice = choice

    def _text(self, kind: Kind, text: str, out: list[bytes]) -> None:
        if self._kind == "tool_use" and kind == "text":
            self._kept.append(text)
            return
        if self._kind != kind:
            self._close(out)
            signature = {"signature": ""} if kind == "thinking" else {}
            self._open(kind, {"type": kind, kind: "", **signature}, out)
        out.append(self._delta({"type": f"{kind}_delta", kind: text}))

    def _tool_call(self, call: dict[str, Any], out: list[bytes]) -> None:
        function = call.get("function") or {}
        index, arguments = call.get("index") or 0, function.get("arguments")
        if self._kind != "tool_use" or self._call != index:
            name, call_id = function.get("name"), call.get("id") or _call_id(self._id, index)
            if index in self._calls_ended or not name:
                return  # the choice has ended, or (vLLM without `tools`) these are arguments of no call
            self._close(out)
            self._used, self._call, self._arguments = True, index, []
            self._open("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}}, out)
        if arguments:
            self._arguments.append(arguments)
            out.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))

    def _open(self, kind: Kind, block: dict[str, Any], out: list[bytes]) -> None:
        self._kind = kind
        out.append(_named("content_block_start", {"index": self._index, "content_block": block}))

    def _close(self, out: list[bytes]) -> None:
        """End the open block, if there is one, and send the text held back during it."""
        kind, self._kind = self._kind, None
        if kind is None:
            return
        if kind == "thinking":
            out.append(self._delta({"type": "signature_delta", "signature": self._id}))
        out.append(_named("content_block_stop", {"index": self._index}))
        self._index += 1
        if kind == "tool_use":
            self._calls_ended.add(self._call)
            if self._kept:
                text, self._kept = "".join(self._kept), []
                self._text("text", text, out)
                self._close(out)

    def _end(self, counts: Counts, out: list[bytes]) -> None:
        """Send the stop reason and the usage, once."""
        if self._delta_sent:
            return
        self._delta_sent = True
        if not self._started:
            self._start(None, out)
        self._close(out)
        complete = self._used and _input_of("".join(self._arguments))[1]
        stop_reason, stop_sequence = _stop_of(self._choice, used=self._used, complete=complete)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        out.append(_named("message_delta", {"delta": delta, "usage": counts.usage()}))

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _named("content_block_delta", {"index": self._index, "delta": delta})


def _check_text(text: object, name: str) -> None:
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} is no text")


def _named(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))

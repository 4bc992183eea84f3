r"""The answer to a chat as Anthropic's message: whole, or as named events while it comes.

    message_start                                                        usage of the prompt
    (content_block_start, content_block_delta ..., content_block_stop)*  thinking, text, tool_use
    message_delta                                                        stop_reason, usage of all
    message_stop

Only one block is open at a time. Text that comes amid a tool's arguments is kept until they are complete, and is then a
block of its own. A block of thinking ends with a signature; it proves nothing here, but clients expect one.

**Events by template**, as in `hotpath`: an ordinary event differs from the one before in its text only. What is before
and behind the text of one that was parsed is remembered; where both are as they were and there is neither quote,
line end nor last backslash in between, what is in between is the text, as JSON already, and is passed on as it is.

Source: https://docs.anthropic.com/en/api/messages-streaming; fields as vLLM 0.32 fills them on its own `/v1/messages`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.wire.answers import UnreadableEvent
from balanceroute.proxy.wire.sse import payloads_of

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP_REASONS: Final = {"length": "max_tokens", "content_filter": "refusal"}
_DELTA_END: Final = b'"}}\n\n'
_DATA: Final = b"data: "
_KEYS: Final = {"content": "text", "reasoning": "thinking", "reasoning_content": "thinking"}

Kind = Literal["text", "thinking", "tool_use"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a prompt, of those the ones that a prefiller had cached (None: it does not say), and of the answer."""

    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int

    def usage(self) -> dict[str, int]:
        """As Anthropic counts: what was read from a cache is no input."""
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": self.generated_tokens}
        if self.cached_tokens is not None:
            usage["input_tokens"] = max(0, self.prompt_tokens - self.cached_tokens)
            usage["cache_read_input_tokens"] = self.cached_tokens
        return usage


# ------------------------------------------------------------------------------------------------------- whole


def message_of(answer: bytes, message_id: str) -> bytes:
    """A whole chat completion as a message. Raises: BadUpstreamReply: it is none."""
    try:
        told = orjson.loads(answer)
        choice = told["choices"][0]
        message = choice["message"]
        calls = message.get("tool_calls") or ()
        content: list[dict[str, Any]] = []
        reasoning = message.get("reasoning") or message.get("reasoning_content")
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
        usage = _counts_of(told.get("usage") or {}).usage()
        return orjson.dumps(
            {
                "id": message_id,
                "type": "message",
                "role": "assistant",
                "model": told.get("model"),
                "content": content,
                "stop_reason": stop_reason,
                "stop_sequence": stop_sequence,
                "usage": usage,
            }
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
        text = f"its answer is no chat completion ({type(exc).__name__}: {exc})"
        raise BadUpstreamReply(text, worker="", stage="decode") from exc


def _input_of(arguments: object) -> tuple[dict[str, Any], bool]:
    """A call's arguments, and whether they are complete: a limit may have cut them off, and half an object is none."""
    try:
        read = orjson.loads(arguments) if isinstance(arguments, str) and arguments else {}
    except ValueError:
        return {}, False
    return (read, True) if isinstance(read, dict) else ({}, False)


def _stop_of(choice: dict[str, Any], *, used: bool, complete: bool) -> tuple[str | None, str | None]:
    """`stop_reason` and `stop_sequence`.

    A call that a stop string has cut short must not be run, so the stop string is told; beside a complete one it isn't.
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
    return ("tool_use" if used or reason == "tool_calls" else "end_turn"), None


def _counts_of(usage: dict[str, Any]) -> Counts:
    details = usage.get("prompt_tokens_details") or {}
    return Counts(usage.get("prompt_tokens") or 0, details.get("cached_tokens"), usage.get("completion_tokens") or 0)


def _call_id(message_id: str, place: int) -> str:
    return f"toolu_{message_id.removeprefix('msg_')}_{place}"


# ------------------------------------------------------------------------------------------------------ stream


class MessageStream:
    """Turns the events of one chat into those of one message; `feed` takes whole events, as many as have come."""

    __slots__ = (
        "_arguments",
        "_call",
        "_calls_ended",
        "_choice",
        "_counts",
        "_delta_sent",
        "_head",
        "_head_out",
        "_id",
        "_index",
        "_kept",
        "_kind",
        "_model",
        "_n_head",
        "_n_tail",
        "_started",
        "_tail",
        "_used",
    )

    def __init__(self, message_id: str, model: str | None, counts: Callable[[], Counts]) -> None:
        """`counts` is asked at the beginning, and at an end that comes without usage. `model` is the client's name."""
        self._id, self._model, self._counts = message_id, model, counts
        self._started = self._delta_sent = self._used = False
        self._index = 0  # of the block that is open, or else of the next one
        self._kind: Kind | None = None  # of the open block
        self._call = 0  # the open tool_use: its index in the chat
        self._calls_ended: set[int] = set()
        self._arguments: list[str] = []  # of the last call
        self._kept: list[str] = []  # text that came amid a call
        self._choice: dict[str, Any] = {}  # the one that finished
        self._forget()

    def feed(self, events: bytes) -> bytes:
        """What the client gets for some events; may be nothing. Raises: UnreadableEvent: they are no chat's."""
        if self._head and events.startswith(self._head) and events.endswith(self._tail):
            text = events[self._n_head : -self._n_tail]
            if text and b'"' not in text and b"\n" not in text and text[-1] != 0x5C:
                return self._head_out + text + _DELTA_END
        if events.count(b"\n\n") > 1:
            return b"".join([self.feed(event + b"\n\n") for event in events.split(b"\n\n") if event])
        out: list[bytes] = []
        for payload in payloads_of(events):
            self._take(payload, out)
        return b"".join(out)

    def _take(self, payload: bytes, out: list[bytes]) -> None:
        if payload == b"[DONE]":
            self._end(self._counts(), out)
            out.append(_named("message_stop", {}))
            return
        try:
            event = orjson.loads(payload)
        except ValueError:
            return  # no client of a chat could have read it either
        if not isinstance(event, dict) or "choices" not in event:
            return
        try:
            self._event(event, payload, out)
        except (TypeError, AttributeError, KeyError, IndexError, ValueError) as exc:
            raise UnreadableEvent(f"an event is no part of a message ({exc})", worker="", stage="decode") from exc

    def _event(self, event: dict[str, Any], payload: bytes, out: list[bytes]) -> None:
        if not self._started:
            self._start(event.get("model"), out)
        if not event["choices"]:
            if isinstance(event.get("usage"), dict):
                self._end(_counts_of(event["usage"]), out)
            return
        choice = event["choices"][0]
        delta = choice.get("delta") or {}
        for key, kind in _KEYS.items():
            text = delta.get(key)
            if text:
                self._text("thinking" if kind == "thinking" else "text", _checked(text), out)
        for call in delta.get("tool_calls") or ():
            self._tool_call(call, out)
        if choice.get("finish_reason") is not None:
            self._choice = choice
        elif self._kind in ("text", "thinking") and not delta.get("tool_calls"):
            self._learn(payload, delta)

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
        index, arguments = call.get("index", 0), _checked(function.get("arguments") or "")
        if self._kind != "tool_use" or self._call != index:
            if index in self._calls_ended:
                if arguments:
                    raise ValueError(f"arguments of tool call {index}, which had ended")
                return
            self._close(out)
            name, call_id = _checked(function.get("name") or ""), call.get("id") or _call_id(self._id, index)
            self._used, self._call, self._arguments = True, index, []
            self._open("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}}, out)
        if arguments:
            self._arguments.append(arguments)
            out.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))

    def _open(self, kind: Kind, block: dict[str, Any], out: list[bytes]) -> None:
        self._kind = kind
        out.append(_named("content_block_start", {"index": self._index, "content_block": block}))

    def _close(self, out: list[bytes]) -> None:
        """End the open block, if there is one, and tell what was kept during it."""
        kind, self._kind = self._kind, None
        if kind is None:
            return
        self._forget()
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
        """The stop reason and the usage, once."""
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

    # ------------------------------------------------------------------------------------------------ template

    def _learn(self, payload: bytes, delta: dict[str, Any]) -> None:
        """Make a template of an event that says nothing but a text of the open block."""
        self._forget()
        carried = [key for key, value in delta.items() if value]
        if len(carried) != 1 or _KEYS.get(carried[0]) != self._kind:
            return
        key = b'"%b":"' % carried[0].encode()
        start = payload.find(key) + len(key)
        stop = payload.find(b'"', start)
        before = payload[start - len(key) - 1 : start - len(key)]
        if payload.count(key) != 1 or before not in (b",", b"{") or b"\\" in payload[start:stop] or b"\n" in payload:
            return
        self._head = _DATA + payload[:start]
        self._tail = payload[stop:] + b"\n\n"
        self._n_head, self._n_tail = len(self._head), len(self._tail)
        head = self._delta({"type": f"{self._kind}_delta", str(self._kind): ""})
        self._head_out = head[: -len(_DELTA_END)]

    def _forget(self) -> None:
        self._head = self._tail = self._head_out = b""
        self._n_head = self._n_tail = 0


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{type(text).__name__} in place of a text")
    return text


def _named(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))

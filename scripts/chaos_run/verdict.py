"""An answer against what was asked: exactly right and complete, properly refused, properly broken off, or wrong.

What a client may be given, and nothing else:

* the whole right answer, with a clean end;
* a status with an OpenAI error body, and Retry-After where it says "later";
* some first part of the right answer, then an error event, then an unclean end and no [DONE].
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from balanceroute.engine.tokens import TOKEN_BYTES, decode
from scripts.chaos_run.asks import FUNCTION, MESSAGES, Ask, Right
from scripts.chaos_run.wire import Answer, Ended

INJECTED = "Injected failure"  # the emulator's text for a status that a fault asked for
_LATER = (429, 503)
_FAILURES = (429, 500, 502, 503, 504)


class Kind(StrEnum):
    """The possible verdicts; the last three miss the bar."""

    RIGHT = "right"
    REFUSED = "refused"  # a status with an error body
    BROKEN = "broken off"  # right so far, then an error event
    LEFT = "left"  # the client went; what it had got was right
    TAKEN = "taken along"  # by a relay that was killed; what had come was right
    WRONG = "wrong"
    IMPROPER = "improper"  # neither an answer nor an error as it should be
    HANGING = "hanging"


FAULTS = frozenset({Kind.WRONG, Kind.IMPROPER, Kind.HANGING})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer was, and why."""

    kind: Kind
    detail: str = ""
    status: int = 0


class Mismatch(Exception):
    """The answer differs from the right one."""


class Malformed(Exception):
    """The answer is not in the form that it should have."""


def judge(ask: Ask, answer: Answer) -> Verdict:
    """The verdict on one answer."""
    status = answer.status
    if answer.ended is Ended.NEVER:
        return Verdict(Kind.HANGING, f"no end {answer.elapsed_s:.1f} s after the request, {_so_far(answer)}", status)
    if answer.ended is Ended.REFUSED:
        return Verdict(Kind.IMPROPER, f"no connection: {answer.reason}")
    try:
        if answer.ended is Ended.LEFT:
            if status == 200 and ask.stream and not ask.malformed:
                _stream_of(ask, whole=False).read(answer.body)
            return Verdict(Kind.LEFT, status=status)
        if status != 200:
            return _judge_status(ask, answer)
        if ask.malformed:
            return Verdict(Kind.WRONG, f"{ask.malformed} was answered with 200: {answer.body[:200]!r}", status)
        if ask.stream:
            return _judge_stream(ask, answer)
        return _judge_message(ask, answer) if ask.path == MESSAGES else _judge_object(ask, answer)
    except Mismatch as error:
        return Verdict(Kind.WRONG, str(error), status)
    except Malformed as error:
        return Verdict(Kind.IMPROPER, str(error), status)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return Verdict(Kind.IMPROPER, f"no answer ({error!r}): {_so_far(answer)}", status)


def _so_far(answer: Answer) -> str:
    return f"status {answer.status}, {len(answer.body)} bytes, the last {answer.body[-160:]!r}"


def _judge_status(ask: Ask, answer: Answer) -> Verdict:
    status = answer.status
    if answer.ended is not Ended.WHOLE:
        raise Malformed(f"cut off before the end ({answer.reason}), {_so_far(answer)}")
    message = _error_message(answer.body, ask)
    if status in _LATER and INJECTED not in message and not answer.headers.get(b"retry-after", b"").isdigit():
        raise Malformed(f"{status} without Retry-After: {message}")
    if ask.malformed:
        if not 400 <= status < 500 and status not in _FAILURES:
            raise Malformed(f"{ask.malformed} was answered with {status}: {message}")
    elif status not in _FAILURES:  # not even where a fault asks for it: other workers know the key and the model
        raise Malformed(f"a correct request was answered with {status}: {message}")
    return Verdict(Kind.REFUSED, message, status)


def _error_message(body: bytes, ask: Ask) -> str:
    try:
        whole = orjson.loads(body)
        error = whole["error"]
        named = whole["type"] == "error" if ask.path == MESSAGES else "code" in error
        if not (isinstance(error["message"], str) and isinstance(error["type"], str) and named):
            raise KeyError("message, type, code")
    except (ValueError, TypeError, KeyError) as problem:
        raise Malformed(f"no error body of this API ({problem!r}): {body[:200]!r}") from problem
    return str(error["message"])


def _judge_stream(ask: Ask, answer: Answer) -> Verdict:
    if not answer.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        raise Malformed(f"a stream of type {answer.headers.get(b'content-type')!r}")
    stream = _stream_of(ask, whole=answer.ended is Ended.WHOLE)
    stream.read(answer.body)
    if stream.error is None:
        if answer.ended is not Ended.WHOLE:
            raise Malformed(f"cut off without an error event ({answer.reason}), {_so_far(answer)}")
        stream.check_complete()
        return Verdict(Kind.RIGHT, "" if stream.done else "without [DONE]", 200)
    if answer.ended is Ended.WHOLE or stream.done:
        raise Malformed(f"a clean end after an error event, {_so_far(answer)}")
    return Verdict(Kind.BROKEN, stream.error, 200)


@dataclass(slots=True)
class _Choice:
    """What has come of one choice."""

    right: Right
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    arguments: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None
    roles: int = 0

    def check_so_far(self) -> None:
        """It must be a first part of the right one."""
        right = self.right
        for text, whole in (
            (self.text, right.text + (right.stop or "")),  # a request that is given back shows what was held back
            (self.reasoning, right.reasoning),
            (self.arguments, right.arguments),
        ):
            if not whole.startswith(text):
                raise Mismatch(_difference(text, whole))
        if self.name not in ("", FUNCTION):
            raise Mismatch(f"a call of {self.name!r}")
        if tuple(self.ids) != self.right.ids[: len(self.ids)]:
            raise Mismatch(f"token ids {self.ids} are not the first of {list(self.right.ids)}")

    def check_complete(self, ask: Ask) -> None:
        """It must be all there."""
        right = self.right
        for text, whole in (
            (self.text, right.text),
            (self.reasoning, right.reasoning),
            (self.arguments, right.arguments),
        ):
            if text != whole:
                raise Mismatch(f"{len(text)} of {len(whole)} characters, cleanly ended: {text[-80:]!r}")
        if self.stop != right.stop:
            raise Mismatch(f"stop reason {self.stop!r} instead of {right.stop!r}")
        _check_logprobs(ask, right, self.logprobs)
        if ask.want_ids and tuple(self.ids) != right.ids:
            raise Mismatch(f"{len(self.ids)} of {len(right.ids)} token ids, cleanly ended")
        if self.finish_reason != right.finish_reason:
            raise Mismatch(f"finish reason {self.finish_reason!r} instead of {right.finish_reason!r}")
        if ask.chat and self.roles != 1:
            raise Mismatch(f"{self.roles} roles instead of one")


def _stream_of(ask: Ask, *, whole: bool) -> "_Stream":
    return (_MessageStream if ask.path == MESSAGES else _Stream)(ask, whole=whole)


class _Stream:
    """Reads a stream event by event; what it has of the answer must be a first part of the right one."""

    def __init__(self, ask: Ask, *, whole: bool) -> None:
        self.ask, self.whole = ask, whole
        self.choices = [_Choice(right) for right in ask.choices]
        self.usage: dict[str, Any] | None = None
        self.error: str | None = None
        self.done = False
        self.identity: tuple[Any, Any] | None = None

    def read(self, body: bytes) -> None:
        """Take the whole body. Raises: Mismatch, Malformed."""
        try:
            body.decode()
        except UnicodeDecodeError as error:
            if self.whole or error.end < len(body):
                raise Malformed(f"not UTF-8: {body[max(0, error.start - 20) : error.end + 20]!r}") from error
        *blocks, rest = body.replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            self._block(block)
        if rest.strip() and self.whole:
            raise Malformed(f"half an event at the end: {rest[:200]!r}")
        for choice in self.choices:
            choice.check_so_far()

    def check_complete(self) -> None:
        """The answer ended cleanly: it must be all there. Raises: Mismatch, Malformed."""
        ask = self.ask
        for choice in self.choices:
            choice.check_complete(ask)
        if ask.want_usage and self.usage is None:
            raise Malformed("no usage event although asked for")
        if self.usage is not None:
            if not ask.want_usage:
                raise Malformed("a usage event that was not asked for")
            _check_usage(ask, self.usage)

    def _block(self, block: bytes) -> None:
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            if block.strip() and not block.startswith((b":", b"event:")):
                raise Malformed(f"no event: {block[:200]!r}")
            return
        data = b"\n".join(lines)
        if self.done or self.error is not None:
            raise Malformed(f"an event after the end: {data[:200]!r}")
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = orjson.loads(data)
        except ValueError as error:
            raise Malformed(f"an event that is not JSON: {data[:200]!r}") from error
        if "error" in event:
            self.error = _error_message(data, self.ask)
            return
        self._event(event)

    def _event(self, event: dict[str, Any]) -> None:
        identity = (event.get("id"), event.get("created"))
        if self.identity is None:
            self.identity = identity
        elif identity != self.identity:
            raise Mismatch(f"identity {identity} after {self.identity}")
        if event.get("prompt_token_ids") and not self.ask.want_ids:
            raise Malformed("prompt_token_ids that were not asked for")
        if not event["choices"]:
            if self.usage is not None:
                raise Malformed("a second usage event")
            self.usage = event["usage"]
        for choice in event["choices"]:
            self._choice(choice)

    def _choice(self, part: dict[str, Any]) -> None:
        if not 0 <= part["index"] < len(self.choices):
            raise Mismatch(f"choice {part['index']} of {len(self.choices)}")
        choice = self.choices[part["index"]]
        if choice.finish_reason is not None:
            raise Mismatch(f"tokens after the finish reason {choice.finish_reason!r}")
        ids = part.get("token_ids")
        if ids and not self.ask.want_ids:
            raise Malformed("token_ids that were not asked for")
        choice.ids += ids or []
        if part.get("logprobs"):
            choice.logprobs.append(part["logprobs"])
        delta = part.get("delta")
        if delta is None:
            choice.text += part.get("text") or ""
        else:
            self._delta(choice, delta)
        choice.finish_reason, choice.stop = part.get("finish_reason"), part.get("stop_reason")
        if choice.stop == "recomputed":
            raise Mismatch("the marker of a recompute")

    def _delta(self, choice: _Choice, delta: dict[str, Any]) -> None:
        if "role" in delta:
            choice.roles += 1
            if choice.text:
                raise Mismatch("a role after the first text")
        choice.text += delta.get("content") or ""
        choice.reasoning += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            choice.name += call["function"].get("name") or ""
            choice.arguments += call["function"].get("arguments") or ""


class _MessageStream(_Stream):
    """The same in Anthropic's API."""

    def check_complete(self) -> None:
        """The answer ended cleanly: it must be all there. Raises: Mismatch, Malformed."""
        if not self.done:
            raise Malformed("no message_stop")
        self.choices[0].check_complete(self.ask)
        _check_message_usage(self.ask, self.usage or {})

    def _event(self, event: dict[str, Any]) -> None:
        [choice], kind = self.choices, event["type"]
        if kind == "message_start":
            self.usage = event["message"]["usage"]
        elif self.usage is None:
            raise Malformed(f"{kind} before message_start")
        elif kind == "content_block_delta":
            choice.text += event["delta"]["text"]
        elif kind == "message_delta":
            choice.finish_reason, choice.stop = _ended_message(event["delta"])
            self.usage |= event["usage"]
        elif kind == "message_stop":
            self.done = True


_STOP_REASONS = {"end_turn": "stop", "max_tokens": "length", "stop_sequence": "stop"}


def _ended_message(message: dict[str, Any]) -> tuple[str | None, str | None]:
    """How a message ended, as a chat says it: (finish reason, stop string)."""
    return _STOP_REASONS.get(message["stop_reason"]), message["stop_sequence"]


def _judge_message(ask: Ask, answer: Answer) -> Verdict:
    if answer.ended is not Ended.WHOLE:
        raise Malformed(f"cut off before the end ({answer.reason}), {_so_far(answer)}")
    body, choice = orjson.loads(answer.body), _Choice(ask.choices[0])
    choice.text = "".join(block["text"] for block in body["content"])
    choice.finish_reason, choice.stop = _ended_message(body)
    choice.check_so_far()
    choice.check_complete(ask)
    _check_message_usage(ask, body["usage"])
    return Verdict(Kind.RIGHT, status=200)


def _check_message_usage(ask: Ask, usage: dict[str, Any]) -> None:
    reported, right = (usage.get("input_tokens"), usage.get("output_tokens")), (ask.prompt_tokens, ask.tokens)
    if reported != right:
        raise Mismatch(f"usage (input, output) {reported} instead of {right}")


def _judge_object(ask: Ask, answer: Answer) -> Verdict:
    if answer.ended is not Ended.WHOLE:
        raise Malformed(f"cut off before the end ({answer.reason}), {_so_far(answer)}")
    body = orjson.loads(answer.body)
    choices, usage = body["choices"], body["usage"]
    if [choice["index"] for choice in choices] != list(range(len(ask.choices))):
        raise Mismatch(f"choices {[choice['index'] for choice in choices]} of {len(ask.choices)}")
    for choice, right in zip(choices, ask.choices, strict=True):
        _check_choice(ask, choice, right)
        if ask.want_prompt_logprobs:
            _check_prompt_logprobs((body if ask.chat else choice)["prompt_logprobs"], right)
    if body.get("kv_transfer_params") is not None:
        raise Malformed("kv_transfer_params reached the client")
    _check_usage(ask, usage)
    return Verdict(Kind.RIGHT, status=200)


def _check_choice(ask: Ask, choice: dict[str, Any], right: Right) -> None:
    """One choice of a whole answer."""
    message, got = choice.get("message") or {}, _Choice(right)
    got.text = (message.get("content") if ask.chat else choice["text"]) or ""
    got.reasoning = message.get("reasoning") or ""
    for call in message.get("tool_calls") or ():
        got.name += call["function"]["name"]
        got.arguments += call["function"]["arguments"]
    got.ids = choice.get("token_ids") or []
    got.logprobs = [choice["logprobs"]] if choice.get("logprobs") else []
    got.finish_reason, got.stop, got.roles = choice["finish_reason"], choice.get("stop_reason"), 1
    if got.ids and not ask.want_ids:
        raise Malformed("token_ids that were not asked for")
    got.check_so_far()
    got.check_complete(ask)


def _check_logprobs(ask: Ask, right: Right, parts: list[dict[str, Any]]) -> None:
    """Each token's, once; and where it begins in the answer."""
    if not ask.want_logprobs:
        if parts:
            raise Malformed("logprobs that were not asked for")
        return
    if ask.chat:
        tokens = [bytes(entry["bytes"]) for part in parts for entry in part["content"]]
        if tokens != [TOKEN_BYTES[token] for token in right.ids]:
            raise Mismatch(f"logprobs of {len(tokens)} tokens, of {len(right.ids)} or of others: {tokens[:40]}")
        return
    texts = [decode([token]) for token in right.ids]
    places = [sum(map(len, texts[:place])) for place in range(len(texts))]
    for name, whole in (("tokens", texts), ("text_offset", places)):
        if (got := [value for part in parts for value in part[name]]) != whole:
            raise Mismatch(f"{name} of logprobs {got[:40]} instead of {whole[:40]}")


def _check_prompt_logprobs(values: list[Any], right: Right) -> None:
    if values[0] is not None or [list(value) for value in values[1:]] != [[str(token)] for token in right.prompt[1:]]:
        raise Mismatch(f"prompt_logprobs of {len(values)} tokens, of {len(right.prompt)} or of others")


def _check_usage(ask: Ask, usage: dict[str, Any]) -> None:
    reported = (usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("total_tokens"))
    right = (ask.prompt_tokens, ask.tokens, ask.prompt_tokens + ask.tokens)
    if reported != right:
        raise Mismatch(f"usage (prompt, completion, total) {reported} instead of {right}")


def _difference(text: str, right: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), min(len(text), len(right)))
    first = max(0, place - 20)
    return (
        f"text differs at character {place} of {len(text)} ({len(right)} right ones):"
        f" {text[first : place + 40]!r} instead of {right[first : place + 40]!r}"
    )

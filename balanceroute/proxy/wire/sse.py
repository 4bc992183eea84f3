r"""One upstream SSE stream: bytes in, whatever the chunking; out come bytes for the client and an exact token count.

Events end at a blank line. Lines may end with LF, CRLF or CR; clients get LF. Each event takes one of two ways:

* **JSON**: parsed once with orjson, counted, judged (finish, `recomputed`, error, usage) and either passed on
  as the bytes that came, edited by slicing out ids, or written anew.
* **Template** (`hotpath.EventMatcher`): an ordinary event (one choice, nothing finished, nothing special) that went
  the JSON way leaves a template behind, by which nearly all later events are taken apart without parsing.

Why a key is found by its bytes. In valid JSON the bytes `,"token_ids":` or `{"token_ids":` are always that
key. Their first quote follows a comma or brace, not a backslash, so it opens or closes a string. Did it
close one, the next byte outside a string would be a letter, which is no JSON. So it opens one, and the
second quote, which follows a letter, closes it before a colon: a key. A model that writes `"token_ids":[1]`
reaches the wire as `\"token_ids\":[1]`, which does not contain these bytes.

A scanner lives as long as the client's answer. `resume()` tells it that the next bytes are a new worker's
stream for the same answer: ids, `created` and the role stay those of the first, usage is that of the whole.
Text that a worker held back (half of a character) dies with it, so `resume()` gives back the ids whose text
was never seen and they are generated again. With stop strings a worker holds back more than the last ids
show; a `recomputed` marker, or an abort, flushes that text, a lost connection loses it.

`EventScanner` is one machine: what an event is judged by, what it is rewritten to and what the next one's template is
made of are one state, and each event changes all of it. Parts would share every field.
"""

import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeGuard

import orjson

from balanceroute.proxy.hotpath import EventMatcher
from balanceroute.proxy.wire.bounds import ABORT, MAX_CHOICES, answers, checked_choice, checked_usage, shown_id
from balanceroute.proxy.wire.closing import event_bytes, event_head, usage_of
from balanceroute.proxy.wire.usage import put_prompt_details

MAX_EVENT_BYTES: Final = 32 * 1024 * 1024  # the ids of a prompt of 4 million tokens; more is no event
MAX_LINES: Final = 1024  # of an event; engines write one
MAX_IDLE_EVENTS: Final = 10_000  # without a token, in a row: each takes as long to read as one with a token

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_IDS_LIST = re.compile(rb'([,{]"(?:prompt_)?token_ids":)\[[0-9,]*\]')
_TEXT_KEYS = (b'"text":"', b'"content":"', b'"reasoning":"', b'"reasoning_content":"')
_IDS_KEY = b',"token_ids":['
_BLANK_LINES = re.compile(rb"\n*")
_LINE_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")


class StreamEnd(Enum):
    """How one worker's stream ended, once it has."""

    DONE = "done"  # a finish reason, then [DONE]
    RECOMPUTED = "recomputed"  # the engine gave the request back: prefill prompt + generated ids again
    ABORTED = "aborted"  # the engine is being stopped, and has ended what it had: same remedy, elsewhere
    UNFINISHED = "unfinished"  # [DONE] or the end of the bytes without a finish reason: same remedy
    NO_DONE = "no_done"  # finished, but the bytes end without [DONE]
    ERROR = "error"  # an error event; see `EventScanner.error`
    OVERSIZED = "oversized"  # an event above the limit
    MISPARSED = "misparsed"  # a second life's first text is of another kind than the last one before it
    MALFORMED = "malformed"  # an event that no engine can mean; see `EventScanner.fault`
    FOREIGN = "foreign"  # an event of another request's answer; see `EventScanner.fault`


DONE: Final = StreamEnd.DONE

TEXT, REASONING, TOOL_CALLS = "text", "reasoning", "tool_calls"  # what an event may carry, in this order
_REASONING_KEYS: Final = ("reasoning", "reasoning_content")
_KIND_OF_DELTA: Final = {**dict.fromkeys(_REASONING_KEYS, REASONING), "tool_calls": TOOL_CALLS}


@dataclass(frozen=True, slots=True)
class Cut:
    """Where an answer was cut off: what of it the client, or whoever collects it, has been given.

    `kinds` of what has come over all lives. `tokens_in_life` of the worker that it was cut off at. `flushed` is the
    text of the event with the `recomputed` marker, or of an aborted one, which has all that its engine had held back;
    None without one. `halved`: the last tokens belong to a character that is not whole, and can't be given back.
    """

    kinds: frozenset[str]
    tokens_in_life: int
    flushed: str | None
    misparsed: bool
    halved: bool = False


class Translation(Protocol):
    """Another form in which a client is told a chat's events. A scanner makes one, and tells it each event once."""

    def check(self, choices: list[dict[str, Any]]) -> None:
        """Judge an event before anything of it counts. Raises: ValueError: it can't be told."""
        ...

    def event(self, event: dict[str, Any]) -> bytes:
        """What the client gets for an event that has passed `check`; may be nothing."""
        ...

    def end(self) -> bytes:
        """What it gets for [DONE]."""
        ...

    def frame(self, key: str) -> tuple[bytes, bytes] | None:
        """Between what the text under `key` was told, JSON as it came, if the last event held nothing else."""
        ...


class EventScanner:
    """Counts one answer's tokens and rewrites its events for the client; never raises on any input.

    Attributes that callers read (all over every life of the answer, see `resume`):
        tokens: tokens generated so far. ids: those tokens, in order. ids_exact: `ids` holds all of
        `tokens`. prompt_ids: the prompt's ids as the first worker told them, else None. end: None while the
        stream runs. error: the JSON of the error event. fault: what is wrong with a MALFORMED or FOREIGN stream.
        echoed: whether the present worker's events carry the id that they should (`expect`). finish_reason: the last
        one seen. usage: the final usage, as sent. fingerprint: the `system_fingerprint` that came with it. begun:
        whether this life has seen a data event. public_id, created: what the client sees in every event. matcher: takes
        the events that fit the template, and keeps the counts.
    """

    __slots__ = (
        "_after_cr",
        "_base",
        "_closing_events",
        "_edge",
        "_events_counted",
        "_exact_before",
        "_expected_id",
        "_ids_checked",
        "_ids_in_life",
        "_first_offset",
        "_hide_reasoning",
        "_index",
        "_last_kind",
        "_life",
        "_max_event_bytes",
        "_flushed",
        "_idle_events",
        "_idle_since",
        "_kind",
        "_kinds",
        "_offset",
        "_parts",
        "_parts_bytes",
        "_prefix",
        "_pass_continuous",
        "_pass_usage",
        "_prompt_details",
        "_prompt_tokens",
        "_request_id",
        "_role_sent",
        "_scored",
        "_translation",
        "_want_ids",
        "_want_usage",
        "begun",
        "created",
        "echoed",
        "end",
        "error",
        "fault",
        "fingerprint",
        "finish_reason",
        "ids_exact",
        "matcher",
        "prompt_ids",
        "public_id",
        "usage",
    )

    def __init__(
        self,
        *,
        want_token_ids: bool = False,
        want_usage: bool = False,
        want_continuous_usage: bool = False,
        unasked_usage: bool = False,
        hide_reasoning: bool = False,
        prompt_tokens: int | None = None,
        prompt_details: dict[str, Any] | None = None,
        public_id: str | None = None,
        created: int | None = None,
        index: int | None = None,
        closing_events: bool = True,
        prefix: str = "",
        translation: Callable[[], Translation] | None = None,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        """Start on the first worker's stream.

        `want_*` is what the client asked for. `unasked_usage` passes on what usages come unasked: the engine has been
        started so (`--enable-force-include-usage`). `hide_reasoning` takes out what reasoning comes. `prompt_tokens`
        and `prompt_details` are the prefiller's word on the prompt (`usage.py`). `public_id`, `created` and `index`
        override what the worker says, and `closing_events` False keeps usage and [DONE] back: both for an answer made
        of several streams. `prefix` is what the first text begins with: an echoed prompt. `translation` makes the form
        that the events leave in, if not their own.
        """
        self._translation = None if translation is None else translation()
        self.matcher = EventMatcher(want_token_ids, self._translation is not None)
        self.ids_exact = True
        self.prompt_ids: array[int] | None = None
        self.fault = ""
        self.echoed = False
        self._expected_id = self._request_id = ""
        self._ids_checked = False
        self.usage: dict[str, Any] | None = None
        self.fingerprint: str | None = None
        self.public_id = public_id
        self.created = created
        self._want_ids = want_token_ids
        self._want_usage = want_usage
        self._pass_usage = want_usage or unasked_usage
        self._pass_continuous = (want_usage and want_continuous_usage) or unasked_usage
        self._hide_reasoning = hide_reasoning
        self._prompt_tokens = prompt_tokens
        self._prompt_details = prompt_details
        self._index = index
        self._closing_events = closing_events
        self._max_event_bytes = max_event_bytes
        self._life = 0
        self._exact_before = True
        self._idle_events = self._idle_since = 0  # events in a row that brought no token, and how many there were then
        self._role_sent = self._scored = False
        self._prefix = prefix
        self._kinds: set[str] = set()
        self._last_kind: str | None = None  # of the last text that came in earlier lives
        self._offset = 0  # characters of all tokens whose logprobs have come: where those of the next life begin
        self._begin_life()

    def _begin_life(self) -> None:
        """Nothing has come of the next worker's stream."""
        self.end: StreamEnd | None = None
        self.error: bytes | None = None
        self.finish_reason: str | None = None
        self.begun = False
        self._base = self.tokens  # of earlier lives
        self._ids_in_life, self._events_counted = False, 0
        self._parts: list[bytes] = []  # of an event that has not ended
        self._parts_bytes = 0
        self._edge = b""  # the last byte of `_parts`, where a blank line may straddle
        self._after_cr = False  # what came last was a CR, and the LF that may follow belongs to it
        self._kind: str | None = None  # of the last text that came in this life
        self._flushed: str | None = None
        self._first_offset = self._offset

    def prefilled(self, prompt_tokens: int, prompt_details: dict[str, Any] | None) -> None:
        """The prefiller's word, where it comes when the decoder's stream is open already."""
        self._prompt_tokens, self._prompt_details = prompt_tokens, prompt_details

    def expect(self, upstream_id: str, *, checked: bool, request_id: str = "") -> None:
        """The next worker's events answer the request that was sent with this X-Request-Id.

        It is that of one try; clients see `request_id` in its place, that of all of them.

        `checked` says that this worker is known to put it into its answers; else the first event decides whether it
        does. Every later event must agree, by its parsed `id` or by the template's bytes, which hold it.
        """
        self._expected_id, self._ids_checked, self.echoed = upstream_id, checked, False
        self._request_id = request_id or upstream_id

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return self.matcher.tokens

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        self.matcher.tokens = tokens

    @property
    def ids(self) -> "array[int]":
        """The ids of those tokens."""
        return self.matcher.ids

    @property
    def tokens_in_life(self) -> int:
        """Tokens that the present worker has generated."""
        return self.tokens - self._base

    def kept_ids(self) -> "array[int]":
        """The ids that a life after this one goes on from."""
        return self.ids if self._want_ids else self.ids[: self.matcher.printed]

    def resume(self, broken: int = 0) -> int:
        """Begin another life of the same answer; returns how many tokens were given back to be made again.

        `broken` of those that would be kept belong to a character that is not whole: these, too.
        """
        dropped = 0
        if not self._want_ids and (self.ids_exact or not self.matcher.printed):
            self.matcher.printed -= broken
            dropped = self.tokens - self.matcher.printed
            del self.ids[self.matcher.printed :]
            self.tokens = self.matcher.printed
            self.ids_exact = True
        self._last_kind = self._kind or self._last_kind
        self._life += 1
        self._begin_life()
        self.matcher.forget()
        self.matcher.between_events = True
        return dropped

    def cut(self, broken: int = 0) -> Cut:
        """Where the present life has ended; to be asked before `resume`, and with the same."""
        misparsed = self.end is StreamEnd.MISPARSED
        kept = self._want_ids or self._scored or broken >= self.matcher.printed
        halved = bool(broken) and kept
        return Cut(frozenset(self._kinds), self.tokens_in_life, self._flushed, misparsed, halved)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the worker; return what the client gets for them, whole events or nothing.

        O(len(data)) over the life of the stream, whatever the chunking.
        """
        if self.end is not None:
            return b""
        relayed = self.matcher.match(data)
        if relayed is None:
            relayed = self._events_of(data)
            self.matcher.between_events = not self._parts and self.end is None
        return relayed

    def close(self) -> StreamEnd:
        """The worker's bytes have ended; returns how. Half an event is dropped."""
        if self.end is None:
            self.end = StreamEnd.UNFINISHED if self.finish_reason is None else StreamEnd.NO_DONE
        self._parts.clear()
        self.matcher.between_events = False
        return self.end

    def counted_usage(self) -> dict[str, Any]:
        """The usage by our own count."""
        usage: dict[str, Any] = {**usage_of(self.prompt_tokens or 0, self.tokens)}
        put_prompt_details(usage, self._prompt_details)
        return usage

    @property
    def prompt_tokens(self) -> int | None:
        """The prompt's size by the prefiller's word, else by the ids that the decode worker told; None: not yet."""
        if self._prompt_tokens is None and self.prompt_ids is not None:
            return len(self.prompt_ids)
        return self._prompt_tokens

    def owed_usage(self, model: str | None, *, chat: bool) -> bytes:
        """The final usage event of an answer whose worker ended without one, from our own count; else nothing."""
        if not self._want_usage or self.usage is not None or self.finish_reason is None or self.prompt_tokens is None:
            return b""
        head = event_head(self.public_id, self.created, model, chat=chat)
        event = {**head, "choices": [], "usage": self.counted_usage()}
        return self._final_usage(event, event_bytes(event))

    def last_words(self) -> bytes:
        """What ends a finished answer whose worker sends no [DONE]: that is not made up; other forms have an end."""
        return b"" if self._translation is None else self._translation.end()

    # -------------------------------------------------------------------------------------------- framing

    def _join(self, data: bytes) -> bytes | None:
        """All bytes since the last blank line if `data` completes an event, else None and they are kept."""
        seam = self._edge + data
        if b"\n\n" in seam:
            whole = b"".join((*self._parts, data))
            self._parts.clear()
            self.matcher.between_events = True
            self._parts_bytes = 0
            self._edge = b""
            return whole
        self._keep(data, seam)
        return None

    def _keep(self, data: bytes, seam: bytes) -> None:
        self._parts.append(data)
        self._parts_bytes += len(data)
        self._edge = seam[-1:]
        if self._parts_bytes > self._max_event_bytes:
            self.end = StreamEnd.OVERSIZED
            self._parts.clear()

    def _events_of(self, data: bytes) -> bytes:
        if self._after_cr or b"\r" in data:
            data = self._with_line_feeds(data)
        if self._parts:
            whole = self._join(data)
            if whole is None:
                return b""
            data = whole
        out = []
        start = 0
        while self.end is None:
            if data.startswith(b"\n", start):  # of no event: a worker may send any number of them
                start = _after_blank_lines(data, start)
            found = data.find(b"\n\n", start)
            if found < 0:
                if start < len(data):
                    rest = data[start:]
                    self._keep(rest, rest)
                break
            stop = found + 2
            raw = data[start:stop]
            start = stop
            relayed = self.matcher.match(raw)
            if relayed is None:
                relayed = self._judge(raw)
            if relayed:
                out.append(relayed)
        return out[0] if len(out) == 1 else b"".join(out)

    def _with_line_feeds(self, data: bytes) -> bytes:
        """`data` with LF for each line end; strings escape CR, so it can only be part of one."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]  # that line end has been taken
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    # -------------------------------------------------------------------------------------------- template

    def _make_template(self, raw: bytes, out: bytes) -> None:
        """Make a template of an ordinary event: `raw` as it came, `out` as the client got it."""
        if b'"prompt_token_ids":[' in raw or raw.find(b"\n") != len(raw) - 2:
            return  # ids that come once would have to be taken out of every match; one line is all that is looked at
        ids_at = raw.rfind(_IDS_KEY)
        for key in _TEXT_KEYS:
            if ids_at > 0 and raw.count(key) == 1:
                start = raw.index(key) + len(key)
                stop = raw.find(b'"', start)
                before = raw[start - len(key) - 1 : start - len(key)]
                escaped = raw[stop - 1 : stop] == b"\\"  # then the quote may be one of the text
                if before not in (b",", b"{") or escaped or not start <= stop < ids_at:
                    return
                mid = raw[stop : ids_at + len(_IDS_KEY)]
                tail = raw[raw.index(b"]", ids_at) :]
                frame = self._frame(key, out, mid[:-1] + b"null" + tail[1:])
                if frame is not None:
                    self.matcher.learn(raw[:start], mid, tail, *frame)
                return

    def _frame(self, key: bytes, out: bytes, end_out: bytes) -> tuple[bytes, bytes] | None:
        """Between what the text stands in what the client gets."""
        if self._translation is not None:
            return self._translation.frame(key[1:-3].decode())
        return (out[: out.index(key) + len(key)], end_out) if out.count(key) == 1 else None

    # -------------------------------------------------------------------------------------------- JSON

    def _judge(self, raw: bytes) -> bytes:
        """Take one event the slow way; returns what the client gets for it."""
        if (fault := self._flood(raw)) is not None:
            return self._refuse(StreamEnd.MALFORMED, fault)
        raw = _known_lines(raw if self.begun else raw.removeprefix(_BYTE_ORDER_MARK))
        payload = _payload(raw)
        unread = raw if self._translation is None and raw.strip() else b""
        if payload is None:
            return unread
        if payload == b"[DONE]":
            return self._done(raw)
        try:
            event = orjson.loads(payload)
        except ValueError:
            return unread
        if not isinstance(event, dict):
            return unread
        self.begun = True
        if event.get("error") or event.get("object") == "error":
            self.error = payload
            self.end = StreamEnd.ERROR
            return b""
        choices = event.get("choices")
        if choices is None:
            return unread
        try:
            if not isinstance(choices, list):
                raise ValueError("choices are no list")
            if len(choices) > MAX_CHOICES:
                raise ValueError(f"it has {len(choices)} choices")
            for choice in choices:
                checked_choice(choice)
            checked_usage(event.get("usage"))
            if self._translation is not None:
                self._translation.check(choices)
        except ValueError as error:
            return self._refuse(StreamEnd.MALFORMED, f"an event is no part of an answer: {error}")
        if self._expected_id and not self._is_ours(event.get("id")):
            return self._refuse(StreamEnd.FOREIGN, "an event carries the id of another request's answer")
        if not choices:
            return self._final_usage(event, raw)
        return self._tokens(event, choices, raw)

    def _flood(self, raw: bytes) -> str | None:
        """What is wrong with a stream that takes long to read and says nothing."""
        if self.tokens != self._idle_since:
            self._idle_since, self._idle_events = self.tokens, 0
        self._idle_events += 1
        if self._idle_events > MAX_IDLE_EVENTS:
            return f"more than {MAX_IDLE_EVENTS} events in a row bring no token"
        return f"an event has more than {MAX_LINES} lines" if raw.count(b"\n") > MAX_LINES else None

    def _is_ours(self, told: object) -> bool:
        echoed = answers(told, self._expected_id)
        if echoed:
            self.echoed = self._ids_checked = True
        return echoed or not self._ids_checked

    def _refuse(self, end: StreamEnd, fault: str) -> bytes:
        self.end, self.fault = end, fault
        return b""

    def _done(self, raw: bytes) -> bytes:
        if self.finish_reason is None:
            self.end = StreamEnd.UNFINISHED
            return b""
        self.end = StreamEnd.DONE
        if self._translation is not None:
            return self._translation.end()
        return raw if self._closing_events else b""

    def _final_usage(self, event: dict[str, Any], raw: bytes) -> bytes:
        usage = event.get("usage")
        if not isinstance(usage, dict):
            return raw
        self._count_by_usage(usage)
        if self.finish_reason is None:  # of a life that will go on elsewhere; the last one tells the whole
            return b""
        changed = put_prompt_details(usage, self._prompt_details)
        changed |= self._rewrite_usage(usage) | self._rewrite_identity(event)
        if self._base and event.pop("metrics", None) is not None:  # of the last part only, as the details of its usage
            changed = True
        self.usage = usage
        if isinstance(told := event.get("system_fingerprint"), str):
            self.fingerprint = told
        if not (self._pass_usage and self._closing_events):
            return b""
        return self._told(event, raw, changed, 0)

    def _tokens(self, event: dict[str, Any], choices: list[Any], raw: bytes) -> bytes:
        """An event with choices: the general case."""
        blanked = self._take_ids(event, "prompt_token_ids", prompt=True)
        changed = carries = finishes = False
        cut: StreamEnd | None = None
        for choice in choices:
            if self._tells_last_id_again(choice):
                self.end = StreamEnd.RECOMPUTED
                self._flushed = None if _kinds_of(choice) else ""
                return b""
            blanked += self._take_ids(choice, "token_ids")
            blanked += self._take_ids(choice, "prompt_token_ids", prompt=True)
            if kinds := _kinds_of(choice):
                if self._life and self._kind is None and not _continues(self._last_kind, kinds[0]):
                    self.end = StreamEnd.MISPARSED
                    return b""
                carries = True
                self.matcher.printed = self.tokens
                self._kinds.update(kinds)
                self._kind = kinds[-1]
            if (ended := _cut_by(choice)) is not None:
                cut, changed = ended, True
                self._flushed = _text_of(choice)
                choice["finish_reason"] = None
                choice["stop_reason"] = None
            elif isinstance(choice.get("finish_reason"), str):
                self.finish_reason = choice["finish_reason"]
                finishes = True
            if self._index is not None and choice.get("index") != self._index:
                choice["index"] = self._index
                changed = True
            if choice.get("logprobs") is not None:
                self.matcher.printed = self.tokens  # told to the client, text or not
                self._scored = True
                changed |= self._go_on_with_offsets(choice["logprobs"])
        usage = event.get("usage")
        ordinary = not (cut or finishes or usage or event.get("kv_transfer_params")) and len(choices) == 1
        if carries and not self._ids_in_life and not (isinstance(usage, dict) and usage.get("completion_tokens")):
            self._count_by_event()
        if isinstance(usage, dict):
            changed |= self._take_usage(event, usage)
        if self._hide_reasoning and _drop_reasoning(choices):
            changed, ordinary, carries = True, False, any(map(_kinds_of, choices))
        if cut is not None:
            self.end = cut
            if not (carries or any(map(_tells_tokens, choices))):
                return b""
        role = self._rewrite_role(choices)
        changed |= role | self._rewrite_identity(event)
        if not (carries or finishes) and self._says_nothing(choices, role):
            return b""
        if self._prefix and "text" in choices[0]:
            choices[0]["text"] = self._prefix + (choices[0]["text"] or "")
            self._prefix = ""
            changed, ordinary = True, False
        out = self._told(event, raw, changed, blanked)
        if ordinary and carries and choices[0].get("logprobs") is None:  # of which kind an empty text is nobody knows
            self._make_template(raw, out)
        return out

    def _told(self, event: dict[str, Any], raw: bytes, changed: bool, blanked: int) -> bytes:
        """What the client gets for an event; `blanked` of its lists of ids are null by now."""
        if self._translation is not None:
            self.matcher.forget()  # what a text stands in may have ended
            return self._translation.event(event)
        if event.get("kv_transfer_params"):  # where in the cluster's memory the answer's KV is
            event["kv_transfer_params"], changed = None, True
        if changed:
            return _write(event, raw)
        return _blank_ids(event, raw, blanked) if blanked else raw

    def _take_ids(self, holder: dict[str, Any], name: str, *, prompt: bool = False) -> int:
        """Record a list of ids; null it in the event unless the client wants it. Returns lists nulled."""
        ids = holder.get(name)
        if not isinstance(ids, list):
            return 0
        try:
            taken = array("I", ids)
        except (TypeError, OverflowError):
            taken = None
        if prompt:
            if self.prompt_ids is None:
                self.prompt_ids = taken
        else:
            if self._events_counted and len(ids) >= self._events_counted:
                self._uncount_events()
            self._ids_in_life = True
            self.tokens += len(ids)
            if taken is None:
                self.ids_exact = False
            else:
                self.ids.extend(taken)
        if self._want_ids and not (prompt and self._life):
            return 0
        holder[name] = None
        return 1

    def _tells_last_id_again(self, choice: dict[str, Any]) -> bool:
        """Whether a `recomputed` marker ends with the id before it once more: vllm-ascend up to 0.14 puts it there.

        Such an event is left out as a whole: a newer engine may mean a token of its own by that, which is made again.
        """
        ids = choice.get("token_ids")
        if _cut_by(choice) is not StreamEnd.RECOMPUTED or not isinstance(ids, list):
            return False
        last = ids[-2:] if self.tokens == self._base or not self.ids else [self.ids[-1], *ids][-2:]
        return len(last) == 2 and last[0] == last[1]

    def _go_on_with_offsets(self, logprobs: Any) -> bool:
        """Completions say at which character of the answer a token begins: a second life's begin anew at 0."""
        offsets = logprobs.get("text_offset") if isinstance(logprobs, dict) else None
        tokens = logprobs.get("tokens") if isinstance(logprobs, dict) else None
        if not isinstance(offsets, list) or not isinstance(tokens, list) or not offsets or len(offsets) != len(tokens):
            return False
        if not all(map(_is_count, offsets)) or not isinstance(tokens[-1], str):
            return False
        if self._first_offset:
            offsets = logprobs["text_offset"] = [self._first_offset + offset for offset in offsets]
        self._offset = offsets[-1] + len(tokens[-1])
        return bool(self._first_offset)

    def _count_by_usage(self, usage: dict[str, Any]) -> None:
        """Where a worker sends no ids, its cumulative usage counts."""
        generated = usage.get("completion_tokens")
        if self._ids_in_life or not _is_count(generated):
            return
        if self._base + generated > self.tokens:
            self.tokens = self._base + generated
            self.ids_exact = False

    def _count_by_event(self) -> None:
        """Where a worker sends neither ids nor usage, an event with text counts as one token, the least that it is.

        So it is known that the client has seen something, which must not come again from another worker.
        """
        if not self._events_counted:
            self._exact_before = self.ids_exact
        self._events_counted += 1
        self.tokens += 1
        self.matcher.printed = self.tokens
        self.ids_exact = False

    def _uncount_events(self) -> None:
        """Ids come after all: what came before them was no tokens, but the message that a chat's `echo` repeats."""
        self.tokens -= self._events_counted
        self.matcher.printed = self.tokens
        self.ids_exact, self._events_counted = self._exact_before, 0

    def _take_usage(self, event: dict[str, Any], usage: dict[str, Any]) -> bool:
        """The usage that an event with choices carries: counted, and left out unless it is wanted there.

        Returns whether the event is another one by that.
        """
        self._count_by_usage(usage)
        if self._pass_continuous:
            # engines tell details of the prompt at the end alone; where one tells them here, they are its prefiller's
            changed = bool(usage.get("prompt_tokens_details")) and put_prompt_details(usage, self._prompt_details)
            return changed | self._rewrite_usage(usage)
        del event["usage"]
        return True

    def _rewrite_usage(self, usage: dict[str, Any]) -> bool:
        """Make a usage that of the whole answer."""
        if not self._life:
            return False
        prompt_tokens = self._prompt_tokens
        if prompt_tokens is None:
            told = usage.get("prompt_tokens")
            prompt_tokens = max(0, told - self._base) if _is_count(told) else 0
        usage |= usage_of(prompt_tokens, self.tokens)
        if self._base:  # a worker breaks down its own tokens only: too few of reasoning
            usage.pop("completion_tokens_details", None)
        return True

    def _rewrite_identity(self, event: dict[str, Any]) -> bool:
        """Keep `id` and `created` those of the answer's first event."""
        changed = False
        if self.public_id is None and isinstance(told := event.get("id"), str):
            self.public_id = str(shown_id(told, self._expected_id, self._request_id))
        if "id" in event and event["id"] != self.public_id:
            event["id"] = self.public_id
            changed = True
        if self.created is None and _is_count(event.get("created")):
            self.created = event["created"]
        elif "created" in event and event["created"] != self.created:
            event["created"] = self.created
            changed = True
        return changed

    def _rewrite_role(self, choices: list[dict[str, Any]]) -> bool:
        """Drop the role from a delta when the client already has it."""
        changed = False
        for choice in choices:
            delta = choice.get("delta")
            if isinstance(delta, dict) and "role" in delta:
                if self._life and self._role_sent:
                    del delta["role"]
                    changed = True
                else:
                    self._role_sent = True
        return changed

    def _says_nothing(self, choices: list[dict[str, Any]], role_dropped: bool) -> bool:
        """Whether the event exists only because we asked for ids, or held only a role that was dropped."""
        if self._want_ids and not role_dropped:
            return False
        for choice in choices:
            delta = choice.get("delta")
            if not isinstance(delta, dict) or choice.get("logprobs") is not None or choice.get("token_ids"):
                return False
            if any(value is not None and not (role_dropped and value == "") for value in delta.values()):
                return False
        return True


# ------------------------------------------------------------------------------------------------ helpers


def payloads_of(events: bytes) -> Iterator[bytes]:
    """The data of each of some whole events as `feed` returns them, whatever else they hold."""
    for block in events.split(b"\n\n"):
        payload = block[6:] if block.startswith(b"data: ") and b"\n" not in block else _payload(block)
        if payload is not None:
            yield payload


def _after_blank_lines(data: bytes, at: int) -> int:
    found = _BLANK_LINES.match(data, at)
    assert found is not None, "none is a number, too"
    return found.end()


def _payload(raw: bytes) -> bytes | None:
    """The data of an event, its lines joined by LF; None if it has none (a comment, a bare blank line)."""
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2:
        return raw[6:-2]
    data = [line[5:].removeprefix(b" ") for line in raw.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(data) if data else None


def _known_lines(raw: bytes) -> bytes:
    """`raw` without what no client could read: lines that are not UTF-8 or no field of an event stream."""
    if raw.isascii() and raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2:
        return raw
    lines = raw.split(b"\n")
    kept = [line for line in lines if not line or (line.startswith(_LINE_STARTS) and _is_text(line))]
    return raw if len(kept) == len(lines) else b"\n".join(kept)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _kinds_of(choice: dict[str, Any]) -> list[str]:
    """What a choice's part of an event carries for the client, in order; nothing for a role or an empty part."""
    if choice.get("text"):
        return [TEXT]
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return []
    found = {_KIND_OF_DELTA.get(name, TEXT) for name, value in delta.items() if value and name != "role"}
    return [kind for kind in (REASONING, TEXT, TOOL_CALLS) if kind in found]


def _drop_reasoning(choices: list[dict[str, Any]]) -> bool:
    """Take the reasoning out of an event; whether there was any."""
    deltas = [delta for choice in choices if isinstance(delta := choice.get("delta"), dict)]
    return any([delta.pop(name, None) for delta in deltas for name in _REASONING_KEYS])


def _tells_tokens(choice: dict[str, Any]) -> bool:
    """Whether a choice's part of an event has tokens for a client that wants their ids or logprobs, text or not."""
    return bool(choice.get("token_ids")) or any((choice.get("logprobs") or {}).values())


def _continues(before: str | None, after: str) -> bool:
    """Whether an answer cut off within text of one kind may go on with another: an answer may turn to a tool call."""
    return before is None or after == before or (before == TEXT and after == TOOL_CALLS)


def _cut_by(choice: dict[str, Any]) -> StreamEnd | None:
    """How the engine has ended this choice before its time; None if it has not."""
    if choice.get("stop_reason") == "recomputed":
        return StreamEnd.RECOMPUTED
    return StreamEnd.ABORTED if choice.get("finish_reason") == ABORT else None


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    text = choice.get("text") if not isinstance(delta, dict) else delta.get("content") or delta.get("reasoning")
    return text if isinstance(text, str) else ""


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _blank_ids(event: dict[str, Any], raw: bytes, lists: int) -> bytes:
    """`raw` with its lists of ids replaced by null, by slicing if the bytes show exactly those lists."""
    out, found = _IDS_LIST.subn(rb"\1null", raw)
    return out if found == lists else _write(event, raw)


def _write(event: dict[str, Any], raw: bytes) -> bytes:
    try:
        return b"data: " + orjson.dumps(event) + b"\n\n"
    except TypeError:  # nested deeper than orjson writes, though it read it: nothing of ours is that deep
        return raw

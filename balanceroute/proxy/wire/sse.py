"""The stream of one answer: a worker's bytes in; bytes for the client and an exact count of tokens out.

`event_stream.py` cuts the bytes into events, and each event takes one of two ways:

* **JSON**: it is parsed once with orjson, counted and judged (finish, `recomputed`, error, usage). Then it is passed on
  as the bytes that came, or with its ids sliced out, or written anew.
* **Template** (`hotpath.EventMatcher`): an ordinary event (one choice, nothing finished, nothing special) that went
  the JSON way leaves a template behind (`event_template.py`). Nearly all later events are taken apart by it, without
  parsing.

**Lives.** A scanner lives as long as the client's answer, to which several workers may contribute one after the other.
The stream of one worker is a life of the answer; `resume()` begins the next. `id`, `created` and the role stay those of
the first life; usage is that of the whole answer. Text that a worker held back (half of a character) is lost with the
worker, so `resume()` gives back the ids whose text has not come, and they are generated again. With stop strings a
worker holds back more text than the last ids show: an event with a `recomputed` marker or an abort contains that text,
a lost connection loses it.

What of an answer can be told by itself is in parts: its tokens (`answer_tokens.py`), its id (`answer_identity.py`) and
the offsets of its text (`text_offsets.py`). The rest of `EventScanner` is one machine: what an event is judged by, what
it is rewritten to and what the next template is made of are one state, and each event changes all of it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

import orjson

from balanceroute.proxy.hotpath import EventMatcher
from balanceroute.proxy.wire.answer_identity import AnswerIdentity
from balanceroute.proxy.wire.answer_tokens import AnswerTokens
from balanceroute.proxy.wire.bounds import ABORT, MAX_CHOICES, checked_choice, checked_usage
from balanceroute.proxy.wire.closing import event_bytes, event_head, usage_of
from balanceroute.proxy.wire.event_contents import continues, drop_reasoning, is_count, kinds_of, tells_tokens, text_of
from balanceroute.proxy.wire.event_stream import MAX_EVENT_BYTES, EventSplitter, known_lines, payload_of
from balanceroute.proxy.wire.event_template import template_of
from balanceroute.proxy.wire.text_offsets import TextOffsets
from balanceroute.proxy.wire.usage import put_prompt_details

MAX_LINES: Final = 1024  # of an event; engines write one
MAX_IDLE_EVENTS: Final = 10_000  # in a row without a token; each costs as much as an event with one

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_IDS_LIST = re.compile(rb'([,{]"(?:prompt_)?token_ids":)\[[0-9,]*\]')


class StreamEnd(Enum):
    """How one worker's stream ended, once it has."""

    DONE = "done"  # a finish reason, then [DONE]
    RECOMPUTED = "recomputed"  # the engine gave the request back: prompt + generated ids are to be prefilled again
    ABORTED = "aborted"  # the engine is being stopped and aborts its requests: same remedy, at another worker
    UNFINISHED = "unfinished"  # [DONE] or the end of the bytes without a finish reason: same remedy
    NO_DONE = "no_done"  # finished, but the bytes end without [DONE]
    ERROR = "error"  # an error event; see `EventScanner.error`
    OVERSIZED = "oversized"  # an event above the limit
    MISPARSED = "misparsed"  # a later life begins with a kind of text that can't follow the last one before it
    MALFORMED = "malformed"  # an event that no engine sends on purpose; see `EventScanner.fault`
    FOREIGN = "foreign"  # an event of another request's answer; see `EventScanner.fault`


DONE: Final = StreamEnd.DONE


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a life of an answer was cut off, and what the client has been given by then.

    Attributes:
        kinds: of the text that has come, over all lives. tokens_in_life: that the last worker has generated. flushed:
        the text of the event with the `recomputed` marker or the abort, which has all that the engine had held back;
        None: there was no such event. misparsed: the life ended with `StreamEnd.MISPARSED`. halved: the last tokens
        are half of a character, and can't be given back.
    """

    kinds: frozenset[str]
    tokens_in_life: int
    flushed: str | None
    misparsed: bool
    halved: bool = False


class Translation(Protocol):
    """Writes the events of a chat in another protocol (`message_answers.py`). A scanner has one, and calls it in the
    order of the events.
    """

    def check(self, choices: list[dict[str, Any]]) -> None:
        """Look at an event before any of its tokens are counted. Raises: ValueError: it has no translation."""
        ...

    def event(self, event: dict[str, Any]) -> bytes:
        """What the client gets for an event that has passed `check`; may be empty."""
        ...

    def end(self) -> bytes:
        """What the client gets for [DONE]."""
        ...

    def frame(self, key: str) -> tuple[bytes, bytes] | None:
        """What stands before and after the text, JSON as it came, in the translation of the last event.

        None unless that event held one text, under `key`, and nothing else.
        """
        ...


class EventScanner:
    """Counts one answer's tokens and rewrites its events for the client; never raises on any input.

    Attributes of the answer, over all its lives:
        generated: its tokens. identity: its id. usage: the final usage, as sent. fingerprint: the `system_fingerprint`
        that came with it. matcher: takes the events that fit the template, and keeps the count and the ids of tokens.

    Attributes of the present life:
        end: how it ended; None while it runs. begun: a data event has come. finish_reason: the last one that has come.
        error: the JSON of the error event. fault: what is wrong with a MALFORMED or FOREIGN stream.
    """

    __slots__ = (
        "_closing_events",
        "_hide_reasoning",
        "_index",
        "_last_kind",
        "_life",
        "_max_event_bytes",
        "_flushed",
        "_idle_events",
        "_tokens_before_idle",
        "_kind",
        "_kinds",
        "_prefix",
        "_pass_continuous",
        "_pass_usage",
        "_prompt_details",
        "_prompt_tokens",
        "_role_sent",
        "_scored",
        "_splitter",
        "_text_offsets",
        "_translation",
        "_want_ids",
        "_want_usage",
        "begun",
        "end",
        "error",
        "fault",
        "fingerprint",
        "finish_reason",
        "generated",
        "identity",
        "matcher",
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

        Args:
            want_token_ids, want_usage, want_continuous_usage: what the client asked for.
            unasked_usage: pass on usages that nobody asked for; engines send them if they are started with
                `--enable-force-include-usage`.
            hide_reasoning: take reasoning out of the events.
            prompt_tokens, prompt_details: what the prefiller said of the prompt (`usage.py`).
            public_id, created, index: put in place of what the worker says; for an answer made of several streams.
            closing_events: False keeps usage and [DONE] back; for the same.
            prefix: put before the first text: an echoed prompt.
            translation: makes the writer of another protocol for this answer.
        """
        self._translation = None if translation is None else translation()
        self.matcher = EventMatcher(want_token_ids, self._translation is not None)
        self.generated = AnswerTokens(self.matcher, want_token_ids)
        self.identity = AnswerIdentity(public_id, created)
        self.fault = ""
        self.usage: dict[str, Any] | None = None
        self.fingerprint: str | None = None
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
        self._idle_events = 0  # events in a row that brought no token
        self._tokens_before_idle = 0  # tokens when the first of them came
        self._role_sent = self._scored = False
        self._prefix = prefix
        self._kinds: set[str] = set()
        self._last_kind: str | None = None  # of the last text of earlier lives
        self._text_offsets = TextOffsets()
        self._begin_life()

    def _begin_life(self) -> None:
        """Reset what is of one life."""
        self.end: StreamEnd | None = None
        self.error: bytes | None = None
        self.finish_reason: str | None = None
        self.begun = False
        self._splitter = EventSplitter(self._max_event_bytes)
        self._kind: str | None = None  # of the last text of this life
        self._flushed: str | None = None  # see `Cut`

    def prefilled(self, prompt_tokens: int, prompt_details: dict[str, Any] | None) -> None:
        """What the prefiller says of the prompt, where it answers after the decoder's stream was opened."""
        self._prompt_tokens, self._prompt_details = prompt_tokens, prompt_details

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return self.matcher.tokens

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        self.matcher.tokens = tokens

    def resume(self, broken: int = 0) -> int:
        """Begin another life of the answer; returns how many tokens were given back, to be generated again.

        `broken`: so many of the last tokens whose text has come are half of a character; they are given back as well.
        """
        given_back = self.generated.resume(broken)
        self._text_offsets.begin_life()
        self._last_kind = self._kind or self._last_kind
        self._life += 1
        self._begin_life()
        self.matcher.forget()
        self.matcher.between_events = True
        return given_back

    def cut(self, broken: int = 0) -> Cut:
        """Where the present life has ended; to be called before `resume`, with the same argument."""
        misparsed = self.end is StreamEnd.MISPARSED
        kept = self._want_ids or self._scored or broken >= self.matcher.printed
        halved = bool(broken) and kept
        return Cut(frozenset(self._kinds), self.generated.in_life, self._flushed, misparsed, halved)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the worker; return what the client gets for them, whole events or nothing.

        O(len(data)) over the life of the stream, whatever the chunking.
        """
        if self.end is not None:
            return b""
        relayed = self.matcher.match(data)
        if relayed is None:
            relayed = self._events_of(data)
        return relayed

    def close(self) -> StreamEnd:
        """The worker's bytes have ended; returns how. Half an event is dropped."""
        if self.end is None:
            self.end = StreamEnd.UNFINISHED if self.finish_reason is None else StreamEnd.NO_DONE
        self._splitter.drop()
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
        if self._prompt_tokens is None and self.generated.prompt_ids is not None:
            return len(self.generated.prompt_ids)
        return self._prompt_tokens

    def owed_usage(self, model: str | None, *, chat: bool) -> bytes:
        """The final usage event of an answer whose worker ended without one, from our own count; else nothing."""
        if not self._want_usage or self.usage is not None or self.finish_reason is None or self.prompt_tokens is None:
            return b""
        head = event_head(self.identity.public_id, self.identity.created, model, chat=chat)
        event = {**head, "choices": [], "usage": self.counted_usage()}
        return self._final_usage(event, event_bytes(event))

    def last_words(self) -> bytes:
        """What ends a finished answer whose worker sent no [DONE]: nothing, but for another protocol its own end."""
        return b"" if self._translation is None else self._translation.end()

    # -------------------------------------------------------------------------------------------- events

    def _events_of(self, data: bytes) -> bytes:
        """What the client gets for bytes that are not just events by the template."""
        out = []
        self.matcher.between_events = True
        for raw in self._splitter.events(data):
            relayed = self.matcher.match(raw)
            if relayed is None:
                relayed = self._judge(raw)
            if relayed:
                out.append(relayed)
            if self.end is not None:
                break
        if self._splitter.oversized and self.end is None:
            self.end = StreamEnd.OVERSIZED
        self.matcher.between_events = self.end is None and not self._splitter.partial
        return out[0] if len(out) == 1 else b"".join(out)

    def _make_template(self, raw: bytes, out: bytes) -> None:
        """Have the matcher take later events apart like this one, which came as `raw` and was relayed as `out`."""
        template = template_of(raw)
        if template is None:
            return
        translation = self._translation
        frame = template.frame(out) if translation is None else translation.frame(template.name)
        if frame is not None:
            self.matcher.learn(template.head, template.mid, template.tail, *frame)

    # -------------------------------------------------------------------------------------------- JSON

    def _judge(self, raw: bytes) -> bytes:
        """Take one event the JSON way; returns what the client gets for it."""
        if (fault := self._flooding(raw)) is not None:
            return self._refuse(StreamEnd.MALFORMED, fault)
        raw = known_lines(raw if self.begun else raw.removeprefix(_BYTE_ORDER_MARK))
        payload = payload_of(raw)
        unread = raw if self._translation is None and raw.strip() else b""  # for an event that is no part of the answer
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
        if not self.identity.is_ours(event.get("id")):
            return self._refuse(StreamEnd.FOREIGN, "an event carries the id of another request's answer")
        if not choices:
            return self._final_usage(event, raw)
        if self.finish_reason is not None:  # said twice, or by mistake: no part of an answer that has ended
            return b""
        return self._part_of_answer(event, choices, raw)

    def _flooding(self, raw: bytes) -> str | None:
        """What is wrong with a stream of events that cost time and bring no token; None: nothing yet."""
        if self.tokens != self._tokens_before_idle:
            self._tokens_before_idle, self._idle_events = self.tokens, 0
        self._idle_events += 1
        if self._idle_events > MAX_IDLE_EVENTS:
            return f"more than {MAX_IDLE_EVENTS} events in a row bring no token"
        return f"an event has more than {MAX_LINES} lines" if raw.count(b"\n") > MAX_LINES else None

    def _refuse(self, end: StreamEnd, fault: str) -> bytes:
        """End the stream; the client gets nothing for this event."""
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
        self.generated.count_by_usage(usage)
        if self.finish_reason is None:  # the answer goes on in another life, whose usage will be that of the whole
            return b""
        changed = put_prompt_details(usage, self._prompt_details)
        changed |= self._rewrite_usage(usage) | self.identity.put_into(event)
        if (
            self.generated.earlier and event.pop("metrics", None) is not None
        ):  # they would be those of the last life alone
            changed = True
        self.usage = usage
        if isinstance(told := event.get("system_fingerprint"), str):
            self.fingerprint = told
        if not (self._pass_usage and self._closing_events):
            return b""
        return self._relayed(event, raw, changed, 0)

    def _part_of_answer(self, event: dict[str, Any], choices: list[Any], raw: bytes) -> bytes:
        """Take an event with choices: count what it brings, then rewrite it for the client."""
        blanked = self.generated.take_prompt_ids(event)
        changed = carries = finishes = False
        cut: StreamEnd | None = None
        for choice in choices:
            if self._tells_last_id_again(choice):
                self.end = StreamEnd.RECOMPUTED
                self._flushed = None if kinds_of(choice) else ""
                return b""
            blanked += self.generated.take_ids(choice)
            blanked += self.generated.take_prompt_ids(choice)
            if kinds := kinds_of(choice):
                if self._life and self._kind is None and not continues(self._last_kind, kinds[0]):
                    self.end = StreamEnd.MISPARSED
                    return b""
                carries = True
                self.generated.printed()
                self._kinds.update(kinds)
                self._kind = kinds[-1]
            if (ended := _cut_by(choice)) is not None:
                cut, changed = ended, True
                self._flushed = text_of(choice)
                choice["finish_reason"] = None
                choice["stop_reason"] = None
            elif isinstance(choice.get("finish_reason"), str):
                self.finish_reason = choice["finish_reason"]
                finishes = True
                self.matcher.forget()
            if self._index is not None and choice.get("index") != self._index:
                choice["index"] = self._index
                changed = True
            if choice.get("logprobs") is not None:
                self.generated.printed()  # logprobs show a token to the client even where it has no text
                self._scored = True
                changed |= self._text_offsets.go_on(choice["logprobs"])
        usage = event.get("usage")
        ordinary = not (cut or finishes or usage or event.get("kv_transfer_params")) and len(choices) == 1
        if carries:
            self.generated.count_by_event(usage)
        if isinstance(usage, dict):
            changed |= self._take_usage(event, usage)
        if self._hide_reasoning and drop_reasoning(choices):
            changed, ordinary, carries = True, False, any(map(kinds_of, choices))
        if cut is not None:
            self.end = cut
            if not (carries or any(map(tells_tokens, choices))):
                return b""
        role = self._rewrite_role(choices)
        changed |= role | self.identity.put_into(event)
        if not (carries or finishes) and self._says_nothing(choices, role):
            return b""
        self.generated.relayed()
        if self._prefix and "text" in choices[0]:
            choices[0]["text"] = self._prefix + (choices[0]["text"] or "")
            self._prefix = ""
            changed, ordinary = True, False
        out = self._relayed(event, raw, changed, blanked)
        if ordinary and carries and choices[0].get("logprobs") is None:  # not without text, whose kind is unknown then
            self._make_template(raw, out)
        return out

    def _relayed(self, event: dict[str, Any], raw: bytes, changed: bool, blanked: int) -> bytes:
        """What the client gets for an event.

        `changed`: `event` differs from `raw` by more than the `blanked` lists of ids that it has null for.
        """
        if self._translation is not None:
            self.matcher.forget()  # this event may end the block of text that the template was made for
            return self._translation.event(event)
        if event.get("kv_transfer_params"):  # they say where in the cluster's memory the answer's KV is
            event["kv_transfer_params"], changed = None, True
        if changed:
            return _write(event, raw)
        return _blank_ids(event, raw, blanked) if blanked else raw

    def _tells_last_id_again(self, choice: dict[str, Any]) -> bool:
        """Whether the ids of a `recomputed` marker end with the last id twice: vllm-ascend up to 0.14 repeats it there.

        Such an event is left out as a whole. A newer engine may mean another token by it; that is then generated again.
        """
        ids = choice.get("token_ids")
        if _cut_by(choice) is not StreamEnd.RECOMPUTED or not isinstance(ids, list):
            return False
        return self.generated.ends_twice(ids)

    def _take_usage(self, event: dict[str, Any], usage: dict[str, Any]) -> bool:
        """Count by the usage in an event with choices, and take the usage out unless the client gets it there.

        Returns whether that has changed the event.
        """
        self.generated.count_by_usage(usage)
        if self._pass_continuous:
            # engines send details of the prompt at the end only; those that are sent here give way to the prefiller's
            changed = bool(usage.get("prompt_tokens_details")) and put_prompt_details(usage, self._prompt_details)
            return changed | self._rewrite_usage(usage)
        del event["usage"]
        return True

    def _rewrite_usage(self, usage: dict[str, Any]) -> bool:
        """Make a worker's usage that of the whole answer; returns whether that has changed it."""
        if not self._life:
            return False
        prompt_tokens = self._prompt_tokens
        if prompt_tokens is None:
            told = usage.get("prompt_tokens")
            prompt_tokens = max(0, told - self.generated.earlier) if is_count(told) else 0
        usage |= usage_of(prompt_tokens, self.tokens)
        if self.generated.earlier:  # these details are of the last life alone: too few tokens of reasoning
            usage.pop("completion_tokens_details", None)
        return True

    def _rewrite_role(self, choices: list[dict[str, Any]]) -> bool:
        """Drop the role from a delta if the client already has it; returns whether one was dropped."""
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


def _cut_by(choice: dict[str, Any]) -> StreamEnd | None:
    """How the engine has ended this choice before its time; None if it has not."""
    if choice.get("stop_reason") == "recomputed":
        return StreamEnd.RECOMPUTED
    return StreamEnd.ABORTED if choice.get("finish_reason") == ABORT else None


def _blank_ids(event: dict[str, Any], raw: bytes, lists: int) -> bytes:
    """An event with null for its `lists` of ids: sliced where exactly so many are found in `raw`, else written anew."""
    out, found = _IDS_LIST.subn(rb"\1null", raw)
    return out if found == lists else _write(event, raw)


def _write(event: dict[str, Any], raw: bytes) -> bytes:
    try:
        return b"data: " + orjson.dumps(event) + b"\n\n"
    except TypeError:  # orjson reads deeper nesting than it writes; what we rewrite is not that deep
        return raw

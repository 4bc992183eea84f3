# cython: boundscheck=False, wraparound=False, annotation_typing=False
r"""The way of an event, from a worker's read to the client's write, top to bottom.

    ChunkReader.data_received   the read: whole chunks are taken past the HTTP parser (`unchunked`)
    Pump.chunk                  what has come is matched, counted and kept
    EventMatcher.match          the events' text without their ids, by a template instead of a JSON parser
    Flusher.flush, Pump.flush   at the end of the loop's turn
    PartWriter.write            the write: a chunk of the client's response

Anything but the plain case goes to the owners of these objects: `connection.py`, `sse.py`, `streaming.py`,
`response.py`.

This file is ordinary Python and runs as it is. Where there is a C compiler Cython compiles it, as the module `compiled`
and with the C types that `compiled.pxd` gives to its variables; docs/decisions/0008-compiled-hot-path.md says what that
saves. Loops over bytes are for C; in Python they are short.

**Events by template.** Nearly all events of a stream differ from the one before in two places only, the text and the
token ids. An ordinary event leaves a template behind: `head`, then a text, then `mid`, then ids, then `tail`. A later
event is taken apart by it without parsing, and only if the match is exact: `head` at its start, `tail` at its end, no
quote and no newline between `head` and `mid`, nothing but digits and commas between `mid` and `tail`.

Why an exact match proves the meaning. Inside a JSON string every quote is escaped, so a text without any quote is all
inside the string that `head` opened and that `mid` (which begins with a quote) closes. (A text ending in a backslash
would escape that quote; then the next bytes of `mid`, a comma or brace and a bare key, could not follow, and the event
was no JSON to begin with.) So the event is the template's event with another text and other ids: every key that was
judged ordinary then is byte for byte the same now. What an event leaves as is the template's own business: the text,
which is JSON already, between any two pieces.

**Writing once per turn.** Measured with 64 streams of 50 events/s on two quiet cores: writing from within the read
callback costs a tenth more CPU per event, because each write wakes its client while the neighbours wait to be read.
"""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any, Final

from balanceroute.errors import UpstreamError

SOURCE: Final = "f1419f2b44e535e2"  # digest of this file and compiled.pxd; a test says the new one
LARGE_READ_BYTES: Final = 128 * 1024  # a loop's read of as many has filled half of its buffer: more may wait
_SIZE_DIGITS: Final = 7  # of a chunk, at most: its size fits 32 bits
_ID_DIGITS: Final = 10  # of a token id, at most
_MAX_ID: Final = 2**32 - 1  # ids are kept in 32 bits
_MAX_OUT_BYTES: Final = 256 * 1024  # kept until the end of a turn
_SHORT_TEXT: Final = 64  # bytes of a text in which its end is looked for byte by byte
_SIZE_LINES: Final = [
    b"%x\r\n" % size for size in range(2048)
]  # of the chunks to clients; formatting costs 5 % of an event


class ChunkReader:
    """Takes what a worker's connection reads: whole chunks to `take`, anything else to the HTTP parser.

    A read of a stream is nearly always one whole chunk, or several; such a read leaves the parser where it was.

    Attributes: `take`, who gets the body of the reply under way. `between_chunks`, whether the next byte begins a chunk
    of it. Both are the connection's to set.
    """

    __slots__ = ("_parse", "between_chunks", "take")

    def __init__(self, parse: Callable[[bytes], None]) -> None:
        """`parse` gets the reads that are large, or not just whole chunks in the middle of a body."""
        self._parse = parse
        self.release()

    def release(self) -> None:
        """No reply is under way."""
        self.take: Callable[[bytes], None] = self._parse
        self.between_chunks = False

    def data_received(self, data: bytes) -> None:
        """Bytes of the worker."""
        if self.between_chunks and len(data) < LARGE_READ_BYTES:
            body = unchunked(data)
            if body is not None:
                self.take(body)
                return
        self._parse(data)


def unchunked(data: bytes) -> bytes | None:
    """The body in `data` if that is nothing but whole chunks, none of them the last; else None."""
    raw, end = data, len(data)
    parts: list[bytes] = []
    at = 0
    while at < end:
        i = at
        size = 0
        while i < end and i - at < _SIZE_DIGITS:
            digit = raw[i]
            if 48 <= digit <= 57:  # 0-9
                size = size * 16 + digit - 48
            elif 97 <= digit | 32 <= 102:  # a-f, A-F
                size = size * 16 + (digit | 32) - 87
            else:
                break
            i += 1
        stop = i + 2 + size
        if not size or stop + 2 > end or raw[i] != 13 or raw[i + 1] != 10 or raw[stop] != 13 or raw[stop + 1] != 10:
            return None
        body = raw[i + 2 : stop]
        at = stop + 2
        if at == end and not parts:
            return body
        parts.append(body)
    return b"".join(parts) if parts else None


class Pump:
    """The sink of a reply: has its events matched, and keeps what the client gets for them until it is flushed.

    Writing never waits: where the client takes no part the pump is `blocked`, and reads on only when it is told to.

    Attributes: `on_tokens`, told how many tokens have come. `blocked`, the client's socket is full. `over`, nothing
    more will be sent by this pump. `error`, of the worker. `failure`, of the client's writer. `out`, what the client
    has not been sent yet.
    """

    __slots__ = (
        "_client",
        "_counted",
        "_done",
        "_ended",
        "_flusher",
        "_matcher",
        "_reply",
        "_scanner",
        "_waiter",
        "_write",
        "blocked",
        "error",
        "failure",
        "on_tokens",
        "out",
        "over",
    )

    def __init__(
        self,
        reply: Any,
        scanner: Any,
        client: Any,
        on_tokens: Callable[[int], None],
        flusher: "Flusher",
        done: object,
    ) -> None:
        """From `reply` by `scanner` to `client`: a `Reply`, an `EventScanner`, a `BodyWriter`.

        Tokens counted before now are not told. When the scanner's end is `done` the last write ends the client's body.
        """
        self._reply = reply
        self._scanner = scanner
        self._matcher: EventMatcher = scanner.matcher
        self._client = client
        self._write: Callable[[bytes], bool] = client.write
        self._flusher = flusher
        self._done = done
        self._waiter: asyncio.Future[None] | None = None
        self._counted = self._matcher.tokens
        self._ended = scanner.end is not None
        self.on_tokens = on_tokens
        self.blocked = self.over = False
        self.error: UpstreamError | None = None
        self.failure: Exception | None = None
        self.out = b""

    def start(self, first: bytes) -> None:
        """Write `first`, then take what comes."""
        if first:
            self._send(first)
        if not self._ended:
            self._reply.attach(self)
        elif not self.blocked:
            self.over = True

    # -- from the read callback

    def chunk(self, data: bytes) -> None:
        """Bytes of the worker have come."""
        out = self._matcher.match(data)
        if out is None:
            out = self._scanner.feed(data)
            self._ended = self._scanner.end is not None
        tokens = self._matcher.tokens - self._counted
        if tokens:
            self._counted += tokens
            self.on_tokens(tokens)
        if out:
            if self.out:
                self.out += out
                if len(self.out) > _MAX_OUT_BYTES:
                    self.flush()  # one turn of the loop may read far more than a client that does not read may have
            else:
                self.out = out
                if not self.blocked:
                    self._flusher.add(self)
        if self._ended:
            self._stir()

    def ended(self, error: UpstreamError | None) -> None:
        """The worker's body is complete (None) or broken."""
        self.error = error
        self._scanner.close()
        self._ended = True
        self._stir()

    # -- at the end of the turn

    def flush(self) -> None:
        """Write what has come since the last write, in one piece."""
        out = self.out
        if out and not self.blocked:
            self.out = b""
            self._send(out)

    def _send(self, out: bytes) -> None:
        try:
            if self._ended and self._scanner.end is self._done:
                self._client.end(out)
            elif self._write(out):
                if not self._ended:
                    return
            else:
                self.out, self.blocked = out, True
                self._reply.pause()
        except Exception as error:
            self.failure = error
        self._stir()

    def _stir(self) -> None:
        """Tell the request's task that the pump is blocked or at its end."""
        if not self.blocked and not self.out:
            self.over = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- from the request's task

    def stirred(self) -> "asyncio.Future[None]":
        """Done when the pump is blocked or at its end."""
        self._waiter = self._reply.loop.create_future()
        return self._waiter

    def unblock(self) -> None:
        """The client may take more: write what has waited. That may block again."""
        self.blocked = False
        self.flush()

    def go_on(self) -> None:
        """Read on, unless all has come."""
        if self._ended:
            self.over = True
        else:
            self._reply.resume()

    def stop(self) -> bool:
        """Write what still waits for this turn's flush; whether something was counted that the client will not get.

        A cancelled relay may have read events after it was cancelled: they count as generated, so they must go out.
        """
        if self.blocked or self.failure is not None:
            out, self.out = self.out, b""
            return bool(out)
        self.flush()
        return self.blocked


class EventMatcher:
    """Takes apart the events that a template fits, and counts their tokens.

    Attributes: `tokens`, generated so far. `ids`, those tokens. `printed`, how many tokens have had their text seen.
    `last_text`, what the last event with a text had, and `text_before`, the one before it, as JSON without quotes.
    `between_events`, whether the next byte begins an event of a stream that runs: else nothing fits. All are the
    scanner's to change.
    """

    __slots__ = (
        "_add_id",
        "_drops_empty",
        "_end_out",
        "_head",
        "_head_out",
        "_mid",
        "_tail",
        "_want_ids",
        "between_events",
        "ids",
        "last_text",
        "printed",
        "text_before",
        "tokens",
    )

    def __init__(self, want_ids: bool, drops_empty: bool = False) -> None:
        """Nothing fits yet. `want_ids`: events keep their token ids; `drops_empty`: without text they leave as none."""
        self.tokens = 0
        self.ids = array("I")
        self._add_id = self.ids.append
        self.printed = 0
        self.last_text = self.text_before = b""
        self.between_events = True
        self._want_ids = want_ids
        self._drops_empty = drops_empty
        self.forget()

    def learn(self, head: bytes, mid: bytes, tail: bytes, head_out: bytes, end_out: bytes) -> None:
        """Events are now `head`, text, `mid`, ids, `tail`; `mid` begins with a quote and `tail` with a bracket.

        They leave as `head_out`, text, `end_out`, or with everything from the text on as it came if ids are wanted.
        """
        self._head, self._mid, self._tail = head, mid, tail
        self._head_out, self._end_out = head_out, end_out

    def forget(self) -> None:
        """Nothing fits any more."""
        self.learn(b"", b"\n", b"]", b"", b"")  # at the quote that ends a text there is no line end

    def match(self, raw: bytes) -> bytes | None:
        """What `raw` leaves as, if it is nothing but events that fit; else None, and nothing has changed."""
        if not raw or not self.between_events:
            return None
        tokens, printed, kept = self.tokens, self.printed, len(self.ids)
        last_text, text_before = self.last_text, self.text_before
        out: list[bytes] = []
        at, end = 0, len(raw)
        while at < end:
            at = self._take(raw, at, out)
            if at < 0:
                self.tokens, self.printed = tokens, printed
                self.last_text, self.text_before = last_text, text_before
                del self.ids[kept:]
                return None
        return b"".join(out)

    def _take(self, raw: bytes, at: int, out: list[bytes]) -> int:
        """Take the event at `at`; returns where it ends, or -1: it does not fit, and some ids may have been taken."""
        data, end = raw, len(raw)
        text_at = stop = at + len(self._head)
        limit = min(end, stop + _SHORT_TEXT)
        while stop < limit and data[stop] != 34:  # a quote
            stop += 1
        if stop >= limit:
            stop = raw.find(b'"', stop)
        if stop < 0 or not raw.startswith(self._head, at) or not raw.startswith(self._mid, stop):
            return -1
        text = data[text_at:stop]
        if b"\n" in text:
            return -1
        at = stop + len(self._mid)
        if not raw.startswith(self._tail, at):
            at = self._take_ids(raw, at)
            if at < 0 or not raw.startswith(self._tail, at):
                return -1
        at += len(self._tail)
        if text:
            self.printed = self.tokens
            self.text_before, self.last_text = self.last_text, text
        elif self._drops_empty:
            return at
        out.append(self._head_out)
        if self._want_ids:
            out.append(data[text_at:at])
        else:
            out.append(text)
            out.append(self._end_out)
        return at

    def _take_ids(self, raw: bytes, at: int) -> int:
        """Take the ids at `at`, one or more, by commas; returns where they end, or -1: they are none."""
        data, end = raw, len(raw)
        while True:
            first, value = at, 0
            while at < end and 48 <= data[at] <= 57 and at - first <= _ID_DIGITS:  # 0-9
                value = value * 10 + data[at] - 48
                at += 1
            if at == first or at - first > _ID_DIGITS or value > _MAX_ID:
                return -1
            self._add_id(value)
            self.tokens += 1
            if at == end or data[at] != 44:  # a comma
                return at
            at += 1


class Flusher:
    """Flushes all pumps of one event loop once per turn, after all that was readable has been read."""

    __slots__ = ("__weakref__", "_call_soon", "_due")

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """By the loop's `call_soon`."""
        self._call_soon = call_soon
        self._due: list[Pump] = []

    def add(self, pump: Pump) -> None:
        """Have `pump` flushed at the end of this turn."""
        if not self._due:
            self._call_soon(self.flush)
        self._due.append(pump)

    def flush(self) -> None:
        """Flush whoever is due."""
        due, self._due = self._due, []
        for pump in due:
            pump.flush()


class PartWriter:
    """Writes parts of a body to a client's socket, as far as they may simply be written.

    Attributes: `open`, whether they may: the head is made, the body has no length of its own, the client is there and
    reads. `chunked`, whether parts are framed as chunks. `head`, what waits for the first part. All are the response's
    to set.
    """

    __slots__ = ("_send", "_write_other", "chunked", "head", "open")

    def __init__(self, send: Callable[[bytes], None], write_other: Callable[[bytes], bool]) -> None:
        """`send` writes to the socket; `write_other` does what `write` does where a part may not simply be written."""
        self._send = send
        self._write_other = write_other
        self.open = False
        self.chunked = True
        self.head = b""

    def write(self, body: bytes) -> bool:
        """Write a part of a body, not empty; returns whether it was taken, else nothing has happened."""
        if not self.open:
            return self._write_other(body)
        if self.chunked:
            size = len(body)
            line = _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size
            body = b"".join((line, body, b"\r\n"))
        if self.head:
            body, self.head = self.head + body, b""
        self._send(body)
        return True


def count_pairs(text: bytes, class_of: bytes, classes: int, before: int, counts: Any) -> None:
    """Count the pairs of neighbouring bytes in `text` by their classes, into `counts[first * classes + second]`.

    `class_of` holds the class of each byte, below `classes`; `before` is that of what stands before the text. `counts`
    is an array of 64-bit integers, shape (classes ** 2,).
    """
    data, kinds, end = text, class_of, len(text)
    i = 0
    while i < end:
        after = kinds[data[i]]
        counts[before * classes + after] += 1
        before = after
        i += 1


def weigh_pairs(
    text: bytes, class_of: bytes, classes: int, before: int, weights: Any, size: int
) -> tuple[float, float]:
    """The same pairs, each by its weight instead of 1, and by a second one: the two sums.

    `weights` is an array of doubles, shape (2 * size,), where `size` is classes ** 2.
    """
    data, kinds, end = text, class_of, len(text)
    first = second = 0.0
    i = 0
    while i < end:
        after = kinds[data[i]]
        pair = before * classes + after
        first += weights[pair]
        second += weights[size + pair]
        before = after
        i += 1
    return first, second


def grown_counts(now: Any, known: Any, end: int) -> list[int]:
    """Where an array of 64-bit integers differs from the other one below `end`: position and value, and again.

    `known` takes the new values over. `now` may change meanwhile: each value is read once. The first place is left out.
    """
    found: list[int] = []
    i = 1
    while i < end:
        value = now[i]
        if value != known[i]:
            known[i] = value
            found.append(i)
            found.append(value)
        i += 1
    return found

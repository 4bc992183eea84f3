r"""The hot path in Python: what `compiled.pyx` must agree with.

For matching and chunks a property test compares the two on any input; for the rest CI runs the proxy's tests on each.

**Events by template.** Nearly all events of a stream differ from the one before in two places only, the text and the
token ids. An ordinary event leaves a template behind: `head`, then a text, then `mid`, then ids, then `tail`. A later
event is taken apart by it without parsing, and only if the match is exact: `head` at its start, `tail` at its end, no
quote and no newline between `head` and `mid`, nothing but digits and commas between `mid` and `tail`.

Why an exact match proves the meaning. Inside a JSON string every quote is escaped, so a text without any quote is all
inside the string that `head` opened and that `mid` (which begins with a quote) closes. (A text ending in a backslash
would escape that quote; then the next bytes of `mid`, a comma or brace and a bare key, could not follow, and the event
was no JSON to begin with.) So the event is the template's event with another text and other ids: every key that was
judged ordinary then is byte for byte the same now.

**Chunks.** A read of a stream is nearly always one whole chunk, or several; such a read needs no HTTP parser.

**The way of an event**: `ChunkReader.data_received`, `EventPump.chunk`, `EventMatcher.match`; then, at the end of the
loop's turn, `Flusher.flush`, `EventPump.flush`, `PartWriter.write`. The classes are bases: whatever is not the plain
case is the business of those who inherit (`upstream.py`, `relay.py`, `sse.py`, `client_transport.py`).
"""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any, Final

_SIZE_DIGITS: Final = 7  # of a chunk, at most: its size fits 32 bits
_ID_DIGITS: Final = 10  # of a token id, at most
_MAX_ID: Final = 2**32 - 1  # ids are kept in 32 bits
_HEX: Final = b"0123456789abcdefABCDEF"


def unchunked(data: bytes) -> bytes | None:
    """The body in `data` if that is nothing but whole chunks, none of them the last; else None."""
    parts = []
    at = 0
    while at < len(data):
        size, end, _ = data[at : at + _SIZE_DIGITS + 2].partition(b"\r\n")
        if not end or not size or size.strip(_HEX):
            return None
        start = at + len(size) + 2
        stop = start + int(size, 16)
        if stop == start or not data.startswith(b"\r\n", stop):
            return None
        parts.append(data[start:stop])
        at = stop + 2
    return b"".join(parts) if parts else None


class EventMatcher:
    """Takes apart the events that a template fits, and counts their tokens.

    Attributes: `tokens`, generated so far. `ids`, those tokens. `printed`, how many tokens have had their text seen.
    `end`, why nothing more can come, and `parts`, of an event that has not ended: while there is either, nothing fits.
    `want_ids`, whether events keep their token ids. All are the owner's to change.
    """

    __slots__ = (
        "_end_out",
        "_head",
        "_head_out",
        "_mid",
        "_n_head",
        "_n_mid",
        "_n_tail",
        "_tail",
        "end",
        "ids",
        "parts",
        "printed",
        "tokens",
        "want_ids",
    )

    def __init__(self, want_ids: bool) -> None:
        """Nothing fits yet."""
        self.tokens = 0
        self.ids = array("I")
        self.printed = 0
        self.end: object = None
        self.parts: list[bytes] = []
        self.want_ids = want_ids
        self.forget()

    def learn(self, head: bytes, mid: bytes, tail: bytes, head_out: bytes, end_out: bytes) -> None:
        """Events are now `head`, text, `mid`, ids, `tail`; `mid` begins with a quote and `tail` with a bracket.

        They leave as `head_out`, text, `end_out`, or with everything from the text on as it came if ids are wanted.
        """
        self._head, self._mid, self._tail = head, mid, tail
        self._n_head, self._n_mid, self._n_tail = len(head), len(mid), len(tail)
        self._head_out, self._end_out = head_out, end_out

    def forget(self) -> None:
        """Nothing fits any more."""
        self.learn(b"", b"\n", b"]", b"", b"")  # at the quote that ends a text there is no line end

    def match(self, raw: bytes) -> bytes | None:
        """What `raw` leaves as, if it is nothing but events that fit; else None, and nothing has changed."""
        if not raw or self.end is not None or self.parts:
            return None
        out: list[bytes] = []
        ids = array("I")
        printed = self.printed
        at = 0
        while at < len(raw):
            text_at = at + self._n_head
            stop = raw.find(b'"', text_at)
            ids_at = stop + self._n_mid
            ids_end = raw.find(self._tail, ids_at)
            text = raw[text_at:stop]
            if not raw.startswith(self._head, at) or stop < 0 or not raw.startswith(self._mid, stop) or b"\n" in text:
                return None
            if ids_end < 0 or not _take_ids(raw[ids_at:ids_end], ids):
                return None
            at = ids_end + self._n_tail
            out += (self._head_out, raw[text_at:at]) if self.want_ids else (self._head_out, text, self._end_out)
            if text:
                printed = self.tokens + len(ids)
        self.ids.extend(ids)
        self.tokens += len(ids)
        self.printed = printed
        return b"".join(out)


def _take_ids(listed: bytes, ids: "array[int]") -> bool:
    """Append the ids of a list to `ids`; False if it is no such list, and then some may have been appended."""
    if not listed:
        return True
    for one in listed.split(b","):
        if not one.isdigit() or len(one) > _ID_DIGITS or int(one) > _MAX_ID:
            return False
        ids.append(int(one))
    return True


class ChunkReader:
    """A connection to a worker, as far as it takes chunks past the parser to who reads the reply.

    Attributes: `reply`, the one under way, whose `sink` gets the body, or else its `keep`. `between_chunks`, whether
    the next byte begins a chunk of it.
    """

    __slots__ = ("between_chunks", "reply")

    def __init__(self) -> None:
        """Nothing is under way."""
        self.reply: Any = None
        self.between_chunks = False

    def data_received(self, data: bytes) -> None:
        """Bytes of the worker."""
        reply = self.reply
        if reply is not None and self.between_chunks:
            body = unchunked(data)
            if body is not None:
                sink = reply.sink
                if sink is not None:
                    sink.chunk(body)
                else:
                    reply.keep(body)
                return
        self.parse(data)

    def parse(self, data: bytes) -> None:
        """Take bytes that are not whole chunks in the middle of a body."""
        raise NotImplementedError


class EventPump:
    """Takes a stream's bytes through `scanner` and keeps what the client gets for them until it is flushed.

    Attributes: `on_tokens`, told how many tokens have come. `write_part`, which writes a part of the body now or says
    that it can't, or None. `blocked`, what holds writing up, if anything. `out`, what the client has not been sent yet.
    """

    __slots__ = ("_counted", "_flusher", "blocked", "on_tokens", "out", "scanner", "write_part")

    def __init__(
        self,
        scanner: EventMatcher,
        on_tokens: Callable[[int], None],
        flusher: "Flusher",
        write_part: Callable[[bytes], bool] | None,
    ) -> None:
        """Tokens counted before now are not told."""
        self.scanner = scanner
        self.on_tokens = on_tokens
        self._flusher = flusher
        self.write_part = write_part
        self._counted = scanner.tokens
        self.blocked: Any = None
        self.out = b""

    def chunk(self, data: bytes) -> None:
        """Bytes of the worker have come."""
        out = self.scanner.match(data)
        if out is None:
            self.feed(data)
        else:
            self.take(out)

    def take(self, out: bytes) -> None:
        """Tell what `scanner` has counted, and have `out` written at the end of the turn."""
        tokens = self.scanner.tokens - self._counted
        if tokens:
            self._counted += tokens
            self.on_tokens(tokens)
        if not out:
            return
        if self.out:
            self.out += out
        else:
            self.out = out
            if self.blocked is None:
                self._flusher.add(self)

    def flush(self) -> None:
        """Write what has come since the last write, in one piece."""
        out = self.out
        if not out or self.blocked is not None:
            return
        if self.scanner.end is None and self.write_part is not None:
            self.out = b""
            if self.write_part(out):
                return
            self.out = out
        self.send()

    def feed(self, data: bytes) -> None:
        """Take bytes that are not just events that fit."""
        raise NotImplementedError

    def send(self) -> None:
        """Send `out`, which is the last of the stream or can't be written at once."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """Nothing more can be written, because of `error`."""
        raise NotImplementedError


class Flusher:
    """Writes for all pumps of one event loop once per turn, after all that was readable has been read.

    Measured with 64 streams of 50 events/s on two quiet cores: writing from within the read callback costs a tenth
    more CPU per event, because each write wakes its client while the neighbours wait to be read.
    """

    __slots__ = ("__weakref__", "_due", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Of `loop`."""
        self._loop = loop
        self._due: list[EventPump] = []

    def add(self, pump: EventPump) -> None:
        """Have `pump` flushed at the end of this turn."""
        if not self._due:
            self._loop.call_soon(self.flush)
        self._due.append(pump)

    def flush(self) -> None:
        """Flush whoever is due; one that fails keeps none of the others waiting."""
        due, self._due = self._due, []
        for pump in due:
            try:
                pump.flush()
            except Exception as error:
                pump.failed(error)


class PartWriter:
    """A client's connection, as far as it takes parts of a body.

    Attributes: `cycle` and `flow`, uvicorn's of the request and of the connection; `transport`, whose `head` is what of
    the response has not been written yet, and whose `send` writes past it.
    """

    __slots__ = ("cycle", "flow", "transport")

    def __init__(self, cycle: Any) -> None:
        """Of the request of `cycle`."""
        self.cycle, self.flow, self.transport = cycle, cycle.flow, cycle.transport

    def write(self, body: bytes) -> bool:
        """Write a part of a body without a length now, as ASGI's `send` would; after the head, not the last, not empty.

        Returns whether it was written; if not, nothing has happened and `send` is to be used.
        """
        if self.flow.write_paused or self.cycle.disconnected:
            return False
        part = b"%x\r\n%b\r\n" % (len(body), body)
        if self.transport.head:
            self.transport.write(part)
        else:
            self.transport.send(part)
        return True

"""The text format of event streams: splits bytes into events, and reads an event's data.

An event ends at a blank line. Lines may end with LF, CRLF or CR; returned events have LF only.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

MAX_EVENT_BYTES: Final = 32 * 1024 * 1024  # the ids of a prompt of 4 million tokens
MAX_RELAXED_BYTES: Final = 2**16  # of JSON that only Python reads, which takes it ten times as long
_SMALL_BYTES: Final = 1024  # a part below this size is joined with the next: one of two bytes takes fifty
_BLANK_LINES: Final = re.compile(rb"\n*")
_LINE_STARTS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")


class EventSplitter:
    """Cuts the bytes of one stream into events.

    Attributes: `partial`: bytes of an event that has not ended are kept. `oversized`: such an event is above the limit;
    its bytes are dropped, and so should the stream be.
    """

    __slots__ = ("_after_cr", "_edge", "_max_event_bytes", "_parts", "_parts_bytes", "oversized")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self.oversized = False
        self._parts: list[bytes] = []  # of an event that has not ended
        self._parts_bytes = 0
        self._edge = b""  # the last byte of `_parts`: a blank line may begin with it
        self._after_cr = False  # the last byte was a CR; an LF that follows belongs to the same line end

    @property
    def partial(self) -> bool:
        """Whether bytes of an event that has not ended are kept."""
        return bool(self._parts)

    def drop(self) -> None:
        """Forget the event that has not ended."""
        self._parts.clear()

    def events(self, data: bytes) -> Iterator[bytes]:
        """The events that `data` completes, each with its blank line; the rest of `data` is kept.

        O(len(data)) over the whole stream, however it is split.
        """
        if self._after_cr or b"\r" in data:
            data = self._with_line_feeds(data)
        if self._parts:
            whole = self._join(data)
            if whole is None:
                return
            data = whole
        start = 0
        while True:
            if data.startswith(b"\n", start):  # blank lines between events: a worker may send any number of them
                start = _after_blank_lines(data, start)
            found = data.find(b"\n\n", start)
            if found < 0:
                break
            stop = found + 2
            yield data[start:stop]
            start = stop
        if start < len(data):
            rest = data[start:]
            self._keep(rest, rest)

    def _join(self, data: bytes) -> bytes | None:
        """All bytes since the last blank line if `data` completes an event; else None, and they are kept."""
        seam = self._edge + data
        if b"\n\n" in seam:
            whole = b"".join((*self._parts, data))
            self._parts.clear()
            self._parts_bytes = 0
            return whole
        self._keep(data, seam)
        return None

    def _keep(self, data: bytes, seam: bytes) -> None:
        """Keep a part of an event; `seam` ends with it, and is not empty."""
        if self._parts and len(self._parts[-1]) < _SMALL_BYTES:
            self._parts[-1] += data
        else:
            self._parts.append(data)
        self._parts_bytes += len(data)
        self._edge = seam[-1:]
        if self._parts_bytes > self._max_event_bytes:
            self.oversized = True
            self._parts.clear()

    def _with_line_feeds(self, data: bytes) -> bytes:
        """`data` with LF for each line end; strings escape CR, so it can only be part of one."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]  # that line end has been taken
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def payloads_of(events: bytes) -> Iterator[bytes]:
    """The data of each event in `events`, which are whole, as `EventScanner.feed` returns them."""
    for block in events.split(b"\n\n"):
        payload = block[6:] if block.startswith(b"data: ") and b"\n" not in block else payload_of(block)
        if payload is not None:
            yield payload


def payload_of(raw: bytes) -> bytes | None:
    """The data of an event, its lines joined by LF; None if it has none (it is a comment or a blank line)."""
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2:
        return raw[6:-2]
    data = [line[5:].removeprefix(b" ") for line in raw.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(data) if data else None


def relaxed(payload: bytes) -> tuple[Any, bytes]:
    """The value of what only Python takes for JSON, and that as JSON; (None, b""): it is not even that, or too large.

    NaN and infinities are null, half of a surrogate pair is `?`.
    """
    if len(payload) > MAX_RELAXED_BYTES:
        return None, b""
    try:
        value = json.loads(payload.decode(), strict=False, parse_constant=lambda _: None)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
        return orjson.loads(text), text
    except (ValueError, RecursionError):
        return None, b""


def known_lines(raw: bytes) -> bytes:
    """An event without the lines that no client could read: what is not UTF-8 or no field of an event stream."""
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


def _after_blank_lines(data: bytes, at: int) -> int:
    found = _BLANK_LINES.match(data, at)
    assert found is not None, "the pattern fits no blank line as well"
    return found.end()

"""Reads a request's body: bounds it, and finds its end.

A body of known length is a number of bytes. A chunked one (RFC 9112 section 7.1) is read strictly: sizes of at most
`MAX_SIZE_DIGITS` hexadecimal digits, extensions and trailers bounded and dropped. A trailer never becomes a header: no
worker and no route sees it.
"""

import re
from collections.abc import Callable
from typing import Final

from balanceroute.errors import InvalidRequest

MAX_SIZE_DIGITS: Final = 15
MAX_LINE_BYTES: Final = 512  # bytes of a chunk's size with its extensions
MAX_EXTENSION_BYTES: Final = 16 * 1024  # bytes of extensions of all chunks of a body
MAX_TRAILER_BYTES: Final = 8 * 1024
SMALL_BYTES: Final = 1024  # a part below this size is joined with the next: one of two bytes takes fifty
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,%d})([ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n" % MAX_SIZE_DIGITS)
_TRAILER: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n")
_CRLF: Final = b"\r\n"
_HEX: Final = b"0123456789abcdefABCDEF"


class Body:
    """A body under way.

    Attributes: `size`, bytes so far, `complete`.
    """

    __slots__ = ("complete", "size")

    def __init__(self) -> None:
        self.size = 0
        self.complete = False

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; returns the rest. Raises: InvalidRequest: it is malformed, or too large."""
        raise NotImplementedError

    def whole(self) -> bytes:
        """All of it, once it is complete."""
        raise NotImplementedError


class SizedBody(Body):
    """A body of known length."""

    __slots__ = ("_left", "_parts")

    def __init__(self, length: int, limit: int) -> None:
        """Raises: InvalidRequest: the length is above the limit."""
        super().__init__()
        if length > limit:
            raise too_large(limit)
        self._left = length
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Take up to the bytes that are missing."""
        part, parts = data[: self._left], self._parts
        if parts and len(parts[-1]) < SMALL_BYTES:
            parts[-1] += part
        else:
            parts.append(part)
        self.size += len(part)
        self._left -= len(part)
        self.complete = not self._left
        return data[len(part) :]

    def whole(self) -> bytes:
        """All of it."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)


_Step = Callable[["ChunkedBody", bytes, int], int]


class ChunkedBody(Body):
    """A chunked body; `_step` is what comes next."""

    __slots__ = ("_chunk_left", "_extension_bytes", "_joined", "_limit", "_raw", "_step", "_trailer_bytes")

    def __init__(self, limit: int) -> None:
        """At most `limit` bytes."""
        super().__init__()
        self._limit = limit
        self._raw = b""  # the incomplete line
        self._chunk_left = self._extension_bytes = self._trailer_bytes = 0
        self._joined = bytearray()  # joined at once: a million chunks of a byte are not a million objects
        self._step: _Step = ChunkedBody._size_line  # not bound: it would keep a large body until a search for garbage

    def feed(self, data: bytes) -> bytes:
        """Take whole lines and parts of chunks."""
        raw, self._raw = self._raw + data if self._raw else data, b""
        at = 0
        while not self.complete:
            taken = self._step(self, raw, at)
            if taken < 0:  # not without more bytes
                self._raw = raw[at:]
                return b""
            at = taken
        return raw[at:]

    def whole(self) -> bytes:
        """All of it."""
        return bytes(self._joined)

    def _keep(self, part: bytes) -> None:
        self.size += len(part)
        if self.size > self._limit:
            raise too_large(self._limit)
        self._joined += part

    def _size_line(self, raw: bytes, at: int) -> int:
        end = raw.find(_CRLF, at, at + MAX_LINE_BYTES)
        if end < 0:
            if len(raw) - at >= MAX_LINE_BYTES or raw[at : at + 1].strip(_HEX) or raw.find(b"\n", at) >= 0:
                raise _malformed()
            return -1
        line = _SIZE.fullmatch(raw, at, end + 2)
        if line is None:
            raise _malformed()
        self._extension_bytes += len(line[2] or b"")
        if self._extension_bytes > MAX_EXTENSION_BYTES:
            raise InvalidRequest("The chunks' extensions are too large.")
        self._chunk_left = int(line[1], 16)
        if self.size + self._chunk_left > self._limit:
            raise too_large(self._limit)
        self._step = ChunkedBody._data if self._chunk_left else ChunkedBody._trailer
        return end + 2

    def _data(self, raw: bytes, at: int) -> int:
        part = raw[at : at + self._chunk_left]
        if not part:
            return -1
        self._chunk_left -= len(part)
        self._keep(part)
        if not self._chunk_left:
            self._step = ChunkedBody._data_end
        return at + len(part)

    def _data_end(self, raw: bytes, at: int) -> int:
        if not _CRLF.startswith(raw[at : at + 2]):
            raise _malformed()
        if len(raw) - at < 2:
            return -1
        self._step = ChunkedBody._size_line
        return at + 2

    def _trailer(self, raw: bytes, at: int) -> int:
        end = raw.find(_CRLF, at)
        line_bytes = (len(raw) if end < 0 else end + 2) - at
        if self._trailer_bytes + line_bytes > MAX_TRAILER_BYTES:
            raise InvalidRequest(f"The trailers are larger than {MAX_TRAILER_BYTES} bytes.", status=431)
        if end < 0:
            return -1
        self._trailer_bytes += line_bytes
        if end == at:
            self.complete = True
        elif not _TRAILER.fullmatch(raw, at, end + 2):
            raise _malformed()
        return end + 2


def too_large(limit: int) -> InvalidRequest:
    """The refusal of a body above the limit."""
    return InvalidRequest(f"The body is larger than {limit} bytes.", status=413)


def _malformed() -> InvalidRequest:
    return InvalidRequest("The chunked body is malformed.")

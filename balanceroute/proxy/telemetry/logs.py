"""The format and the output of log records: one JSON object per line, or plain text on a terminal.

Lines below WARNING are written in batches (`LineHandler`), and the line at the end of each request bypasses `logging`
(`log_request`), which took a tenth of the CPU of a short request.

A write that blocks would stop every stream, so a slow reader (a pipe, a terminal) is waited for only briefly. Lines
that it does not take are dropped; their number is logged once it reads again.
"""

import asyncio
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from select import PIPE_BUF, POLLOUT, poll
from typing import Final, Protocol, TextIO

import orjson

from balanceroute.proxy.telemetry.long_lines import bounded

FLUSH_S: Final = 0.1
MAX_WAITING: Final = 1000  # lines
PATIENCE_S: Final = 0.5  # longest wait for a reader that has stopped
SHARE: Final = 0.01  # share of the time spent waiting for a slow reader
_root: Final = logging.getLogger()
_requests: Final = logging.getLogger("balanceroute.requests")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields that the caller passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class LineFormat(Protocol):
    """Makes lines of records, and of a request's fields without a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""

    def request(self, at: float, fields: dict[str, object]) -> str:
        """The line of a request that ended `at` (Unix seconds), at level info."""


class _Reader:
    """The output of a stream: a file takes lines at once; a pipe or terminal is waited for.

    One wait takes `PATIENCE_S` at most; for a slow reader all waits together take `SHARE` of the time at most.

    The stream is opened again for writes that never block: other processes write to the same pipe and may fill it
    first, and a long line may exceed its room. Other holders of the stream keep their own mode.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._room = stream, poll()
        self._patience_s, self._asked_s = PATIENCE_S, time.monotonic()
        self._file: int | None = None
        self.may_stand_still = False
        self._torn = False  # the last line was taken only in part
        with suppress(OSError, ValueError):  # a stream in memory has no descriptor
            given = stream.fileno()
            self.may_stand_still = not stat.S_ISREG(os.fstat(given).st_mode)
            self._file = _opened_again(given) if self.may_stand_still else os.dup(given)
            self._room.register(self._file, POLLOUT)

    def takes(self, text: str) -> bool:
        """Write a piece; returns whether all of it was taken. Raises: ValueError: the stream was closed."""
        if self._file is None:
            self._stream.write(text)
            self._stream.flush()
            return True
        whole = (b"\n" if self._torn else b"") + text.encode(self._stream.encoding, "backslashreplace")
        left = whole
        with suppress(OSError):  # another process filled the pipe, the disk is full, or the reader has gone
            while left and self._has_room():
                left = left[os.write(self._file, left[:PIPE_BUF]) :]
        if len(left) < len(whole):
            self._torn = bool(left)
        return not left

    def close(self) -> None:
        """Close the descriptor that was opened again."""
        if self._file is not None:
            self._room.unregister(self._file)
            os.close(self._file)
            self._file = None

    def _has_room(self) -> bool:
        """Wait within the time left for room for a piece; also True if the reader has gone, so the write will fail."""
        if not self.may_stand_still:
            return True
        now = time.monotonic()
        self._patience_s = min(PATIENCE_S, self._patience_s + SHARE * (now - self._asked_s))
        has_room = bool(self._room.poll(int(1000 * self._patience_s)))
        self._asked_s = time.monotonic()
        self._patience_s = max(0.0, self._patience_s - (self._asked_s - now)) if has_room else 0.0
        return has_room


def _opened_again(file: int) -> int:
    """A new descriptor of the same pipe or terminal whose writes do not block."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # a socket (if it has room, then for a whole piece), or another user's
        return os.dup(file)


class LineHandler(logging.Handler):
    """Writes lines to a stream: from WARNING up at once, others within `FLUSH_S` while an event loop runs."""

    def __init__(self, stream: TextIO, lines: LineFormat, *, shared: bool = False) -> None:
        """`shared`: other processes write to the stream, too."""
        super().__init__()
        self._reader = _Reader(stream)
        self._in_pieces = shared or self._reader.may_stand_still
        self._stream, self._format, self._waiting = stream, lines, list[str]()
        self._lost = 0  # lines

    def emit(self, record: logging.LogRecord) -> None:
        """Take in a record."""
        try:
            self._put(self._format.format(record), urgent=record.levelno >= logging.WARNING)
        except Exception:
            self.handleError(record)

    def request(self, fields: dict[str, object]) -> None:
        """Take in the line of a request."""
        self._put(self._format.request(time.time(), fields), urgent=False)

    def _put(self, line: str, *, urgent: bool) -> None:
        with self.lock:  # type: ignore[union-attr]  # made by the base class; records come from other threads too
            self._waiting.append(line)
            if len(self._waiting) == 1 and not urgent:
                try:
                    asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
                except RuntimeError:
                    urgent = True
            if urgent or len(self._waiting) >= MAX_WAITING:
                self.flush()

    def flush(self) -> None:
        """Write the waiting lines."""
        with self.lock:  # type: ignore[union-attr]
            lines, self._waiting = self._waiting, []
            with suppress(ValueError):  # the log can't be written; requests are served all the same
                if self._in_pieces:
                    for bunch in _bunches(lines):
                        self._write(bunch)
                elif lines:
                    self._write(lines)

    def close(self) -> None:
        """Write the waiting lines, and close the own descriptor."""
        with self.lock:  # type: ignore[union-attr]
            self.flush()
            self._reader.close()
        super().close()

    def _write(self, lines: list[str]) -> None:
        """Write lines; drop and count those that the reader does not take."""
        if self._lost and self._reader.takes(f"{self._line_of_loss()}\n"):
            self._lost = 0
        if self._lost or not self._reader.takes("\n".join([*lines, ""])):
            self._lost += len(lines)

    def _line_of_loss(self) -> str:
        record = logging.makeLogRecord({"msg": "log lines lost", "lines": self._lost})
        record.name, record.levelno, record.levelname = __name__, logging.WARNING, "WARNING"
        return self._format.format(record)


def _most_bytes(process: str) -> int:
    """The longest line, without its end: `PIPE_BUF` if several processes write to a pipe, else unbounded."""
    return PIPE_BUF - 1 if process else sys.maxsize


def _bunches(lines: list[str]) -> Iterator[list[str]]:
    """Group lines into pieces that a pipe takes whole, so that lines of several processes do not mix."""
    bunch, size = list[str](), 0
    for line in lines:
        more = len(line.encode(errors="backslashreplace")) + 1
        if bunch and size + more > PIPE_BUF:
            yield bunch
            bunch, size = [], 0
        bunch.append(line)
        size += more
    if bunch:
        yield bunch


def log_request(fields: dict[str, object]) -> None:
    """Log that a request has ended."""
    handlers = _root.handlers
    if len(handlers) == 1 and isinstance(handlers[0], LineHandler):
        handlers[0].request(fields)
    else:  # logging was set up by other code
        _requests.info("request", extra=fields)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, event, then the fields."""

    def __init__(self, process: str) -> None:
        """`process`: the name of this process in the lines; "": there is only one."""
        super().__init__()
        self._own = {"process": process} if process else {}
        self._most_bytes = _most_bytes(process)
        self._second, self._date_and_time = -1, ""  # lines come in bursts: their seconds are formatted once

    def _time(self, at: float) -> str:
        second = int(at)
        if second != self._second:
            self._second = second
            self._date_and_time = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._date_and_time}.{int(1000 * (at - second)):03d}+00:00"

    def request(self, at: float, fields: dict[str, object]) -> str:
        """The line of a request, as JSON."""
        line = {"time": self._time(at), "level": "info", "logger": _requests.name, "event": "request"}
        return self._line({**line, **self._own, **fields})

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        entry: dict[str, object] = {
            "time": self._time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **self._own,
            **fields_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return self._line(entry)

    def _line(self, entry: dict[str, object]) -> str:
        line = _as_bytes(entry)
        return line.decode() if len(line) <= self._most_bytes else bounded(entry, _as_json, self._most_bytes)


def _as_bytes(entry: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(entry, default=str)
    except TypeError:  # lone surrogates, as in a file's name
        return json.dumps(entry, default=str).encode()


def _as_json(entry: Mapping[str, object]) -> str:
    return _as_bytes(entry).decode()


class PlainFormatter(logging.Formatter):
    """Time, level, event, then name=value."""

    def __init__(self, process: str) -> None:
        """`process`: as for JSON."""
        super().__init__()
        self._own = f"[{process}] " if process else ""
        self._most_bytes = _most_bytes(process)

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        entry = {"event": record.getMessage(), **fields_of(record)}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return self._line(record.created, record.levelname, entry)

    def request(self, at: float, fields: dict[str, object]) -> str:
        """The line of a request, as text."""
        return self._line(at, "INFO", {"event": "request", **fields})

    def _line(self, at: float, level: str, entry: dict[str, object]) -> str:
        when = datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-3]
        return bounded(entry, partial(_as_text, f"{when} {level:<7} {self._own}"), self._most_bytes)


def _as_text(begin: str, entry: Mapping[str, object]) -> str:
    """The record's line, then its traceback, if there is one."""
    fields = dict(entry)
    event, exception = fields.pop("event"), fields.pop("exception", "")
    text = " ".join(f"{name}={_one_line(value)}" for name, value in fields.items())
    beneath = "".join(f"\n{_one_line(line)}" for line in str(exception).split("\n")) if exception else ""
    return f"{begin}{_one_line(event)} {text}".rstrip() + beneath


def _one_line(value: object) -> str:
    """Text without line ends and terminal controls: clients and workers choose some of it."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _UncleanEnds(logging.Filter):
    """Drops uvicorn's complaint about responses that the router leaves incomplete on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in str(record.msg)


class _DroppedWrites(logging.Filter):
    """Drops event loops' warnings about writes to a client that has left: the writer hears of it a moment later."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg not in ("SSL connection is closed", "socket.send() raised exception.")


class _FailedStarts(logging.Filter):
    """Replaces uvicorn's traceback by one line when a start ends with a `BalanceRouteError`."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        last = text.rstrip().rpartition("\n")[2]
        if text.startswith("Traceback ") and last.startswith("balanceroute.errors."):
            record.msg = last.partition(": ")[2]
        return True


_unclean_ends: Final = _UncleanEnds()  # one instance of each, so that a second `configure` adds none
_dropped_writes: Final = _DroppedWrites()
_failed_starts: Final = _FailedStarts()


def configure(level: str, style: str, stream: TextIO | None = None, process: str = "") -> None:
    """Set up the root logger.

    Args: style: json, plain, or auto (plain on a terminal). process: this process's name in the lines, if several write
    to one stream.
    """
    out = stream or sys.stderr
    plain = style == "plain" or (style == "auto" and out.isatty())
    for handler in _root.handlers:
        if isinstance(handler, LineHandler):
            handler.close()
        else:
            handler.flush()
    lines = PlainFormatter(process) if plain else JsonFormatter(process)
    _root.handlers[:] = [LineHandler(out, lines, shared=bool(process))]
    _root.setLevel(level.upper())
    # Neither format shows the source line of a record; to find it takes longer than to write the line
    # ("Optimization" in the logging HOWTO of the Python documentation).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.getLogger("uvicorn.error").addFilter(_unclean_ends)
    logging.getLogger("uvicorn.error").addFilter(_failed_starts)
    for chatty in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("asyncio").addFilter(_dropped_writes)

"""How the router's log records look: one JSON object per line for machines, plain text on a terminal.

Lines below a warning leave in bunches (`LineHandler`), and the line that every request ends with takes a short way
(`log_request`): by `logging` alone it was a tenth of the CPU of a short request.

Nobody waits long for who reads the log through a pipe or on a terminal, however slowly: a write that blocks would stop
every stream. Lines that are not taken are lost, and counted in one that comes once lines are taken again.
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
PATIENCE_S: Final = 0.5  # for a reader that stands still
SHARE: Final = 0.01  # of the time, for one that is slow
_root: Final = logging.getLogger()
_requests: Final = logging.getLogger("balanceroute.requests")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class LineFormat(Protocol):
    """Makes lines of records, and of a request's fields without a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        ...

    def request(self, at: float, fields: dict[str, object]) -> str:
        """The line of a request that ended `at` (Unix seconds), at level info."""
        ...


class _Reader:
    """Who takes the lines of a stream: a file at once, others as they can. Nobody waits for them longer than
    `PATIENCE_S`, and then for no more than `SHARE` of the time.

    A pipe that was about to be full may be so before we write, as other processes write, too, and a long line is more
    than it has room for. So writes block nobody, but for other holders of the stream they are as they were: it is
    opened once more.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._room = stream, poll()
        self._patience_s, self._asked_s = PATIENCE_S, time.monotonic()
        self._file: int | None = None
        self.may_stand_still = False
        self._torn = False  # a line of which the reader has not taken all
        with suppress(OSError, ValueError):  # one in memory
            given = stream.fileno()
            self.may_stand_still = not stat.S_ISREG(os.fstat(given).st_mode)
            self._file = _opened_again(given) if self.may_stand_still else os.dup(given)
            self._room.register(self._file, POLLOUT)

    def takes(self, text: str) -> bool:
        """Write it; returns whether all of it was taken. Raises: ValueError: the stream was closed."""
        if self._file is None:
            self._stream.write(text)
            self._stream.flush()
            return True
        whole = (b"\n" if self._torn else b"") + text.encode(self._stream.encoding, "backslashreplace")
        left = whole
        with suppress(OSError):  # another process was faster, the disk is full, or nobody reads any more
            while left and self._has_room():
                left = left[os.write(self._file, left[:PIPE_BUF]) :]
        if len(left) < len(whole):
            self._torn = bool(left)
        return not left

    def close(self) -> None:
        """Let go of what was opened once more."""
        if self._file is not None:
            self._room.unregister(self._file)
            os.close(self._file)
            self._file = None

    def _has_room(self) -> bool:
        """Whether a piece can be written, soon at the latest; or fails, as nobody reads any more."""
        if not self.may_stand_still:
            return True
        now = time.monotonic()
        self._patience_s = min(PATIENCE_S, self._patience_s + SHARE * (now - self._asked_s))
        has_room = bool(self._room.poll(int(1000 * self._patience_s)))
        self._asked_s = time.monotonic()
        self._patience_s = max(0.0, self._patience_s - (self._asked_s - now)) if has_room else 0.0
        return has_room


def _opened_again(file: int) -> int:
    """A descriptor of the same pipe or terminal, whose writes block nobody."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # a socket, which has room for more than a piece where it has any, or another user's
        return os.dup(file)


class LineHandler(logging.Handler):
    """Lines to a stream: warnings at once, what is below them within `FLUSH_S` while an event loop runs."""

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
        """Write what waits."""
        with self.lock:  # type: ignore[union-attr]
            lines, self._waiting = self._waiting, []
            with suppress(ValueError):  # nobody takes the log any more; requests are served all the same
                for bunch in _bunches(lines) if self._in_pieces else [lines] if lines else []:
                    self._write(bunch)

    def close(self) -> None:
        """Write what waits, and let go of the stream."""
        with self.lock:  # type: ignore[union-attr]
            self.flush()
            self._reader.close()
        super().close()

    def _write(self, lines: list[str]) -> None:
        """Write them, unless that would wait for a reader that stands still, or fails."""
        if self._lost and self._reader.takes(f"{self._line_of_loss()}\n"):
            self._lost = 0
        if self._lost or not self._reader.takes("\n".join([*lines, ""])):
            self._lost += len(lines)

    def _line_of_loss(self) -> str:
        record = logging.makeLogRecord({"msg": "log lines lost", "lines": self._lost})
        record.name, record.levelno, record.levelname = __name__, logging.WARNING, "WARNING"
        return self._format.format(record)


def _most_bytes(process: str) -> int:
    """Of a line without its end: what a pipe takes in one piece where several processes write, else anything."""
    return PIPE_BUF - 1 if process else sys.maxsize


def _bunches(lines: list[str]) -> Iterator[list[str]]:
    """As many lines each as a pipe takes in one piece, so that those of several processes do not mix."""
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
    else:  # somebody else's set-up
        _requests.info("request", extra=fields)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, event, then the fields."""

    def __init__(self, process: str = "") -> None:
        """`process`: which of several writes; "" for the only one."""
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
        told = {"time": self._time(at), "level": "info", "logger": _requests.name, "event": "request"}
        return self._line({**told, **self._own, **fields})

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
    except TypeError:  # text that is no Unicode, as of a file's name
        return json.dumps(entry, default=str).encode()


def _as_json(entry: Mapping[str, object]) -> str:
    return _as_bytes(entry).decode()


class PlainFormatter(logging.Formatter):
    """Time, level, event, then name=value."""

    def __init__(self, process: str = "") -> None:
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
    """Its line, and beneath it the traceback, if there is one."""
    fields = dict(entry)
    event, exception = fields.pop("event"), fields.pop("exception", "")
    told = " ".join(f"{name}={_one_line(value)}" for name, value in fields.items())
    beneath = "".join(f"\n{_one_line(line)}" for line in str(exception).split("\n")) if exception else ""
    return f"{begin}{_one_line(event)} {told}".rstrip() + beneath


def _one_line(value: object) -> str:
    """As text that neither ends the line nor says anything to a terminal: clients and workers choose some of it."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _UncleanEnds(logging.Filter):
    """Drops uvicorn's complaint about responses that the router leaves incomplete on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in str(record.msg)


class _DroppedWrites(logging.Filter):
    """Drops what event loops say of each write to a client that has left: who writes is told so a moment later."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg not in ("SSL connection is closed", "socket.send() raised exception.")


class _FailedStarts(logging.Filter):
    """Leaves one line of uvicorn's traceback where an error that is ours, and says what is wrong, ends a start."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        last = text.rstrip().rpartition("\n")[2]
        if text.startswith("Traceback ") and last.startswith("balanceroute.errors."):
            record.msg = last.partition(": ")[2]
        return True


_unclean_ends: Final = _UncleanEnds()  # one of each, so that a reload doesn't add another
_dropped_writes: Final = _DroppedWrites()
_failed_starts: Final = _FailedStarts()


def configure(level: str, style: str, stream: TextIO | None = None, process: str = "") -> None:
    """Set up the root logger.

    Args: style: json, plain, or auto (plain on a terminal). process: whose lines these are, where several processes
    write to one stream.
    """
    out = stream or sys.stderr
    plain = style == "plain" or (style == "auto" and out.isatty())
    for handler in _root.handlers:
        handler.close() if isinstance(handler, LineHandler) else handler.flush()
    lines = PlainFormatter(process) if plain else JsonFormatter(process)
    _root.handlers[:] = [LineHandler(out, lines, shared=bool(process))]
    _root.setLevel(level.upper())
    # Neither format shows where a record was made; finding out takes longer than writing the line
    # ("Optimization" in the logging HOWTO of the Python documentation).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.getLogger("uvicorn.error").addFilter(_unclean_ends)
    logging.getLogger("uvicorn.error").addFilter(_failed_starts)
    for chatty in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("asyncio").addFilter(_dropped_writes)

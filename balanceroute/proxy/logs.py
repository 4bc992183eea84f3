"""How the router's log records look: one JSON object per line for machines, plain text on a terminal."""

import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

import orjson

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, event, then the fields."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._date_and_time = -1, ""  # lines come in bursts: their seconds are formatted once

    def _time(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._date_and_time = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._date_and_time}.{int(record.msecs):03d}+00:00"

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        entry = {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str).decode()


class PlainFormatter(logging.Formatter):
    """Time, level, event, then name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={value}" for name, value in fields_of(record).items())
        text = f"{at} {record.levelname:<7} {record.getMessage()} {fields}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _UncleanEnds(logging.Filter):
    """Drops uvicorn's complaint about responses that the router leaves incomplete on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in str(record.msg)


def configure(level: str, style: str, stream: TextIO | None = None) -> None:
    """Set up the root logger. `style`: json, plain, or auto (plain on a terminal)."""
    out = stream or sys.stderr
    plain = style == "plain" or (style == "auto" and out.isatty())
    handler = logging.StreamHandler(out)
    handler.setFormatter(PlainFormatter() if plain else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Neither format shows where a record was made; finding out takes longer than writing the line
    # ("Optimization" in the logging HOWTO of the Python documentation).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.getLogger("uvicorn.error").addFilter(_UncleanEnds())
    for chatty in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)

"""The lines of a journal, which the writer writes and the reader compares byte for byte."""

from typing import Any

import orjson

from balanceroute.errors import InvariantError
from balanceroute.plugins import described

FORMAT = 1


def call_line(now: float, call: str, args: dict[str, Any], outcome: dict[str, Any]) -> bytes:
    """One call as it stands in the file; `outcome` is {"answer": ...} or {"raised": ...}."""
    return orjson.dumps({"t": float(now), "call": call, "args": args, **outcome}, option=orjson.OPT_APPEND_NEWLINE)


def error_text(error: BaseException) -> str:
    """The error of a call: an InvariantError, or any error of a user's own policy."""
    return str(error) if isinstance(error, InvariantError) else described(error)

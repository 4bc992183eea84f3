"""A row, and fields of JSON objects, shared by the readers of foreign files."""

import json
from datetime import UTC, datetime
from typing import Any

# line number, seconds, prompt tokens, output tokens, key, names of the prompt's blocks
Row = tuple[int, float, int, int, str, tuple[int, ...]]


def stamp_s(stamp: str, name: str) -> float:
    """Seconds since the epoch of an ISO stamp with up to nine decimals; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(stamp.strip())
    except ValueError:
        raise ValueError(f"{name} {stamp!r:.60} is not a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, or ValueError that says what the text is instead."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, at character {error.pos + 1}") from None
    except ValueError:  # the limit on digits that int() has
        raise ValueError("a number of too many digits") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {json.dumps(row):.60}")
    return row


def field_of(row: dict[str, Any], name: str) -> str:
    """A field's value as text: a string as it is, all else as JSON."""
    value = row[name]
    return value if isinstance(value, str) else json.dumps(value)

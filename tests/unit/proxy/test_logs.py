"""Log records as lines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from balanceroute.proxy.logs import configure


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def lines(style: str) -> list[str]:
    out = io.StringIO()
    configure("info", style, out)
    logging.getLogger("a.b").info("request", extra={"worker": "d0", "tokens": 3})
    logging.getLogger("a.b").debug("not shown")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("a.b").exception("broken")
    return out.getvalue().splitlines()


def test_json_lines_hold_event_and_fields() -> None:
    first, second = map(json.loads, lines("json"))
    assert (first["event"], first["level"], first["worker"], first["tokens"]) == ("request", "info", "d0", 3)
    assert "ValueError: why" in second["exception"]


def test_plain_lines_read_as_text_and_auto_is_json_where_nobody_looks() -> None:
    assert lines("plain")[0].endswith("request worker=d0 tokens=3")
    assert lines("auto")[0].startswith("{")

"""Bounds the length of a log line by cutting long fields, so that a pipe takes the line in one piece."""

from collections.abc import Callable, Mapping
from typing import Final

import orjson

CUT: Final = "cut"  # this field of a line says which others were cut: their names and full lengths, in characters
LEAST: Final = 200  # characters that each field keeps while another has more
_CLIENTS: Final = ("path", "method", "instances", "policy", "request")  # clients choose these, so they are cut first
_KEEPS_END: Final = "exception"  # of a traceback the end is kept: its last line names the error
_WHOLE: Final = frozenset(("time", "level", "logger", "process"))

Render = Callable[[Mapping[str, object]], str]


def bounded(fields: Mapping[str, object], render: Render, most_bytes: int) -> str:
    """Render fields as one line of at most `most_bytes`; if some are cut, the field `cut` says which."""
    line = render(fields)
    if _size(line) <= most_bytes:
        return line
    cut: dict[str, int] = {}
    shortened = {**fields, CUT: cut}
    texts = {name: _text(value) for name, value in fields.items() if isinstance(value, str | list | tuple | dict)}
    for least in (LEAST, 0):
        for name in _in_order(texts):
            if len(texts[name]) > least:
                cut[name] = len(texts[name])
                line = _cut(shortened, name, texts[name], least, render, most_bytes)
                if _size(line) <= most_bytes:
                    return line
    return line


def _cut(line: dict[str, object], name: str, text: str, least: int, render: Render, most_bytes: int) -> str:
    """The line with one field cut to what fits, but to no fewer than `least` characters."""
    low, high = least, min(len(text), most_bytes)  # a search: a character may take several bytes
    while low < high:
        middle = (low + high + 1) // 2
        line[name] = _part(name, text, middle)
        if _size(render(line)) <= most_bytes:
            low = middle
        else:
            high = middle - 1
    line[name] = _part(name, text, low)
    return render(line)


def _in_order(texts: Mapping[str, str]) -> list[str]:
    """The fields in the order in which they are cut: those that clients choose, then the longest."""
    clients = [name for name in _CLIENTS if name in texts]
    others = [name for name in texts if name not in _WHOLE and name not in _CLIENTS]
    return [*clients, *sorted(others, key=lambda name: -len(texts[name]))]


def _part(name: str, text: str, length: int) -> str:
    return text[len(text) - length :] if name == _KEEPS_END else text[:length]


def _text(value: object) -> str:
    return (
        value if isinstance(value, str) else orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    )


def _size(line: str) -> int:
    """The length in bytes, as standard error writes it."""
    return len(line.encode(errors="backslashreplace"))

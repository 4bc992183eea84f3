"""Bounds the number of values in a client's JSON: the cost to read it depends on that, not on its bytes.

A value of two bytes becomes an object of 56 that is walked several times: 32 MiB of `[],` took a gigabyte and stopped
the event loop, with everybody's stream, for seconds. So the values are counted before the body is read, which takes no
longer than to copy it. Counted are strings (with keys), arrays and objects; and commas, which bound the numbers. Text
is not bounded: a prompt may be as large as a body.
"""

from typing import Final

from balanceroute.errors import InvalidRequest

MAX_NODES: Final = 2**18  # strings, arrays and objects; enough for 65,000 messages, read in about 0.1 s
MAX_COMMAS: Final = 5_000_000  # as many token ids as 32 MiB hold


def check_size(body: bytes) -> None:
    """Count the values of a body. Raises: InvalidRequest: too many."""
    if len(body) <= MAX_NODES or (_nodes(body) <= MAX_NODES and body.count(b",") <= MAX_COMMAS):
        return  # true of nearly every body, even if all of these were values
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # every remaining quote begins or ends a string
    if plain.count(b'"') // 2 > MAX_NODES:
        raise _too_much("strings, arrays and objects", MAX_NODES)
    outside = b'""'.join(plain.split(b'"')[::2])
    if _nodes(outside) > MAX_NODES:
        raise _too_much("strings, arrays and objects", MAX_NODES)
    if outside.count(b",") > MAX_COMMAS:
        raise _too_much("values", MAX_COMMAS)


def _nodes(body: bytes) -> int:
    return body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")


def _too_much(what: str, limit: int) -> InvalidRequest:
    return InvalidRequest(f"The body holds more than {limit} {what}.")

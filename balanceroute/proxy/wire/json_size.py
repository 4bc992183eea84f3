"""How much a client's JSON may hold: what reading it costs depends on that, not on its bytes.

A value of two bytes becomes an object of 56 that is walked several times: 32 MiB of `[],` took a gigabyte and stopped
the event loop, with everybody's stream, for seconds. So a body is counted before it is read, which takes as long as
copying it at most. What is counted are strings, keys included, with arrays and objects; and commas, which bound the
numbers. Text is free: a prompt may be as large as a body.
"""

from typing import Final

from balanceroute.errors import InvalidRequest

MAX_NODES: Final = 2**18  # strings, arrays and objects: 65,000 messages; reading them takes about 0.1 s
MAX_COMMAS: Final = 5_000_000  # as many token ids as 32 MiB hold


def check_size(body: bytes) -> None:
    """Raises: InvalidRequest: the body, if it is JSON, holds more than may be read."""
    if len(body) <= MAX_NODES or (_nodes(body) <= MAX_NODES and body.count(b",") <= MAX_COMMAS):
        return  # as nearly always, whatever of that is text
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote that is left begins or ends a string
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

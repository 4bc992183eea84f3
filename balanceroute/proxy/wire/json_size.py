"""Bounds the values in clients' JSON and in workers' events: the cost to read them depends on these, not on bytes.

A value of two bytes becomes an object of 56 that is walked several times: 32 MiB of `[],` took a gigabyte and stopped
the event loop, with everybody's stream, for seconds. So the values are counted before it is read, which takes no
longer than to copy it. Counted are strings (with keys), arrays and objects; and commas, which bound the numbers. Text
is not bounded: a prompt may be as large as a body.
"""

from typing import Final

from balanceroute.errors import InvalidRequest

MAX_FIELDS: Final = 256  # of a body; engines know about a hundred
MAX_NODES: Final = 2**18  # strings, arrays and objects; enough for 65,000 messages, read in about 0.1 s
MAX_COMMAS: Final = 2**21  # of a body, beside a prompt of plain token ids; 5 million floats took a second


def check_size(body: bytes) -> None:
    """Count the values of a body. Raises: InvalidRequest: too many."""
    if excess := excess_of(body, MAX_NODES, MAX_COMMAS):
        raise InvalidRequest(f"The body holds {excess}.")


def excess_of(json: bytes, max_nodes: int, max_commas: int) -> str:
    """What there is too much of: more than `max_nodes` strings, arrays and objects, or `max_commas`; empty: nothing."""
    if len(json) <= max_nodes or (count_nodes(json) <= max_nodes and json.count(b",") <= max_commas):
        return ""  # true of nearly all, even if all of these were values
    plain = json.replace(rb"\\", b"").replace(rb"\"", b"")  # every remaining quote begins or ends a string
    nodes = f"more than {max_nodes} strings, arrays and objects"
    if plain.count(b'"') // 2 > max_nodes:
        return nodes
    outside = b'""'.join(plain.split(b'"')[::2])
    if count_nodes(outside) > max_nodes:
        return nodes
    return f"more than {max_commas} values" if outside.count(b",") > max_commas else ""


def count_nodes(json: bytes) -> int:
    """Strings, arrays and objects, if no string contains a quote, [ or {."""
    return json.count(b'"') // 2 + json.count(b"[") + json.count(b"{")

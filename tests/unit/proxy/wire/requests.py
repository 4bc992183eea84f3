"""Requests to make bodies of."""

import tracemalloc
from typing import Any

import orjson

from balanceroute.proxy.wire.client_request import ClientRequest, Endpoint, parse

KV = b'{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"big":12345678901234567890,"f":1e-7}'


def a_request(endpoint: Endpoint = "completions", **fields: Any) -> ClientRequest:
    prompt = {"prompt": "hello"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return parse(endpoint, orjson.dumps({"model": "m"} | prompt | fields))


def load(body: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = orjson.loads(body)
    return loaded


def parsed_and_measured(endpoint: Endpoint, body: bytes) -> tuple[ClientRequest, int]:
    """The request, and the bytes of memory that it takes beside its body: the least of three, as a thread that another
    test has left may allocate meanwhile.
    """
    measured = []
    for _ in range(3):
        tracemalloc.start()
        try:
            request = parse(endpoint, body)
            measured.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    return request, min(measured)

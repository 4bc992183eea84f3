"""Requests to make bodies of."""

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

"""A body is refused at once where its JSON could not be written again."""

import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.client_request import Endpoint, parse
from balanceroute.proxy.wire.json_body import MAX_DEPTH
from balanceroute.proxy.wire.json_size import MAX_NODES
from balanceroute.proxy.wire.payloads import probe_body

NESTED = ["[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300]


@pytest.mark.parametrize("nested", NESTED, ids=["lists", "objects"])
@pytest.mark.parametrize("field", ["prompt", "messages", "tools", "metadata"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_body_nested_deeper_than_can_be_serialised_is_refused(endpoint: Endpoint, field: str, nested: str) -> None:
    fields = {"prompt": '"a"', "messages": '[{"role": "user", "content": "a"}]', field: nested}
    with pytest.raises(InvalidRequest):
        parse(endpoint, ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode())


def test_a_body_of_the_accepted_depth_reaches_the_workers() -> None:
    depth = MAX_DEPTH - 1
    request = parse("completions", b'{"prompt": "a", "metadata": %b%b}' % (b"[" * depth, b"]" * depth))
    assert b"[" * depth in probe_body(request)


@pytest.mark.parametrize("depth", [255, 300, 1000, 5000, 100_000])
@pytest.mark.parametrize("field", ["x", "messages"])
def test_a_body_nested_too_deeply_is_a_bad_request(field: str, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    body = b'{"prompt": "a", "x": %b}' % nested
    if field == "messages":
        body = b'{"messages": [{"role": "user", "content": %b}]}' % nested
    with pytest.raises(InvalidRequest):
        parse("chat" if field == "messages" else "completions", body)


@pytest.mark.parametrize("depth", [130, 300, 505])
def test_parts_nested_in_the_text_of_parts_are_a_bad_request(depth: int) -> None:
    """Counting their text took more of Python's stack than there is."""
    nested = b'[{"text":' * depth + b'"a"' + b"}]" * depth
    with pytest.raises(InvalidRequest):
        parse("chat", b'{"messages": [{"role": "user", "content": %b}]}' % nested)


def test_many_brackets_side_by_side_are_no_depth() -> None:
    messages = b",".join([b'{"role": "user", "content": [{"type": "text", "text": "a"}]}'] * 500)
    assert parse("chat", b'{"messages": [%b]}' % messages).prompt_tokens > 500


@pytest.mark.parametrize("value", [b"[],", b'"",', b"{},"])
def test_a_body_with_more_values_than_are_read_at_once_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="The body holds more than"):
        parse("completions", b'{"prompt": "a", "metadata": [%b1]}' % (value * (MAX_NODES + 1)))

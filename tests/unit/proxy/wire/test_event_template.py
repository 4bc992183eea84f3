"""Where the parts of an event are that others are taken apart by, and which events are no template."""

import pytest

from balanceroute.proxy.wire.event_template import template_of

EVENT = b'data: {"id":"c","choices":[{"index":0,"text":"Hi","finish_reason":null,"token_ids":[5]}]}\n\n'
REASONING = b'data: {"choices":[{"delta":{"reasoning":"Hm"},"token_ids":[5]}]}\n\n'


@pytest.mark.parametrize(("raw", "name", "text"), [(EVENT, "text", b"Hi"), (REASONING, "reasoning", b"Hm")])
def test_an_event_is_its_template_with_a_text_and_ids(raw: bytes, name: str, text: bytes) -> None:
    template = template_of(raw, name)
    assert template is not None
    assert template.head + text + template.mid + b"5" + template.tail == raw
    assert template.mid.startswith(b'"') and template.tail.startswith(b"]")


def test_a_client_that_wants_no_ids_gets_null_for_them() -> None:
    template = template_of(EVENT, "text")
    assert template is not None
    before, after = template.frame(EVENT) or (b"", b"")
    assert before + b"Hi" + after == EVENT.replace(b"[5]", b"null")


def test_relayed_bytes_with_a_repeated_text_key_have_no_frame() -> None:
    template = template_of(EVENT, "text")
    assert template is not None
    assert template.frame(EVENT + EVENT) is None


@pytest.mark.parametrize(
    "raw",
    [
        EVENT.replace(b'"token_ids":[5]', b'"token_ids":null'),
        EVENT.replace(b'"id"', b'"prompt_token_ids":[1],"id"'),
        EVENT.replace(b"data: ", b"id: 1\ndata: "),
        EVENT.replace(b'"Hi"', b'"\\""'),
        EVENT.replace(b'"index":0', b'"text":"y"'),
        EVENT.replace(b'"text":"Hi"', b'"text":["Hi"]'),
    ],
    ids=["no ids", "ids of the prompt", "two lines", "an escaped quote", "two texts", "no text"],
)
def test_an_ambiguous_event_is_not_used_as_a_template(raw: bytes) -> None:
    assert template_of(raw, "text") is None

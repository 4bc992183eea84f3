"""What choices make of a body together."""

import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.client.fanout import MAX_COPIED_BYTES, parts_of
from balanceroute.proxy.wire.client_request import parse

LARGE = b"x" * (MAX_COPIED_BYTES // 128)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "%b", "n": 128}' % LARGE,
        b'{"prompt": "a", "n": 128, "user": "%b"}' % LARGE,
        b'{"prompt": [%b"a"], "user": "%b"}' % (b'"a", ' * 127, LARGE),
    ],
    ids=["prompt", "rest", "rest-of-prompts"],
)
def test_choices_multiply_a_large_body_only_up_to_a_bound(body: bytes) -> None:
    """One of 8 MiB with n = 128 took 2 GiB."""
    with pytest.raises(InvalidRequest, match="together make"):
        parts_of(parse("completions", body), 128, len(body))


def test_a_large_batch_of_prompts_is_not_multiplied_and_is_accepted() -> None:
    body = b'{"prompt": [%b"a"]}' % ((b'"%b", ' % LARGE[:100_000]) * 127)
    assert len(parts_of(parse("completions", body), 128, len(body))) == 128

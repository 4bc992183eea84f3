"""Prompts and messages: how large they are, and what stays of them."""

from typing import Any

import orjson
import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.wire.derived_requests import split
from balanceroute.proxy.wire.payloads import decode_body
from balanceroute.proxy.wire.prompts import MAX_PROMPTS
from tests.unit.proxy.wire.requests import KV, a_request, load


@pytest.mark.parametrize(
    ("prompt", "tokens", "prompts"),
    [([1, 2, 3], 3, 1), ("x" * 40, 10, 1), (["ab", "cd" * 8], 4, 2), ([[1], [2, 3]], 3, 2), ("a", 1, 1)],
    ids=["ids", "text", "texts", "id-lists", "at-least-one"],
)
def test_prompt_tokens_are_exact_for_ids_and_estimated_for_text(prompt: Any, tokens: int, prompts: int) -> None:
    request = a_request(prompt=prompt)
    assert (request.prompt_tokens, request.prompts) == (tokens, prompts)


@pytest.mark.parametrize(("prompt", "read"), [([1.0, 2], [1, 2]), ([[3.0], [4]], [[3], [4]])], ids=["one", "batch"])
def test_token_ids_are_read_as_the_engines_read_them(prompt: Any, read: list[Any]) -> None:
    """Numbers that come out of tables are written `1.0`."""
    assert orjson.loads(a_request(prompt=prompt).prompt_json) == read
    for wrong in ([1.5], [1.0, None], [[1.0], [0.5]], [1.0, {}], [1e300], [2.0**64]):
        with pytest.raises(InvalidRequest, match="token ids"):
            a_request(prompt=wrong)


def test_more_prompts_than_may_have_answers_are_refused_before_they_are_looked_at() -> None:
    """A quarter of a million lists of one number stopped everybody's stream for half a second."""
    with pytest.raises(InvalidRequest, match=f"At most {MAX_PROMPTS} prompts") as refused:
        a_request(prompt=[*[[1]] * MAX_PROMPTS, ["no id"]])
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "kept"), [(["ab"], "ab"), ([[1, 2]], [1, 2]), ([[1.0]], [1]), ([""], [""])], ids=repr
)
def test_a_list_of_one_prompt_is_that_prompt_unless_it_is_empty(prompt: Any, kept: Any) -> None:
    """An engine takes an empty text in a list only."""
    request = a_request(prompt=prompt)
    assert (orjson.loads(request.prompt_json), request.prompts) == (kept, 1)


def test_images_do_not_count_as_text() -> None:
    content = [{"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": {"url": "A" * 100_000}}]
    assert a_request("chat", messages=[{"role": "user", "content": content}]).prompt_tokens == 14


def test_equal_prompts_have_equal_keys_whatever_their_whitespace_and_other_fields() -> None:
    one = parse("completions", b'{"prompt": [1, 2,3], "max_tokens": 3}')
    two = parse("completions", b'{"seed":1,"prompt":[1,2,3]}')
    assert one.prompt_json == two.prompt_json


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": ""}], ids=["none", "null", "empty"])
def test_embeddings_replace_a_prompt(prompt: dict[str, Any]) -> None:
    request = parse("completions", orjson.dumps({**prompt, "prompt_embeds": "A" * 8192, "n": 2}))
    assert request.prompt_tokens == 2
    for part in split(request):
        sent = load(decode_body(part, KV))
        assert sent["prompt_embeds"] == "A" * 8192 and "prompt" not in sent

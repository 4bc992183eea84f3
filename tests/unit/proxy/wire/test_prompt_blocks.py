"""Which prompts are told to begin alike, and which not."""

import random
from typing import Any

import orjson
import pytest

from balanceroute.proxy.wire.client_request import ClientRequest, parse
from balanceroute.proxy.wire.prompt_blocks import BLOCK_BYTES, MAX_BLOCKS, PromptBlocks

BLOCKS = PromptBlocks(seed=7)


def words(seed: int, size: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=size))


def a_chat(messages: list[dict[str, Any]], **more: Any) -> ClientRequest:
    return parse("chat", orjson.dumps({"model": "m", "messages": messages, **more}))


def turns(count: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": words(turn, 1500)} for turn in range(count)]


def hashes(request: ClientRequest) -> list[int]:
    return BLOCKS.of(request, request.prompt_tokens)[0]


def test_the_next_turn_begins_with_every_block_of_the_last() -> None:
    before, after = hashes(a_chat(turns(3))), hashes(a_chat(turns(5)))
    assert before == after[: len(before)]
    assert len(after) > len(before) == 3 * 1500 // BLOCK_BYTES


def test_prompts_that_differ_share_the_blocks_before_the_difference_and_none_after() -> None:
    changed = turns(5)
    changed[2]["content"] = "!" + changed[2]["content"]
    one, other = hashes(a_chat(turns(5))), hashes(a_chat(changed))
    same = 2 * 1500 // BLOCK_BYTES
    assert one[:same] == other[:same]
    assert not set(one[same + 1 :]) & set(other)


@pytest.mark.parametrize(
    "more",
    [
        {"model": "a-lora"},
        {"cache_salt": "mine"},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"documents": [{"text": "d"}]},
        {"reasoning_effort": "high"},
        {"truncate_prompt_tokens": 50},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_field_that_changes_the_whole_prompts_tokens_changes_every_block(more: dict[str, Any]) -> None:
    plain = hashes(a_chat(turns(3)))
    changed = hashes(parse("chat", orjson.dumps({"model": "m", "messages": turns(3), **more})))
    assert len(plain) == 4 and not set(plain) & set(changed)


def test_a_field_that_only_affects_the_answer_changes_no_block() -> None:
    assert hashes(a_chat(turns(3))) == hashes(
        a_chat(turns(3), temperature=0.1, max_tokens=5, stream=True, user="u", seed=3, priority=1)
    )


def test_token_ids_have_blocks_like_text() -> None:
    ids = [random.Random(3).randrange(50_000) for _ in range(2000)]
    one = parse("completions", orjson.dumps({"prompt": ids}))
    longer = parse("completions", orjson.dumps({"prompt": [*ids, 1, 2, 3] * 2}))
    blocks, block_tokens = BLOCKS.of(one, one.prompt_tokens)
    assert blocks == hashes(longer)[: len(blocks)]
    assert 0.9 < len(blocks) * block_tokens / 2000 <= 1.0


def test_a_short_prompt_has_no_block() -> None:
    assert BLOCKS.of(a_chat([{"role": "user", "content": "hi"}]), 5) == ([], 0)


def test_a_prompt_with_logprobs_has_no_blocks_because_it_is_computed_completely() -> None:
    assert hashes(parse("completions", orjson.dumps({"prompt": words(1, 5000)})))
    assert not hashes(parse("completions", orjson.dumps({"prompt": words(1, 5000), "prompt_logprobs": 1})))


def test_blocks_of_a_huge_prompt_are_bounded_and_cover_no_more_than_its_tokens() -> None:
    blocks, block_tokens = BLOCKS.of(parse("completions", orjson.dumps({"prompt": "x" * 6_000_000})), 1_500_000)
    assert len(blocks) == MAX_BLOCKS
    assert len(blocks) * block_tokens <= 1_500_000


def test_two_routers_hash_the_same_prompt_differently() -> None:
    request = a_chat(turns(3))
    assert not set(PromptBlocks().of(request, 900)[0]) & set(PromptBlocks().of(request, 900)[0])

"""Prompt sizes before the prefill, against what real tokenizers count (scripts/measure_prompts.py)."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.admission.prompt_estimates import MAX_MODELS, PromptEstimates, has_estimate
from balanceroute.proxy.wire.client_request import ClientRequest, parse
from balanceroute.proxy.wire.prompt_traits import image_size
from tests.unit.proxy.admission.prompts import a_request, jpeg, measured, png

KINDS = ("english", "chinese", "code", "tools")
TOKENIZERS = ("qwen", "cl100k", "deepseek")


def p95_errors(tokenizer: str, *, learned_from: int, seed: int = 3) -> dict[str, float]:
    """Per kind the 95th percentile of the relative error, on prompts that have not been learned from."""
    rows = measured()
    random.Random(seed).shuffle(rows)
    sizes = PromptEstimates()
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number, row in enumerate(rows):
        request, tokens = a_request(row["body"]), row["tokens"][tokenizer]
        if number >= learned_from:
            errors[row["kind"]].append(abs(sizes.estimate(request) - tokens) / tokens)
        if learned_from:
            sizes.learn(request, sizes.estimate(request), tokens)
    return {kind: sorted(each)[math.ceil(0.95 * len(each)) - 1] for kind, each in errors.items()}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("seed", range(5))
def test_after_some_dozen_answers_p95_is_within_a_quarter_for_every_kind_and_tokenizer(
    tokenizer: str, seed: int
) -> None:
    errors = p95_errors(tokenizer, learned_from=48, seed=seed)
    assert all(error <= 0.25 for error in errors.values()), errors


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_untrained_estimates_are_far_off_only_for_chinese(tokenizer: str) -> None:
    errors = p95_errors(tokenizer, learned_from=0)
    assert errors.pop("chinese") <= 0.5
    assert all(error <= 0.25 for error in errors.values()), errors


def test_estimates_are_learned_per_model_and_the_oldest_model_is_forgotten() -> None:
    sizes = PromptEstimates()
    rows = [row for row in measured() if row["kind"] == "chinese"]
    for row in rows[:20] * 3:
        for model, tokenizer in (("a", "cl100k"), ("b", "deepseek")):
            request = a_request(row["body"], model)
            sizes.learn(request, sizes.estimate(request), row["tokens"][tokenizer])
    for row in rows[20:]:
        a, b = (a_request(row["body"], model) for model in "ab")
        assert abs(sizes.estimate(a) / row["tokens"]["cl100k"] - 1) < 0.3
        assert abs(sizes.estimate(b) / row["tokens"]["deepseek"] - 1) < 0.3
    before = sizes.estimate(a)
    for number in range(MAX_MODELS):
        request = a_request({"prompt": "some text"}, f"other-{number}")
        sizes.learn(request, sizes.estimate(request), 2)
    assert sizes.estimate(a) != before


def test_tools_calls_system_prompts_and_documents_count() -> None:
    sizes = PromptEstimates()

    def tokens(body: dict[str, Any]) -> int:
        request = a_request(body)
        return sizes.estimate(request)

    asked = [{"role": "user", "content": "What is the weather in Hangzhou?"}]
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Hangzhou"}'},
    }
    plain = tokens({"messages": asked})
    assert 10 <= plain <= 25
    assert tokens({"messages": asked, "tools": [tool] * 9}) > plain + 9 * 15
    assert tokens({"messages": [*asked, {"role": "assistant", "content": None, "tool_calls": [call]}]}) > plain + 20
    assert tokens({"messages": [{"role": "system", "content": "be brief. " * 50}, *asked]}) > plain + 100
    assert tokens({"messages": asked, "documents": [{"title": "a", "text": "word " * 100}]}) > plain + 80


def test_an_image_counts_by_its_size_not_by_its_bytes_and_its_model_s_share_is_learned() -> None:
    assert image_size(png(640, 480)) == (640, 480) and image_size(jpeg(640, 480)) == (640, 480)
    assert image_size("https://example.com/cat.png") is None and image_size("data:image/png;base64,!!") is None

    def a_question(width: int, height: int) -> ClientRequest:
        parts = [
            {"type": "text", "text": "what is it?"},
            {"type": "image_url", "image_url": {"url": png(width, height)}},
        ]
        return a_request({"messages": [{"role": "user", "content": parts}]})

    sizes = PromptEstimates()
    small, large = a_question(280, 280), a_question(1400, 1400)
    assert 90 < sizes.estimate(small) < 200
    assert 2300 < sizes.estimate(large) < 2800
    for _ in range(30):  # a model with a quarter of the tokens per image
        for side in (280, 560, 840):
            request = a_question(side, side)
            sizes.learn(request, sizes.estimate(request), 30 + (side // 56) ** 2)
    assert abs(sizes.estimate(large) / (30 + 625) - 1) < 0.25


def test_ids_and_embeddings_are_not_estimated() -> None:
    assert not has_estimate(a_request({"prompt": [1, 2, 3]}))
    assert has_estimate(a_request({"prompt": "abc"}))


@pytest.mark.parametrize("text", [b"", b"a", b'""', b"\xff\xfe", b"\\", b"  ", "\U0001f600".encode() * 50])
def test_any_text_has_a_size(text: bytes) -> None:
    request = replace(a_request({"prompt": "x"}), prompt_json=text)
    assert PromptEstimates().estimate(request) >= 1


@pytest.mark.parametrize(
    "fields",
    [
        b'"tools":' + b"[" * 500 + b"]" * 500,
        b'"tools":5,"documents":{"a":1}',
        b'"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":7}},5,{"text":null}]}]',
    ],
    ids=["deep", "no-list", "odd-parts"],
)
def test_every_accepted_body_gets_an_estimate(fields: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}],' + fields + b"}"
    try:
        request = parse("chat", body)
    except InvalidRequest:
        return  # refused before it is estimated
    assert PromptEstimates().estimate(request) >= 1


def test_one_absurd_answer_does_not_spoil_the_estimates() -> None:
    sizes = PromptEstimates()
    rows = measured()
    for row in rows[:100]:
        request = a_request(row["body"])
        sizes.learn(request, sizes.estimate(request), row["tokens"]["qwen"])
    request = a_request(rows[120]["body"])
    before = sizes.estimate(request)
    sizes.learn(request, sizes.estimate(request), 10 * before)
    assert sizes.estimate(request) < 2 * before

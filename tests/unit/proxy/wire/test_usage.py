"""What a usage says beside its counts: whose word it is, and what several say together."""

from typing import Any

import pytest

from balanceroute.proxy.wire.usage import prompt_details_of, put_prompt_details, summed

OF_IMAGES = {"image": 256}


def test_details_are_summed_figure_by_figure() -> None:
    one = {"reasoning_tokens": 3, "audio_tokens": None, "multimodal_tokens": {"image": 2}}
    assert summed([one, None, {}, {"reasoning_tokens": 4, "multimodal_tokens": {"image": 1, "audio": 5}}]) == {
        "reasoning_tokens": 7,
        "multimodal_tokens": {"image": 3, "audio": 5},
    }


@pytest.mark.parametrize(
    ("decoders", "prefillers", "wanted"),
    [
        (None, None, None),
        (None, {"cached_tokens": 4}, {"cached_tokens": 4}),
        ({"cached_tokens": 9}, {"cached_tokens": 4}, {"cached_tokens": 4}),
        ({"cached_tokens": 9}, None, {"cached_tokens": 0}),
        ({"cached_tokens": -1}, None, {"cached_tokens": 0}),
        ({"cached_tokens": -1}, {"cached_tokens": -1}, {"cached_tokens": 0}),
        ({"cached_tokens": -1}, {"cached_tokens": 4}, {"cached_tokens": 4}),
        ({"cached_tokens": 9}, {"multimodal_tokens": OF_IMAGES}, {"cached_tokens": 0, "multimodal_tokens": OF_IMAGES}),
        (
            {"cached_tokens": 9, "multimodal_tokens": OF_IMAGES},
            None,
            {"cached_tokens": 0, "multimodal_tokens": OF_IMAGES},
        ),
        (
            {"cached_tokens": 99, "created_cache_tokens": 1},
            {"cached_tokens": 64, "created_cache_tokens": 32},
            {"cached_tokens": 64, "created_cache_tokens": 32},
        ),
        ({"cached_tokens": 99, "created_cache_tokens": 1}, {"cached_tokens": 64}, {"cached_tokens": 64}),
        (  # a completion of vLLM 0.32, which counts it for chats alone
            {"cached_tokens": 42, "created_cache_tokens": None, "multimodal_tokens": None},
            {"cached_tokens": 32, "created_cache_tokens": None, "multimodal_tokens": None},
            {"cached_tokens": 32, "created_cache_tokens": None, "multimodal_tokens": None},
        ),
    ],
)
def test_prompt_details_of_the_prefiller_override_those_of_the_decode_worker(
    decoders: dict[str, Any] | None, prefillers: dict[str, Any] | None, wanted: dict[str, Any] | None
) -> None:
    usage = {"prompt_tokens": 100} if decoders is None else {"prompt_tokens": 100, "prompt_tokens_details": decoders}
    details = prompt_details_of({"prompt_tokens_details": prefillers})
    assert put_prompt_details(usage, details) is (wanted != decoders)
    assert usage.get("prompt_tokens_details") == wanted


def test_figures_that_a_prefiller_does_not_report_are_left_out() -> None:
    assert prompt_details_of({"prompt_tokens_details": {"cached_tokens": 0, "multimodal_tokens": None}}) == {
        "cached_tokens": 0
    }
    assert prompt_details_of({"prompt_tokens_details": {"cached_tokens": None}}) is None
    assert prompt_details_of({"prompt_tokens_details": {"cached_tokens": -1}}) is None
    assert prompt_details_of({}) is None

"""What a worker may claim, and what no engine can mean."""

from typing import Any

import pytest

from balanceroute.errors import ReplyTooLarge
from balanceroute.proxy.wire.bounds import (
    MAX_COMMAS,
    MAX_RETRY_AFTER_S,
    MAX_TOKENS,
    answers,
    check_size,
    checked_choice,
    checked_usage,
    error_object,
    retry_after_s,
    shown_id,
    token_count,
)


@pytest.mark.parametrize("value", [b"[],", b'"",', b'{"a":1},', b"1,"])
def test_an_answer_with_more_values_than_are_read_at_once_is_too_large(value: bytes) -> None:
    check_size(b'{"more":[' + value * 2**18 + b"1]}", "d0", "decode")
    with pytest.raises(ReplyTooLarge, match="its answer holds more than") as refused:
        check_size(b'{"more":[' + value * (MAX_COMMAS + 2) + b"1]}", "d0", "decode")
    assert (refused.value.worker, refused.value.tier, refused.value.retryable) == ("d0", "decode", False)


@pytest.mark.parametrize("value", [0, 1, MAX_TOKENS])
def test_a_valid_token_count_is_accepted(value: int) -> None:
    assert token_count(value, "n") == value


@pytest.mark.parametrize("value", [-1, MAX_TOKENS + 1, True, 1.5, "7", None, [], {}])
def test_an_invalid_token_count_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(ValueError, match="usage.prompt_tokens"):
        token_count(value, "usage.prompt_tokens")


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1, "other": None}}]
)
def test_every_field_of_a_usage_is_optional(usage: Any) -> None:
    assert checked_usage(usage) == (usage or {})


def test_usage_details_may_have_unknown_fields() -> None:
    of_images = {"cached_tokens": 1, "created_cache_tokens": 2, "multimodal_tokens": {"image": 256}}
    usage = {"prompt_tokens_details": of_images, "completion_tokens_details": {"share": 0.5, "kinds": ["a"]}}
    assert checked_usage(usage) is usage


def test_cached_tokens_that_an_engine_has_not_counted_do_not_make_its_usage_invalid() -> None:
    """vLLM's -1: a router that refused it failed requests whose answer was complete."""
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": -1}}
    assert checked_usage(usage) is usage


@pytest.mark.parametrize(
    "usage",
    [
        [],
        {"completion_tokens": -1},
        {"prompt_tokens_details": 3},
        {"prompt_tokens_details": {"cached_tokens": "x"}},
        {"prompt_tokens_details": {"cached_tokens": -2}},
        {"completion_tokens_details": {"reasoning_tokens": 2**63}},
        {"prompt_tokens_details": {"multimodal_tokens": {"image": 2**63}}},
        {"prompt_tokens_details": {"multimodal_tokens": [[[[[[]]]]]]}},
        # each value would be looked at: a million took a second
        {"prompt_tokens_details": {"multimodal_tokens": [1] * 257}},
        {"prompt_tokens_details": {"multimodal_tokens": [[0]] * 129}},
        {"completion_tokens_details": {f"kind{i}": 1 for i in range(257)}},
        {f"kind{i}": 1 for i in range(257)},
    ],
)
def test_an_impossible_usage_is_refused(usage: Any) -> None:
    with pytest.raises(ValueError):
        checked_usage(usage)


@pytest.mark.parametrize(
    "choice",
    [
        "x",
        {"finish_reason": 3},
        {"finish_reason": "x" * 65},
        {"index": "0"},
        {"index": -1},
        {"index": 2**16},
        {f"field{i}": None for i in range(257)},
        {"delta": {f"field{i}": None for i in range(257)}},
        {"delta": "x"},
        {"text": 3},
        {"token_ids": 3},
        {"logprobs": []},
    ],
)
def test_a_choice_of_another_shape_is_refused(choice: Any) -> None:
    with pytest.raises(ValueError):
        checked_choice(choice)


def test_a_choice_may_have_unknown_fields() -> None:
    choice = {"index": 2**16 - 1, "text": "a", "finish_reason": None, "a_field_of_tomorrow": 1}
    assert checked_choice(choice) is choice


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        (b"", 0.0),
        (b"7", 7.0),
        (b"000007", 7.0),
        (b"Wed, 21 Oct 2026 07:28:00 GMT", 0.0),
        (b"-3", 0.0),
        (b"1.5", 0.0),
    ],
)
def test_retry_after_is_rounded_to_whole_seconds(header: bytes | None, seconds: float) -> None:
    assert retry_after_s(header) == seconds


@pytest.mark.parametrize("header", [b"3601", b"9" * 5000, b"0" * 5000 + b"99999"])
def test_retry_after_is_at_most_an_hour(header: bytes) -> None:
    assert retry_after_s(header) == MAX_RETRY_AFTER_S


def test_an_answer_is_recognised_by_the_end_of_its_id() -> None:
    assert answers("cmpl-r-2", "r-2") and answers("chatcmpl-r-2", "r-2")
    assert not answers("cmpl-r", "r-2") and not answers(None, "r-2") and not answers(7, "r-2")


def test_a_client_sees_one_id_over_all_tries() -> None:
    assert shown_id("cmpl-r-2", "r-2", "r") == "cmpl-r"
    assert shown_id("cmpl-r", "r", "r") == "cmpl-r"
    assert shown_id("engine's own", "r-2", "r") == "engine's own"


EMPTY = [b"{}", b'{"error":null}', b'{"error":{}}', b'{"code":500}', b'{"message":"","detail":[]}']


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]", b"7", b'{"a":' * 2000 + b"1" + b"}" * 2000, *EMPTY])
def test_an_error_that_is_not_an_object_or_is_empty_is_not_passed_on(body: bytes) -> None:
    assert error_object(body) is None


def test_an_error_is_passed_on_in_one_line() -> None:
    assert error_object(b'{"error":\n {"message": "x"}}') == b'{"error":{"message":"x"}}'

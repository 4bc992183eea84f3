"""`TextOffsets`: offsets of a completion's logprobs over several workers."""

from typing import Any

import pytest

from balanceroute.proxy.wire.text_offsets import TextOffsets


def test_text_offsets_of_a_later_worker_continue_after_the_text_of_the_last() -> None:
    offsets, logprobs = TextOffsets(), {"tokens": ["x", "yz"], "text_offset": [0, 1]}
    assert not offsets.take({"text": "abcde", "logprobs": {"tokens": ["ab", "cde"], "text_offset": [0, 2]}})
    offsets.begin_segment()

    assert offsets.take({"text": "xyz", "logprobs": logprobs})
    assert logprobs["text_offset"] == [5, 6]


def test_all_text_offsets_of_a_worker_are_shifted_by_the_same_length() -> None:
    offsets, second = TextOffsets(), {"tokens": ["d"], "text_offset": [1]}
    offsets.take({"text": "ab", "logprobs": {"tokens": ["ab"], "text_offset": [0]}})
    offsets.begin_segment()
    offsets.take({"text": "c", "logprobs": {"tokens": ["c"], "text_offset": [0]}})

    offsets.take({"text": "d", "logprobs": second})

    assert second["text_offset"] == [3]


def test_tokens_that_have_no_text_of_their_own_move_no_text_offset() -> None:
    offsets, later = TextOffsets(), {"tokens": ["token_id:7"], "text_offset": [0]}
    offsets.take({"text": "a", "logprobs": {"tokens": ["token_id:5"], "text_offset": [0]}})
    offsets.take({"text": "", "logprobs": {"tokens": ["<special>"], "text_offset": [1]}})
    offsets.begin_segment()

    offsets.take({"text": "b", "logprobs": later})

    assert later["text_offset"] == [1]


@pytest.mark.parametrize(
    "logprobs",
    [
        {},
        {"tokens": [], "text_offset": []},
        {"tokens": ["a"], "text_offset": ["0"]},
        {"tokens": ["a"], "text_offset": 0},
        {"content": [{"token": "a"}]},
    ],
)
def test_logprobs_of_another_form_are_left_alone(logprobs: dict[str, Any]) -> None:
    offsets = TextOffsets()
    offsets.take({"text": "ab", "logprobs": {"tokens": ["ab"], "text_offset": [0]}})
    offsets.begin_segment()

    assert not offsets.take({"text": "c", "logprobs": logprobs})

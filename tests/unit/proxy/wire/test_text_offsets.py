"""`TextOffsets`: offsets of a completion's logprobs over several workers."""

from typing import Any

import pytest

from balanceroute.proxy.wire.text_offsets import TextOffsets


def test_text_offsets_of_a_later_worker_continue_after_the_tokens_of_the_last() -> None:
    """vLLM 0.32: half of a character is a token without characters, whose text is one."""
    offsets, logprobs = TextOffsets(), {"tokens": ["x", "yz"], "text_offset": [0, 1]}
    assert not offsets.take({"text": "a", "logprobs": {"tokens": ["a"], "text_offset": [0]}})
    assert not offsets.take({"text": "", "logprobs": {"tokens": [""], "text_offset": [1]}})
    assert not offsets.take({"text": "\ufffdcde", "logprobs": {"tokens": ["cde"], "text_offset": [1]}})
    offsets.begin_segment()

    assert offsets.take({"text": "xyz", "logprobs": logprobs})
    assert logprobs["text_offset"] == [4, 5]


def test_text_offsets_of_engines_that_count_the_text_sent_continue_after_that() -> None:
    """vLLM before 0.32."""
    offsets, logprobs = TextOffsets(), {"tokens": ["x", "yz"], "text_offset": [0, 1]}
    offsets.take({"text": "a", "logprobs": {"tokens": ["a"], "text_offset": [0]}})
    offsets.take({"text": "\ufffdcde", "logprobs": {"tokens": ["", "cde"], "text_offset": [1, 1]}})
    offsets.take({"text": "f", "logprobs": {"tokens": ["f"], "text_offset": [5]}})
    offsets.begin_segment()

    offsets.take({"text": "xyz", "logprobs": logprobs})

    assert logprobs["text_offset"] == [6, 7]


def test_all_text_offsets_of_a_worker_are_shifted_by_the_same_length() -> None:
    offsets, second = TextOffsets(), {"tokens": ["d"], "text_offset": [1]}
    offsets.take({"text": "ab", "logprobs": {"tokens": ["ab"], "text_offset": [0]}})
    offsets.begin_segment()
    offsets.take({"text": "c", "logprobs": {"tokens": ["c"], "text_offset": [0]}})

    offsets.take({"text": "d", "logprobs": second})

    assert second["text_offset"] == [3]


def test_tokens_that_have_no_text_of_their_own_move_no_text_offset_of_such_engines() -> None:
    offsets, later = TextOffsets(), {"tokens": ["token_id:7"], "text_offset": [0]}
    offsets.take({"text": "a", "logprobs": {"tokens": ["token_id:5"], "text_offset": [0]}})
    offsets.take({"text": "", "logprobs": {"tokens": ["<special>"], "text_offset": [1]}})
    offsets.take({"text": "b", "logprobs": {"tokens": ["token_id:6"], "text_offset": [1]}})
    offsets.begin_segment()

    offsets.take({"text": "c", "logprobs": later})

    assert later["text_offset"] == [2]


@pytest.mark.parametrize(
    "logprobs",
    [
        {},
        {"tokens": [], "text_offset": []},
        {"tokens": ["a"], "text_offset": ["0"]},
        {"tokens": ["a"], "text_offset": 0},
        {"tokens": [None], "text_offset": [0]},
        {"text_offset": [0]},
        {"content": [{"token": "a"}]},
    ],
)
def test_logprobs_of_another_form_are_left_alone(logprobs: dict[str, Any]) -> None:
    offsets = TextOffsets()
    offsets.take({"text": "ab", "logprobs": {"tokens": ["ab"], "text_offset": [0]}})
    offsets.begin_segment()

    assert not offsets.take({"text": "c", "logprobs": logprobs})

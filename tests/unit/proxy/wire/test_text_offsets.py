"""`TextOffsets`: offsets of a completion's logprobs over several workers."""

from typing import Any

import pytest

from balanceroute.proxy.wire.text_offsets import TextOffsets


def test_text_offsets_of_a_later_worker_continue_those_of_the_last() -> None:
    offsets, logprobs = TextOffsets(), {"tokens": ["x", "yz"], "text_offset": [0, 1]}
    assert not offsets.shift({"tokens": ["ab", "cde"], "text_offset": [0, 2]})
    offsets.begin_segment()

    assert offsets.shift(logprobs)
    assert logprobs["text_offset"] == [5, 6]


def test_all_text_offsets_of_a_worker_are_shifted_by_the_same_length() -> None:
    offsets, second = TextOffsets(), {"tokens": ["d"], "text_offset": [1]}
    offsets.shift({"tokens": ["ab"], "text_offset": [0]})
    offsets.begin_segment()
    offsets.shift({"tokens": ["c"], "text_offset": [0]})

    offsets.shift(second)

    assert second["text_offset"] == [3]


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        [],
        {},
        {"tokens": [], "text_offset": []},
        {"tokens": ["a"], "text_offset": [0, 1]},
        {"tokens": ["a"], "text_offset": ["0"]},
        {"tokens": [None], "text_offset": [0]},
        {"content": [{"token": "a"}]},
    ],
)
def test_logprobs_of_another_form_are_left_alone(logprobs: Any) -> None:
    offsets = TextOffsets()
    offsets.shift({"tokens": ["ab"], "text_offset": [0]})
    offsets.begin_segment()

    assert not offsets.shift(logprobs)

"""`AnswerTokens`: the count of an answer's tokens over several workers."""

import pytest

from balanceroute.proxy.hotpath import EventMatcher
from balanceroute.proxy.wire.answer_tokens import AnswerTokens


def tokens(*, want_ids: bool = False) -> AnswerTokens:
    return AnswerTokens(EventMatcher(want_ids, False), want_ids)


def test_ids_are_counted_and_hidden_from_a_client_that_did_not_ask() -> None:
    generated, choice = tokens(), {"token_ids": [5, 6], "text": "a"}

    assert generated.take_ids(choice) == 1

    assert choice == {"token_ids": None, "text": "a"}
    assert (generated.tokens, generated.ids.tolist(), generated.exact) == (2, [5, 6], True)


@pytest.mark.parametrize("ids", [["5"], [-1], [2**32], [1.5]])
def test_an_invalid_token_id_still_counts_as_a_token(ids: list[object]) -> None:
    generated = tokens()

    generated.take_ids({"token_ids": ids})

    assert (generated.tokens, generated.ids.tolist(), generated.exact) == (1, [], False)


def test_ids_without_sent_text_are_dropped_when_their_worker_is_lost() -> None:
    generated = tokens()
    generated.take_ids({"token_ids": [1, 2]})
    generated.printed()
    generated.take_ids({"token_ids": [3]})

    assert generated.kept_ids.tolist() == [1, 2]
    generated.resume(broken=0)
    assert (generated.tokens, generated.earlier, generated.in_segment) == (2, 2, 0)


def test_the_ids_of_half_a_character_are_dropped_with_those_that_have_no_text() -> None:
    generated = tokens()
    generated.take_ids({"token_ids": [1, 2, 3]})
    generated.printed()
    generated.take_ids({"token_ids": [4]})

    generated.resume(broken=2)
    assert (generated.ids.tolist(), generated.tokens, generated.exact) == ([1], 1, True)


def test_ids_that_are_dropped_with_one_that_cannot_be_read_leave_the_others_exact() -> None:
    """The next worker generates them anew, from no id at all."""
    generated = tokens()
    generated.take_ids({"token_ids": ["x"]})

    generated.resume(broken=0)
    assert (generated.tokens, generated.ids.tolist(), generated.exact) == (0, [], True)


def test_ids_sent_to_a_client_that_wants_ids_are_never_dropped() -> None:
    generated = tokens(want_ids=True)
    generated.take_ids({"token_ids": [1, 2, 3]})

    assert generated.kept_ids.tolist() == [1, 2, 3]
    generated.resume(broken=1)
    assert (generated.ids.tolist(), generated.tokens) == ([1, 2, 3], 3)


def test_usage_counts_only_without_ids_and_never_backwards() -> None:
    by_usage, by_ids = tokens(), tokens()
    by_ids.take_ids({"token_ids": [1]})
    for completion_tokens in (4, 3, True, None):
        by_usage.count_by_usage({"completion_tokens": completion_tokens})
        by_ids.count_by_usage({"completion_tokens": completion_tokens})

    assert (by_usage.tokens, by_usage.exact) == (4, False)
    assert (by_ids.tokens, by_ids.exact) == (1, True)


def test_usage_of_a_later_worker_is_added_to_the_former_count() -> None:
    generated = tokens(want_ids=True)
    generated.take_ids({"token_ids": [1, 2]})
    generated.resume(broken=0)

    generated.count_by_usage({"completion_tokens": 3})

    assert (generated.tokens, generated.in_segment) == (5, 3)


def test_an_event_with_only_text_counts_one_token() -> None:
    generated = tokens()

    generated.count_by_event(None)

    assert (generated.tokens, generated.exact) == (1, False)


def test_an_event_is_not_counted_in_addition_to_its_usage() -> None:
    generated = tokens()

    generated.count_by_event({"completion_tokens": 1})

    assert generated.tokens == 0


def test_prompt_ids_of_a_later_worker_are_sent_only_if_no_earlier_ones_were() -> None:
    told, untold = tokens(want_ids=True), tokens(want_ids=True)
    for generated in (told, untold):
        assert generated.take_prompt_ids({"prompt_token_ids": [9]}) == 0
    told.relayed()
    told.resume(broken=0)
    untold.resume(broken=0)

    assert told.take_prompt_ids({"prompt_token_ids": [9]}) == 1
    assert untold.take_prompt_ids({"prompt_token_ids": [9]}) == 0


def test_a_repeated_last_id_is_recognised_within_one_worker_only() -> None:
    generated = tokens(want_ids=True)
    generated.take_ids({"token_ids": [1, 2]})

    assert generated.ends_twice([2])
    assert not generated.ends_twice([1])
    assert generated.ends_twice([3, 3])

    generated.resume(broken=0)
    assert not generated.ends_twice([2])

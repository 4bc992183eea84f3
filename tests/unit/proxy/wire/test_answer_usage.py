"""`AnswerUsage`: workers' usages become those of the whole answer."""

from typing import Any

from balanceroute.proxy.hotpath import EventMatcher
from balanceroute.proxy.wire.answer_tokens import AnswerTokens
from balanceroute.proxy.wire.answer_usage import AnswerUsage

PREFILLED = {"cached_tokens": 4}


def an_answer(
    *, continuous: bool = False, prompt_tokens: int | None = 10, details: dict[str, Any] | None = None
) -> tuple[AnswerTokens, AnswerUsage]:
    generated = AnswerTokens(EventMatcher(False, False), False)
    return generated, AnswerUsage(generated, continuous, prompt_tokens, details)


def counts(prompt: int, generated: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def generate(generated: AnswerTokens, *ids: int) -> None:
    generated.take_ids({"token_ids": list(ids)})
    generated.printed()


def test_the_final_usage_of_an_only_worker_gets_no_more_than_the_prefillers_details() -> None:
    generated, usage = an_answer(details=PREFILLED)
    generate(generated, 1, 2)

    told = counts(10, 2)
    assert usage.complete(told)
    assert told == counts(10, 2) | {"prompt_tokens_details": PREFILLED}

    plain = counts(10, 2)
    assert not an_answer()[1].complete(plain) and plain == counts(10, 2)


def test_the_final_usage_of_a_later_worker_counts_the_earlier_ones_tokens_as_the_answers() -> None:
    for prompt_tokens in (10, None):  # None: only the worker tells it, with the answer so far as a part
        generated, usage = an_answer(prompt_tokens=prompt_tokens)
        generate(generated, 1, 2)
        generated.resume(broken=0)
        generate(generated, 3)

        told = counts(12, 1) | {"completion_tokens_details": {"reasoning_tokens": 1}}
        assert usage.complete(told)
        assert told == counts(10, 3)


def test_a_usage_in_an_event_with_choices_is_taken_out_unless_the_client_gets_it_there() -> None:
    for continuous in (False, True):
        generated, usage = an_answer(continuous=continuous)
        event = {"usage": counts(10, 2)}

        assert usage.take(event, event["usage"]) is not continuous
        assert ("usage" in event) is continuous
        assert generated.tokens == 2  # no ids have come


def test_continuous_usage_never_falls_though_tokens_are_given_back() -> None:
    generated, usage = an_answer(continuous=True)
    generated.take_ids({"token_ids": [1, 2, 3]})  # without text: generated again by the next worker
    before = counts(10, 3)
    usage.take({"usage": before}, before)
    generated.resume(broken=0)
    generate(generated, 1)

    after = counts(10, 1)
    usage.take({"usage": after}, after)
    assert after == counts(10, 3)


def test_the_routers_own_usage_has_its_count_and_the_prefillers_details() -> None:
    generated, usage = an_answer(prompt_tokens=None)
    generate(generated, 1, 2)
    usage.prefilled(7, PREFILLED)

    assert usage.prompt_tokens == 7
    assert usage.counted() == counts(7, 2) | {"prompt_tokens_details": PREFILLED}

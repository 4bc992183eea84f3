"""What the checks with real engines take for a right stream."""

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.e2e import vllm_asks
from scripts.e2e.vllm_asks import HALVED, assert_greedy, streamed_ids

BODY = {"max_tokens": 3}
REASONS = {
    "character": f"The answer cannot be continued: {HALVED} is state that another decode worker does not have.",
    "other": "The answer cannot be continued: stop is state that another decode worker does not have.",
}


def an_event(*ids: int) -> dict[str, Any]:
    return {"choices": [{"token_ids": list(ids), "finish_reason": None}]}


def an_error(reason: str) -> dict[str, Any]:
    return {"error": {"message": REASONS[reason], "code": 502}}


def answers(monkeypatch: pytest.MonkeyPatch, *events: dict[str, Any]) -> None:
    """What the router answers to the next stream."""

    def events_of(body: dict[str, Any], request_id: str) -> Iterator[dict[str, Any]]:
        yield from events

    monkeypatch.setattr(vllm_asks, "events_of", events_of)


def test_a_stream_that_is_cut_off_within_a_character_is_let_through_where_that_may_happen_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(monkeypatch, an_event(7), an_event(8), an_error("character"))
    assert streamed_ids(BODY, may_be_halved=True) == ([7, 8], HALVED)
    with pytest.raises(RuntimeError, match=HALVED):
        streamed_ids(BODY)


@pytest.mark.parametrize(
    "events", [[an_event(7), an_error("other")], [an_error("character")]], ids=["another-reason", "no-token"]
)
def test_any_other_error_fails_the_check(monkeypatch: pytest.MonkeyPatch, events: list[dict[str, Any]]) -> None:
    answers(monkeypatch, *events)
    with pytest.raises(RuntimeError, match="error event"):
        streamed_ids(BODY, may_be_halved=True)


@pytest.mark.parametrize(
    ("got", "right"),
    [
        (([7, 8, 9], "length"), True),
        (([7, 8], HALVED), True),
        (([7, 1], HALVED), False),
        (([7, 1, 9], "length"), False),
        (([7, 8], "length"), False),
        (([7, 8], None), False),
    ],
)
def test_a_stream_has_to_be_whole_or_halved_and_its_tokens_the_engines(
    monkeypatch: pytest.MonkeyPatch, got: tuple[list[int], str | None], right: bool
) -> None:
    monkeypatch.setattr(vllm_asks, "greedy_gaps_nats", lambda body, ids: [9.0 if token == 1 else 0.0 for token in ids])
    if right:
        assert_greedy([BODY], [got])
    else:
        with pytest.raises(AssertionError):
            assert_greedy([BODY], [got])

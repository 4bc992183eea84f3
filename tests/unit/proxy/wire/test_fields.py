"""Numbers and flags of a client's body: read as the engines' models read them, refused by name otherwise."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.fields import boolean, checked, integer, kind

BOUND = 2**63 - 1
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers().map(str),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


class EngineBody(BaseModel):
    """As vLLM declares its bodies: lax, null for what is left out."""

    max_tokens: int | None = None
    stream: bool | None = False


@given(json_values)
def test_an_integer_is_what_the_engine_s_model_makes_of_it_within_64_bits(value: Any) -> None:
    data = {"max_tokens": value}
    try:
        expected = EngineBody.model_validate(data).max_tokens
    except ValidationError:
        expected = None
    if value is not None and (expected is None or abs(expected) > BOUND):
        with pytest.raises(InvalidRequest) as caught:
            integer(data, "max_tokens", least=None)
        assert caught.value.param == "max_tokens"
    else:
        assert integer(data, "max_tokens", least=None) == expected
        assert value is None or (type(data["max_tokens"]), data["max_tokens"]) == (int, expected)


@given(json_values)
def test_a_flag_is_what_the_engine_s_model_makes_of_it(value: Any) -> None:
    data = {"stream": value}
    try:
        expected = bool(EngineBody.model_validate(data).stream)
    except ValidationError:
        with pytest.raises(InvalidRequest) as caught:
            boolean(data, "stream")
        assert caught.value.param == "stream" and kind(value) in str(caught.value)
    else:
        assert boolean(data, "stream") is expected
        assert value is None or data["stream"] is expected


def test_missing_fields_are_none_and_false_and_stay_missing() -> None:
    data: dict[str, Any] = {}
    assert integer(data, "max_tokens", least=1) is None and boolean(data, "stream") is False
    assert data == {}


@pytest.mark.parametrize("value", [BOUND + 1, -BOUND - 1, 0])
def test_bounds_are_named_with_the_field(value: int) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must be") as caught:
        checked("max_tokens", value, least=1)
    assert caught.value.param == "max_tokens"
    assert checked("max_tokens", BOUND, least=1) == BOUND

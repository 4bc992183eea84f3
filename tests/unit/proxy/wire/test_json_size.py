"""What a body holds is counted without reading it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire import json_size
from balanceroute.proxy.wire.json_size import check_size

TEXTS = st.text(st.sampled_from('[]{},:"\\a\n'), max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=24,
)


def counted(value: Any) -> tuple[int, int]:
    """Most of strings (keys included) and of arrays and objects; and commas."""
    texts = containers = commas = 0
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            texts += 1
        elif isinstance(one, list | dict):
            containers += 1
            commas += max(0, len(one) - 1)
            texts += len(one) if isinstance(one, dict) else 0
            left += one.values() if isinstance(one, dict) else one
    return texts + containers, commas


@given(VALUES, st.booleans(), st.integers(-1, 1), st.integers(-1, 1))
def test_a_body_with_more_values_than_the_limit_is_refused(
    value: Any, spaced: bool, nodes_off: int, commas_off: int
) -> None:
    nodes, commas = counted(value)
    body = json.dumps(value, ensure_ascii=False, indent=1 if spaced else None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "MAX_NODES", nodes + nodes_off)
        patch.setattr(json_size, "MAX_COMMAS", commas + commas_off)
        if (nodes_off < 0 or commas_off < 0) and len(body) > nodes + nodes_off:
            with pytest.raises(InvalidRequest, match="holds more than"):
                check_size(body)
        else:
            check_size(body)


@given(st.binary(max_size=64), st.integers(0, 4))
def test_bytes_that_are_no_json_raise_nothing_else(body: bytes, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "MAX_NODES", limit)
        try:
            check_size(body)
        except InvalidRequest as error:
            assert error.status == 400


def test_a_body_full_of_text_is_taken() -> None:
    check_size(b'{"prompt": "' + rb"[{,\"\\" * 4_000_000 + b'"}')

"""Arguments that several scripts take are refused with what is accepted."""

import argparse
from collections.abc import Callable

import pytest

from scripts.arguments import count, positive


@pytest.mark.parametrize(
    ("kind", "text"),
    [(count, text) for text in ("0", "-1", "1.5", "", "many")]
    + [(positive, text) for text in ("0", "-1", "nan", "inf", "", "fast")],
)
def test_what_is_no_such_number_is_refused_with_what_is_accepted(kind: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="accepted is a"):
        kind(text)


def test_a_number_is_taken() -> None:
    assert (count("3"), positive("0.5")) == (3, 0.5)

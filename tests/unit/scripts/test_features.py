"""The list of features that are compared with a plain server, and the page that says what differs."""

from pathlib import Path

from scripts.e2e.features import DIFFERS, features

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"


def test_more_than_a_hundred_features_are_compared_each_once() -> None:
    names = [name for name, _, _ in features()]
    assert len(names) == len(set(names)) >= 110
    assert set(DIFFERS) <= set(names)


def test_every_difference_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert [name for name in DIFFERS if f"`{name}`" not in page] == []

"""Flags of `serve`: lists as argparse takes them."""

import pytest

from balanceroute.cli.serve import spread_lists


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        (
            ["serve", "--prefiller-hosts", "a", "b", "--port", "1"],
            ["serve", "--prefiller-hosts", "a", "--prefiller-hosts", "b", "--port", "1"],
        ),
        (["serve", "--decoder-ports", "1"], ["serve", "--decoder-ports", "1"]),
        (["load", "x", "y"], ["load", "x", "y"]),
        (["serve", "--decoder-ports", "1", "--host", "h", "k"], ["serve", "--decoder-ports", "1", "--host", "h", "k"]),
    ],
    ids=["two", "one", "other-command", "after-another-flag"],
)
def test_a_list_flag_takes_several_values(given: list[str], spread: list[str]) -> None:
    assert spread_lists(given) == spread

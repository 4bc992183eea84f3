"""The README's generated parts say what the code says."""

import re
from pathlib import Path

import pytest

from scripts.readme_tables import README, rewritten

ROOT = Path(__file__).parents[2]


def test_the_tables_of_the_readme_are_those_of_the_code() -> None:
    """`python -m scripts.readme_tables` rewrites them."""
    assert README.read_text() == rewritten(README.read_text())


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", re.findall(r"`(scripts/[a-z_0-9]+)", README.read_text()))
def test_every_script_that_the_readme_names_exists(name: str) -> None:
    assert (ROOT / name).exists()

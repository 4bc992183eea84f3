"""What docs/security.md says is what the code does."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from balanceroute.config import describe_settings
from balanceroute.proxy.perimeter.routes import ACCESS, Access

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
SETTINGS = {row.path: row.default for row in describe_settings()}


def test_every_default_in_the_table_is_that_of_its_setting() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert len(rows) > 10
    assert {name: default for name, default in rows if SETTINGS.get(name) != default.strip()} == {}


def test_every_setting_that_it_names_exists() -> None:
    sections = {path.partition(".")[0] for path in SETTINGS} - {"log"}
    named = re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_.]*[a-z_])", PAGE)
    assert named and set(named) <= set(SETTINGS)


@pytest.mark.parametrize("access", [Access.OPEN, Access.ADMIN])
def test_every_open_and_every_admin_route_is_named_as_such(access: Access) -> None:
    (line,) = re.findall(rf"^\| {access} \| ([^|]+) \|", PAGE, re.MULTILINE)
    names = re.findall(r"`([^`]+)`", line)
    routes = {path for path, its in ACCESS.items() if its is access}
    assert {path for path in routes if not any(fnmatchcase(path, name) for name in names)} == set()
    assert {name for name in names if not any(fnmatchcase(path, name) for path in routes)} == {
        name for name in names if name.startswith("metrics.")
    }


def test_files_linked_by_the_page_and_the_policy_exist() -> None:
    for page in (ROOT / "docs" / "security.md", ROOT / "SECURITY.md"):
        links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
        assert links and all((page.parent / link).exists() for link in links)

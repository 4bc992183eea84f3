"""The evidence is what its README says: every file is listed with its source and its hash."""

import hashlib
import re

from tests.recorded import DATA


def test_every_recorded_file_is_listed_with_its_hash_and_its_source() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `([0-9a-f]{64})` \| (.+) \|$", (DATA / "README.md").read_text(), re.MULTILINE)
    listed = {name: digest for name, digest, source in rows if source}
    found = {
        str(path.relative_to(DATA)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in DATA.rglob("*")
        if path.is_file() and path != DATA / "README.md"
    }
    assert found == listed

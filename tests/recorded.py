"""The evidence that tests compare with: files of `tests/data`, whose README says where each comes from."""

import atexit
import tarfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

DATA = Path(__file__).parent / "data"
TRACES = DATA / "traces"


@cache
def captures() -> Path:
    """The folder of the recorded exchanges, unpacked for this process."""
    folder = TemporaryDirectory(prefix="captures-")
    atexit.register(folder.cleanup)
    with tarfile.open(DATA / "captures.tar.xz") as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None, f"{member.name} is no file"
            path = Path(folder.name, member.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
    return Path(folder.name)

"""Where a run writes its logs and configuration."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logs_folder(name: str, keep: Path | None) -> Iterator[Path]:
    """`keep`, or a folder that goes with the run."""
    folder = keep or Path(tempfile.mkdtemp(prefix=f"balanceroute-{name}-"))
    try:
        yield folder
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)

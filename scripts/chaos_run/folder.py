"""Where a run writes its logs and configuration."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logs_folder(name: str, keep: Path | None) -> Iterator[Path]:
    """`keep`, or a folder that goes with the run."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix=f"balanceroute-{name}-", ignore_cleanup_errors=True) as made:
        yield Path(made)

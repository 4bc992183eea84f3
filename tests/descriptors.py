"""Which descriptors this process has open. Others may close at any time: garbage of earlier tests has some."""

import os
from contextlib import suppress
from pathlib import Path


def open_descriptors() -> set[tuple[int, str]]:
    """Number and target of each."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing is closed by now
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found


def open_files(folder: Path) -> int:
    """How many files of this folder are open, removed ones as well."""
    return sum(target.startswith(f"{folder}/") for _, target in open_descriptors())

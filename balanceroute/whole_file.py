"""Writes results to a file atomically."""

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from balanceroute.errors import InputError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file: a full disk or Ctrl-C leaves what was there. A pipe or a device is written to, and stays.

    A link stays as well, and so do the permissions of the file. Raises: InputError: it cannot be written.
    """
    try:
        if path.exists() and not (path.is_file() and os.access(Path(os.path.realpath(path)).parent, os.W_OK)):
            path.write_bytes(content)
        else:
            _replace(path, content)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _replace(path: Path, content: bytes) -> None:
    target = Path(os.path.realpath(path))  # of a link that leads to itself the link
    partial = target.with_name(f"{target.name[:50]}.{token_hex(4)}.partial")  # another may write the same file now
    try:
        partial.write_bytes(content)
        if path.exists():
            with suppress(OSError):  # of another owner
                partial.chmod(target.stat().st_mode)
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise

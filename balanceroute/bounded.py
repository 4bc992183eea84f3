"""Reads users' files within bounds: an endless one (a device, gigabytes on one line) is an error."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, AnyStr, Final

MOST_BYTES: Final = 2**29  # of what is kept whole: a state of a million requests takes a third
MOST_IN_LINE: Final = 2**26  # bytes or characters: a prompt of a million token ids takes a tenth


def whole(file: IO[bytes]) -> bytes:
    """All that is in a file. Raises: OSError: it is more than is kept."""
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES >> 20} MiB")
    return content


def lines(file: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of a file. Raises: OSError: one is longer than any that means something."""
    while line := file.readline(MOST_IN_LINE + 1):
        if len(line) > MOST_IN_LINE:
            raise OSError(errno.EFBIG, f"a line of it is longer than {MOST_IN_LINE >> 20} MiB")
        yield line


def check_regular(path: Path) -> None:
    """Of a file whose parts are read in any order. Raises: OSError: it is a pipe or a device, or is not there."""
    mode = os.stat(path).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        raise OSError(errno.ESPIPE, "it is a pipe or a device; accepted is a file")

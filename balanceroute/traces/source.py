"""Opens a trace's file: text, possibly compressed, readable more than once even from a pipe.

What is no regular file (a pipe, standard input) gives each byte once. Its bytes are kept at the first reading, up to
`MOST_PIPED_BYTES`, so that whoever looks at the first line takes nothing from whoever reads all of them.
"""

import gzip
import io
import lzma
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from balanceroute.errors import InputError

STDIN = "-"  # as a name
MOST_PIPED_BYTES = 2**29  # kept in memory; a larger file is better written down first
# by the first bytes, none of which begin a text in UTF-8; what a download has unpacked may be named .gz still
OPENERS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\x00": lzma.open}


class Source:
    """One file to read; `-` is standard input.

    `half_line`: number of its last line, once that is read, if no line end follows: whoever writes the file may not
    have finished it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.half_line: int | None = None
        self._kept: bytes | None = None

    @classmethod
    def of(cls, path: "str | Path | Source") -> "Source":
        """The source of that name; a source is itself, with what it has kept."""
        return path if isinstance(path, Source) else cls(path)

    def __str__(self) -> str:
        return "standard input" if str(self.path) == STDIN else str(self.path)

    @contextmanager
    def open(self) -> Iterator[TextIO]:
        """The text from its beginning, uncompressed. What is not UTF-8 comes through as surrogates.

        Raises: OSError; InputError where a pipe gives more than is kept.
        """
        with ExitStack() as stack:
            raw = stack.enter_context(self._bytes())
            opener = opener_of(raw)
            options = {} if opener is io.TextIOWrapper else {"mode": "rt"}
            # a decoder that stops at what is not UTF-8 reads ahead of the line
            yield stack.enter_context(
                opener(raw, encoding="utf-8-sig", errors="surrogateescape", newline="", **options)
            )

    def _bytes(self) -> BinaryIO:
        if self._kept is None:
            # a socket as standard input has a number, but no name that can be opened
            file = open(0, "rb", closefd=False) if str(self.path) == STDIN else self.path.open("rb")
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.seekable():
                file.seek(0)
                return file
            with file:
                self._kept = file.read(MOST_PIPED_BYTES + 1)
        if len(self._kept) > MOST_PIPED_BYTES:
            raise InputError(f"{self}: more than {MOST_PIPED_BYTES >> 20} MiB through a pipe; write them to a file")
        return io.BytesIO(self._kept)


def opener_of(raw: BinaryIO) -> Callable[..., Any]:
    """The function that opens such a file as text; the file is at its beginning afterwards."""
    start = raw.read(max(map(len, OPENERS)))
    raw.seek(0)
    return next((opener for magic, opener in OPENERS.items() if start.startswith(magic)), io.TextIOWrapper)


def check_read_again(path: str | Path) -> None:
    """Raises: InputError: it is a pipe, which cannot be read once more, or by another process."""
    try:
        regular = str(path) != STDIN and not stat.S_ISFIFO(Path(path).stat().st_mode)
    except OSError:
        return  # said when it is read
    if not regular:
        raise InputError(f"{Source(path)}: is a pipe, which cannot be read again; accepted is a file")

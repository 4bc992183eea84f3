"""Files that a process leaves for its successor on this machine: a kill at any moment leaves the old content or the
new.

They outlive the process, not a crash of the machine: nothing is synced.
"""

import fcntl
import os
from pathlib import Path
from typing import Final

NEW: Final = ".new"  # at the end of the name of a file that is being written
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def beside(path: Path) -> Path:
    """The path at which a new content is written before it takes the file's place."""
    return path.with_name(path.name + NEW)


def is_at(file: int, path: Path) -> bool:
    """Whether the open file is still at this path; False: it was removed or replaced."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def is_still(path: Path, status: os.stat_result) -> bool:
    """Whether the file with this status is still at this path; True if that can't be checked."""
    try:
        return os.path.samestat(status, path.stat())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def is_gone(path: Path) -> bool:
    """Whether there is no file at this path; False if that can't be checked."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def locked(path: Path) -> int | None:
    """Open and lock a file; None: another process has locked it, or has replaced it meanwhile. Raises: OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(file, path):
            return file
    except BlockingIOError:
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def is_locked(path: Path) -> bool:
    """Whether a process has locked this file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, IsADirectoryError):
        return False  # somebody has removed the file, or put something else in its place
    except OSError:
        return True  # unknown: to wait for a process that is not there costs less than not to wait for one that is
    return False


def replace_content(path: Path, content: bytes) -> None:
    """Replace the file at this path by one with this content, which only our user can read. One writer at a time.

    Raises: OSError: it can't be written; the old file stays.
    """
    new = beside(path)
    try:
        with open(os.open(new, _FLAGS, 0o600), "wb") as file:
            file.write(content)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def overwritten(path: Path, content: bytes) -> bool:
    """Overwrite the file in place, padded with spaces, which needs no disk space; returns whether that worked.

    It fails if the file is too small. A kill within the one write may leave a mixture.
    """
    try:
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            return len(content) <= size_bytes and file.write(content.ljust(size_bytes)) == size_bytes
    except OSError:
        return False

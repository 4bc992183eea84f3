"""Which of several brains on one machine leads: who holds the lock of a file, whose content is the last epoch.

The kernel drops the lock with its process, however that ends. Each new leader counts one up before it says anything, so
that an epoch is never used twice.
"""

import fcntl
import os
from pathlib import Path

from balanceroute.errors import ConfigError


class Leadership:
    """The lead, from `take` to `release` or the end of the process; `epoch` is its number."""

    def __init__(self, path: Path) -> None:
        """Nothing is taken yet. `path`: the file, in a folder that outlives the processes."""
        self._path = path
        self._file: int | None = None
        self.epoch = 0

    def take(self) -> bool:
        """Lead, if nobody does. Raises: ConfigError: the file can't be used."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        try:
            self.epoch = int(os.pread(file, 32, 0) or b"0") + 1
        except ValueError:
            os.close(file)
            raise ConfigError(f"{self._path}: it holds no epoch; is it the right file?") from None
        os.pwrite(file, b"%d\n" % self.epoch, 0)
        self._file = file
        return True

    def release(self) -> None:
        """Let another one lead."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

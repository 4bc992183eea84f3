"""Logs when a repeated failure begins and ends, not each failure in between."""

import logging


class Trouble:
    """An operation that is tried again and again, and may fail each time."""

    __slots__ = ("_fails", "_log", "_over", "lasts")

    def __init__(self, log: logging.Logger, fails: str, over: str = "") -> None:
        """`fails`, `over`: the texts of the log lines; an empty one is not written."""
        self._log, self._fails, self._over = log, fails, over
        self.lasts = False

    def begin(self, **fields: object) -> None:
        """It has failed: log that, unless it failed the last time, too."""
        if not self.lasts:
            self._log.warning(self._fails, extra=fields)
        self.lasts = True

    def end(self, **fields: object) -> None:
        """It has succeeded: log that, if it failed the last time."""
        if self.lasts and self._over:
            self._log.info(self._over, extra=fields)
        self.lasts = False

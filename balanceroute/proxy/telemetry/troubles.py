"""What fails again and again, said when it begins to and when that is over, not each time in between."""

import logging


class Trouble:
    """One thing that may fail each time it is tried."""

    __slots__ = ("_fails", "_log", "_over", "lasts")

    def __init__(self, log: logging.Logger, fails: str, over: str = "") -> None:
        """`fails`, `over`: the log's lines; an empty one is not written."""
        self._log, self._fails, self._over = log, fails, over
        self.lasts = False

    def begin(self, **fields: object) -> None:
        """It has failed."""
        if not self.lasts:
            self._log.warning(self._fails, extra=fields)
        self.lasts = True

    def end(self, **fields: object) -> None:
        """It has not."""
        if self.lasts and self._over:
            self._log.info(self._over, extra=fields)
        self.lasts = False

"""The work of prefills, in tokens and in seconds.

A cached token is not computed, but its KV is looked up and moved to a decode worker, so it counts `CACHED_SHARE` of a
computed one. A prefiller's pace (seconds per token of work) is measured: the time in which it had prompts of this
router, divided by the work done.
"""

from typing import Final

CACHED_SHARE: Final = 1 / 16
"""On a vllm-ascend cluster a prompt of 181K tokens took 34 s, and 2.3 s where nearly all of it was cached: 1/15."""

FIRST_S_PER_TOKEN: Final = 1 / 6000
"""Before anything is measured: within a factor of 3 of large models on current accelerators."""

_FIRST_TOKENS: Final = 1000.0  # the weight of the first guess
_KEPT: Final = 0.98  # decay per prompt of the measured weights: about the last fifty count


def work_tokens(prompt_tokens: int, uncached_tokens: int) -> float:
    """The work of `prompt_tokens`, of which a prefiller must compute `uncached_tokens`."""
    return uncached_tokens + (prompt_tokens - uncached_tokens) * CACHED_SHARE


class Pace:
    """Seconds per token of work of one prefiller."""

    __slots__ = ("_busy_s", "_since_s", "_unsettled_s", "_work")

    def __init__(self) -> None:
        self._busy_s, self._work = _FIRST_TOKENS * FIRST_S_PER_TOKEN, _FIRST_TOKENS
        self._since_s = self._unsettled_s = 0.0

    @property
    def s_per_token(self) -> float:
        """The pace, measured over the last prompts."""
        return self._busy_s / self._work

    def pass_time(self, now: float, busy: bool) -> None:
        """Add the time since the last call if the prefiller had prompts of this router."""
        if busy:
            self._unsettled_s += now - self._since_s
        self._since_s = now

    def done(self, work: float) -> None:
        """Add a finished prompt's work."""
        self._busy_s = self._busy_s * _KEPT + self._unsettled_s
        self._work = self._work * _KEPT + work
        self._unsettled_s = 0.0

    def failed(self) -> None:
        """Drop the time of a prompt that ended unfinished."""
        self._unsettled_s = 0.0

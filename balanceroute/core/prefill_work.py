"""Work of prefills in tokens, and the seconds that it takes.

A token that a prefix cache holds is not computed, but its KV is looked up and moved to a decode worker all the same, so
it counts `CACHED_SHARE` of one that is. A prefiller's pace, seconds per token of work, is measured: the time in which
it had any prompt of ours, over the work that it got done.
"""

from typing import Final

CACHED_SHARE: Final = 1 / 16
"""On a vllm-ascend cluster a prompt of 181K tokens took 34 s, and 2.3 s where nearly all of it was cached: 1/15."""

FIRST_S_PER_TOKEN: Final = 1 / 6000
"""Before anything is measured: within a factor of 3 of large models on current accelerators."""

_FIRST_TOKENS: Final = 1000.0  # what that guess weighs
_KEPT: Final = 0.98  # of the weight of what was measured, per prompt: the last fifty count


def work_tokens(prompt_tokens: int, uncached_tokens: int) -> float:
    """What prompts of so many tokens are to a prefiller that has to compute so many of them."""
    return uncached_tokens + (prompt_tokens - uncached_tokens) * CACHED_SHARE


class Pace:
    """Seconds per token of work of one prefiller."""

    __slots__ = ("_busy_s", "_since_s", "_unsettled_s", "_work")

    def __init__(self) -> None:
        self._busy_s, self._work = _FIRST_TOKENS * FIRST_S_PER_TOKEN, _FIRST_TOKENS
        self._since_s = self._unsettled_s = 0.0

    @property
    def s_per_token(self) -> float:
        """As measured over the last prompts."""
        return self._busy_s / self._work

    def pass_time(self, now: float, busy: bool) -> None:
        """Until now the prefiller had prompts of ours, or had none."""
        if busy:
            self._unsettled_s += now - self._since_s
        self._since_s = now

    def done(self, work: float) -> None:
        """A prompt is done: the time since the last one was spent on such."""
        self._busy_s = self._busy_s * _KEPT + self._unsettled_s
        self._work = self._work * _KEPT + work
        self._unsettled_s = 0.0

    def failed(self) -> None:
        """A prompt has ended without being done: how long that took says nothing."""
        self._unsettled_s = 0.0

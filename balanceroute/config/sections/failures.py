"""`retry` and `health`: what happens when a worker fails, and when it counts as down."""

from pydantic import Field

from balanceroute.config.sections.section import Section
from balanceroute.config.values import Period, Seconds, SecondsOrZero

USUAL_DELAY_S = 2.0  # the longest one, where nothing else is set


class Retry(Section):
    """What happens when a worker fails. A client's error (4xx, but 408) is not retried; after 429 and 503 it waits."""

    max_attempts: int = Field(
        3,
        ge=1,
        le=100,
        description="Most failed tries of a request per tier (prefill, decode), each on another worker if there "
        "is one. A 429 or 503 of a worker is no failed try, nor are up to eight more failures of the same one, "
        "which lives, while others may take the request: it waits for a worker, for its first token at most "
        "queue.deadline_s.",
    )
    base_delay_s: SecondsOrZero = Field(
        0.05, description="Upper end of the random delay before the second try; doubles from try to try."
    )
    max_delay_s: SecondsOrZero | None = Field(
        None, description="Upper end of the random delay before any try. Unset: 2, or base_delay_s where that is more."
    )
    resume_on_worker_loss: bool = Field(
        True,
        description="Continue a stream on another worker from its token ids when its decoder is lost; otherwise the "
        "client gets an error event.",
    )
    resume_after_silence_s: SecondsOrZero = Field(
        5.0,
        description="How long a stream stays on a decoder that was judged down only because it is silent: it may just "
        "have paused. If the connection broke, or no token has arrived yet, the request does not wait.",
    )

    @property
    def longest_delay_s(self) -> float:
        """`max_delay_s`, or what follows where it is unset."""
        return max(USUAL_DELAY_S, self.base_delay_s) if self.max_delay_s is None else self.max_delay_s


class Health(Section):
    """When a worker counts as down, and when as up again."""

    interval_s: Period = Field(2.0, description="How often each worker's /health is asked.")
    timeout_s: Seconds = Field(3.0, description="Longest wait for a /health or /metrics answer.")
    failure_threshold: int = Field(
        3, ge=1, le=1000, description="Failures in a row (of requests or checks) that take a worker out."
    )
    open_for_s: Seconds = Field(10.0, description="A worker that was taken out gets one trial request after this.")
    stall_after_s: Seconds = Field(
        30.0,
        description="A decoder with running requests and no token for this long counts as down, whatever its /health "
        "says. An answer in one piece counts once it has had a second per token.",
    )
    silence_window_s: Seconds = Field(
        5.0,
        description="Workers that fall silent within this time of each other count as silent together. If they are "
        "most of a barrier_group, or of all workers, no request is moved, and /ready names them.",
    )
    group_wait_s: SecondsOrZero = Field(
        60.0,
        description="How much longer than limits.idle_timeout_s and limits.first_byte_timeout_s requests wait for a "
        "group that fell silent together.",
    )

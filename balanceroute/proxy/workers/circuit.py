"""When a worker gets new requests: one circuit per worker, fed by what real requests find.

    closed --fault--> resting --time--> closed                  (a short pause, longer with every one in a row)
    closed --busy---> resting --time--> half-open --one trial--> closed | resting
    closed --faults in a row >= threshold--> open --time--> half-open --one trial--> closed | open

A *fault* is a connection that fails, a reply that breaks off, a 5xx; *busy* is a 429 or 503: the worker says that it
can't take more, which is back-pressure and never opens the circuit. A 4xx is the client's and no sign of either.

The pause after the first failure is what makes retries land elsewhere: a worker that fails fast is always the least
loaded one, so without it every policy would send the retry straight back. Whoever was busy is then asked by one request
alone, because while all workers push back all requests wait, and each try costs a prefill. Requests that were under way
together are one refusal, however many they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

REST_S: Final = 0.5  # first pause; longer than a prefill probe, so that a retry finds another worker
MAX_REST_S: Final = 8.0
TICK_EARLY_S: Final = 0.002  # uvloop's clock counts milliseconds: a timer may fire before its time by a rounding


class CircuitState(StrEnum):
    """What a worker may get; see the module's theory."""

    CLOSED = "closed"
    RESTING = "resting"
    OPEN = "open"
    HALF_OPEN = "half_open"
    TRIAL = "trial"


CLOSED, RESTING, OPEN, HALF_OPEN, TRIAL = CircuitState


@dataclass(frozen=True, slots=True)
class CircuitConfig:
    """`failure_threshold` faults in a row open the circuit for `open_for_s`."""

    failure_threshold: int = 3
    open_for_s: float = 10.0


class Circuit:
    """One worker's circuit. It calls `on_change(wake_in_s)` at every new state; `tick` is due after that time."""

    __slots__ = ("_busy", "_config", "_faults", "_on_change", "_until", "state")

    def __init__(self, config: CircuitConfig, on_change: Callable[[float | None], None]) -> None:
        self._config, self._on_change = config, on_change
        self._faults = self._busy = 0  # in a row
        self._until = 0.0
        self.state = CLOSED

    def configure(self, config: CircuitConfig) -> None:
        """Use another configuration from the next failure on."""
        self._config = config

    @property
    def doubtful(self) -> bool:
        """Whether a success would change anything."""
        return bool(self._faults or self._busy) or self.state is not CLOSED

    @property
    def failures(self) -> int:
        """How many requests in a row have failed, for whichever reason."""
        return self._faults + self._busy

    def used(self) -> None:
        """A request was sent: in half-open, that is the trial, and no other goes before it has ended."""
        if self.state is HALF_OPEN:
            self._enter(TRIAL, None)

    def success(self) -> None:
        """The worker answered as it should."""
        if self.doubtful:
            self._faults = self._busy = 0
            self._until = 0.0
            self._enter(CLOSED, None)

    def inconclusive(self) -> None:
        """The request ended without telling anything about the worker (client gone, 4xx)."""
        if self.state is TRIAL:
            self._enter(HALF_OPEN, None)

    def fault(self, now: float) -> None:
        """The worker failed."""
        self._faults += 1
        if self._faults >= self._config.failure_threshold or self.state is TRIAL:
            self.open(now)
        else:
            self._rest(now, 0.0)

    def busy(self, now: float, retry_after_s: float = 0.0) -> None:
        """The worker refused a request for want of room; it rests for `retry_after_s` at least, if it said so."""
        if self.state is not RESTING or not self._busy:
            self._busy += 1
        self._rest(now, retry_after_s)

    def open(self, now: float) -> None:
        """Nothing new to this worker, until a trial succeeds."""
        self._until = now + self._config.open_for_s
        self._enter(OPEN, self._config.open_for_s)

    def reachable(self) -> None:
        """A health check was answered: an open circuit need not wait any longer for its trial."""
        if self.state is OPEN:
            self._enter(HALF_OPEN, None)

    def tick(self, now: float) -> None:
        """Let time pass: a rest ends, an open circuit becomes half-open."""
        if now < self._until - TICK_EARLY_S:
            return
        if self.state is RESTING:
            self._enter(HALF_OPEN if self._busy else CLOSED, None)
        elif self.state is OPEN:
            self._enter(HALF_OPEN, None)

    def _rest(self, now: float, at_least_s: float) -> None:
        rest_s = min(MAX_REST_S, max(at_least_s, REST_S * 2.0 ** min(8, self.failures - 1)))
        if self.state is OPEN:
            return
        self._until = max(self._until, now + rest_s)
        self._enter(RESTING, self._until - now)

    def _enter(self, state: CircuitState, wake_in_s: float | None) -> None:
        self.state = state
        self._on_change(wake_in_s)

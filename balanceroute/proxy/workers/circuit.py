"""The circuit of a worker: requests' results decide whether it gets new ones.

    closed --fault--> resting --time--> closed                  (a short pause, longer with every one in a row)
    closed --busy---> resting --time--> half-open --one trial--> closed | resting
    closed --faults in a row >= threshold--> open --time--> half-open --one trial--> closed | open

*Fault*: a connection that fails, a reply that breaks off, a 5xx. *Busy*: a 429 or 503, or request after request that is
given back without a token; this is back-pressure and never opens the circuit. A 4xx is the client's error, and neither.

The pause after the first failure makes retries go elsewhere: a worker that fails fast is the least loaded one, so every
policy would send the retry back to it. After a busy rest one request tries the worker, because each try costs a
prefill. Refusals of requests that were under way together count as one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BUSY: Final = "status 429 or 503, or it gives requests back: it is busy"
REST_S: Final = 0.5  # first pause; longer than a prefill probe, so that a retry gets another worker
MAX_REST_S: Final = 8.0
TICK_EARLY_S: Final = 0.002  # uvloop's clock counts milliseconds: a timer may fire before its time by a rounding


class CircuitState(StrEnum):
    """The states of a circuit; see the module's docstring."""

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
    """One worker's circuit. It calls `on_change(wake_in_s)` at every new state; `tick` is due after that time.

    `reason`: the last failure, in words that may go to clients; "": none since the last correct answer.
    """

    __slots__ = ("_busy", "_config", "_faults", "_on_change", "_until", "reason", "state")

    def __init__(self, config: CircuitConfig, on_change: Callable[[float | None], None]) -> None:
        self._config, self._on_change = config, on_change
        self._faults = self._busy = 0  # in a row
        self._until = 0.0
        self.state = CLOSED
        self.reason = ""

    def configure(self, config: CircuitConfig) -> None:
        """Use another configuration from the next failure on."""
        self._config = config

    @property
    def doubtful(self) -> bool:
        """Whether a success would change anything."""
        return bool(self._faults or self._busy) or self.state is not CLOSED

    @property
    def failures(self) -> int:
        """Failures in a row, of any kind."""
        return self._faults + self._busy

    def used(self) -> None:
        """Note that a request was sent: in half-open it is the trial, and no other is sent before its end."""
        if self.state is HALF_OPEN:
            self._enter(TRIAL, None)

    def success(self) -> None:
        """Note a correct answer."""
        if self.doubtful:
            self._faults = self._busy = 0
            self._until = 0.0
            self.reason = ""
            self._enter(CLOSED, None)

    def inconclusive(self) -> None:
        """Note a request that says nothing about the worker (client gone, 4xx)."""
        if self.state is TRIAL:
            self._enter(HALF_OPEN, None)

    def fault(self, now: float, reason: str) -> None:
        """Note a failure of the worker."""
        self._faults += 1
        if self._faults >= self._config.failure_threshold or self.state is TRIAL:
            self.open(now, reason)
        else:
            self._rest(now, 0.0, reason)

    def busy(self, now: float, retry_after_s: float = 0.0) -> None:
        """Note back-pressure; the worker rests, for `retry_after_s` at least."""
        if self.state is not RESTING or not self._busy:
            self._busy += 1
        self._rest(now, retry_after_s, BUSY)

    def open(self, now: float, reason: str) -> None:
        """Open the circuit: no new requests until a trial succeeds."""
        self.reason = reason
        self._until = now + self._config.open_for_s
        self._enter(OPEN, self._config.open_for_s)

    def reachable(self) -> None:
        """Note an answered health check: an open circuit allows its trial now."""
        if self.state is OPEN:
            self._enter(HALF_OPEN, None)

    def await_trial(self) -> None:
        """Let one request try the worker before others are sent: an earlier brain had not closed its circuit."""
        self._enter(HALF_OPEN, None)

    def tick(self, now: float) -> None:
        """End a rest, or make an open circuit half-open, if its time is over."""
        if now < self._until - TICK_EARLY_S:
            return
        if self.state is RESTING:
            self._enter(HALF_OPEN if self._busy else CLOSED, None)
        elif self.state is OPEN:
            self._enter(HALF_OPEN, None)

    def _rest(self, now: float, at_least_s: float, reason: str) -> None:
        self.reason = reason
        if self.state is OPEN:
            return
        rest_s = min(MAX_REST_S, max(at_least_s, REST_S * 2.0 ** min(8, self.failures - 1)))
        self._until = max(self._until, now + rest_s)
        self._enter(RESTING, self._until - now)

    def _enter(self, state: CircuitState, wake_in_s: float | None) -> None:
        self.state = state
        self._on_change(wake_in_s)

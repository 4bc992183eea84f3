"""The seam between the proxy and the predictors: what the live router asks, and when it tells what it has seen.

The scheduler gets plain numbers. Which predictor they come from, its history on disk and its re-fits beside the loop
are known here alone.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from balanceroute.config import Config
from balanceroute.core.snapshot import RequestTracker
from balanceroute.core.types import Phase
from balanceroute.prediction import Forecaster, History, PromptKeyer, Refitter, build_predictor
from balanceroute.prediction.contract import AnchorPredictor


class Forecasts(Protocol):
    """Expected remaining steps, clipped to [0, H], for requests of one router."""

    def key(self, prompt: bytes, header: str) -> str:
        """The predictor's key of a prompt (its JSON) or of the configured header; "" where it uses none."""
        ...

    def initial(self, prompt_tokens: int, prompt_key: str) -> float:
        """c-hat of a request that was just prefilled."""
        ...

    def refresh(self, trackers: Sequence[RequestTracker]) -> list[float]:
        """c-hat of running requests, in order; one batched call."""
        ...

    def finished(self, tracker: RequestTracker | None, reason: str) -> None:
        """A request leaves, for `reason`: the engine's word, or the router's outcome."""
        ...

    def runner(self) -> Callable[[], Awaitable[None]] | None:
        """What keeps the predictor fresh beside the loop, if anything."""
        ...

    def close(self) -> None:
        """Write what is to be kept."""
        ...


class LiveForecasts:
    """A predictor of this package with its history."""

    def __init__(self, config: Config) -> None:
        chosen = config.predictor
        self._history = History(chosen.history, max_rows=chosen.max_rows, max_age_s=chosen.max_age_s)
        predictor = build_predictor(
            chosen.kind,
            config.routing.horizon_steps,
            rows=self._history.load(),
            model=chosen.model,
            max_rows=chosen.max_rows,
            max_age_s=chosen.max_age_s,
        )
        self._refitter: Refitter[Any] | None = None
        if not isinstance(predictor, AnchorPredictor):
            self._refitter = Refitter(predictor, interval_s=chosen.refit_interval_s)
        self.forecaster = Forecaster(predictor, config.routing.horizon_steps)
        self._keyer = PromptKeyer(self._history.salt) if chosen.kind == "exact_match" else None
        self._by_header = chosen.key_header is not None
        self.initial, self.refresh = self.forecaster.initial, self.forecaster.refresh

    def key(self, prompt: bytes, header: str) -> str:
        """A salted hash of what tells this kind of request from others."""
        if self._keyer is None:
            return ""
        return self._keyer.of_header(header) if self._by_header else self._keyer.of_prompt(prompt.decode())

    def finished(self, tracker: RequestTracker | None, reason: str) -> None:
        """Learn from a request that ends in its first decode; after a requeue its parts say nothing about the whole."""
        if tracker is not None and tracker.phase is Phase.DECODING and not tracker.requeues and tracker.generated:
            self._history.add(self.forecaster.finished(tracker, reason, time.time()))

    def runner(self) -> Callable[[], Awaitable[None]] | None:
        """The re-fits."""
        return None if self._refitter is None else self._refitter.run

    def close(self) -> None:
        """Write the rows that are queued."""
        self._history.close()


def build_forecasts(config: Config) -> Forecasts | None:
    """The predictor of a configuration; None where the policy asks for none, so that c-hat is H."""
    if config.routing.policy != "br_h" or config.predictor.kind == "none":
        return None
    return LiveForecasts(config)

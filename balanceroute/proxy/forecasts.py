"""The seam between the proxy and the predictors: what the live router asks, and when it tells what it has seen."""

from collections.abc import Sequence
from typing import Protocol

from balanceroute.core.snapshot import RequestTracker


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

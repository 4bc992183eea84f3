"""Predictors fitted on a trace of the past, which is never the trace that is replayed."""

from collections.abc import Iterator, Mapping

from balanceroute.core.knobs import Option
from balanceroute.prediction import FinishedRequest, LearnedPredictor, Predictor, build_predictor
from balanceroute.traces import Trace


def fitted(kind: str, train: Trace, horizon_steps: int, options: Mapping[str, Option] | None = None) -> Predictor:
    """A predictor by name, fitted on `train`. Raises: ConfigError for an unknown name or a missing extra."""
    predictor = build_predictor(kind, horizon_steps, rows=finished_requests(train), options=options)
    if isinstance(predictor, LearnedPredictor):
        predictor.grow()  # live it grows in the background; here the whole past is there at once
    return predictor


def finished_requests(train: Trace) -> Iterator[FinishedRequest]:
    """The rows of a past trace as a predictor learns them."""
    rows = zip(
        train.prompt_key.tolist(),
        train.prompt_tokens.tolist(),
        train.output_tokens.tolist(),
        train.arrival_s.tolist(),
        strict=True,
    )
    for key, prompt, output, arrival in rows:
        yield FinishedRequest(key, prompt, output, finished_s=arrival)

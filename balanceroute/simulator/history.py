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


def finished_requests(trace: Trace, step_s: float = 0.0) -> Iterator[FinishedRequest]:
    """The rows of a trace as a predictor learns them, in order of arrival.

    A trace has no finish times: a request finishes `step_s` per token after its arrival. None counts where all of a
    trace lies in the past; the published figures of the learned predictor depend on that.
    """
    finished_s = trace.arrival_s + step_s * trace.output_tokens
    columns = (trace.prompt_key, trace.prompt_tokens, trace.output_tokens, finished_s)
    for key, prompt, output, at_s in zip(*(column.tolist() for column in columns), strict=True):
        yield FinishedRequest(key, prompt, output, finished_s=at_s)

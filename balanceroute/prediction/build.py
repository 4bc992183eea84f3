"""From the names of a configuration to a predictor that is ready to answer."""

from collections.abc import Iterable
from pathlib import Path

from balanceroute.errors import ConfigError

from .contract import AnchorPredictor, FinishedRequest
from .exact_match import ExactMatchPredictor
from .learned import LearnedPredictor
from .model_file import load_model
from .observations import DEFAULT_ROWS
from .survival import SurvivalPredictor

KINDS = ("none", "survival", "exact_match", "learned")
MAX_ROWS_IN_MEMORY = 200_000  # a history file may hold more; a curve doesn't get better, only slower to fit

BuiltPredictor = AnchorPredictor | SurvivalPredictor | ExactMatchPredictor | LearnedPredictor


def build_predictor(
    kind: str,
    horizon_steps: int,
    *,
    rows: Iterable[FinishedRequest] = (),
    model: Path | str | None = None,
    max_rows: int = DEFAULT_ROWS,
    max_age_s: float | None = None,
    size_buckets: int = 0,
) -> BuiltPredictor:
    """Return the predictor named `kind`, warm with a model file and then with `rows` of a history, oldest first.

    Starting is quick: a learned predictor takes its trees from the model file, and without one answers from
    the marginal curve until its first re-fit. `size_buckets` (exact_match): on a miss look at requests of
    like prompt size before the marginal distribution; 0 for the paper's plain fallback. Raises: ConfigError
    for an unknown kind or a model of another kind or horizon; InputError for a bad model file.
    """
    max_rows = min(max_rows, MAX_ROWS_IN_MEMORY)
    predictor: BuiltPredictor
    if kind == "survival":
        predictor = SurvivalPredictor(horizon_steps, max_rows=max_rows, max_age_s=max_age_s)
    elif kind == "exact_match":
        predictor = ExactMatchPredictor(
            horizon_steps, max_rows=max_rows, max_age_s=max_age_s, size_buckets=size_buckets
        )
    elif kind == "learned":
        predictor = LearnedPredictor(horizon_steps, max_rows=max_rows, max_age_s=max_age_s)
    elif kind == "none":
        return AnchorPredictor(horizon_steps)
    else:
        raise ConfigError(f"predictor.kind: {kind!r} is none of {', '.join(KINDS)}")
    if model is None:
        predictor.start(rows)
        return predictor
    saved = load_model(Path(model))
    if saved.kind != kind:
        raise ConfigError(f"predictor.model: {model} holds a {saved.kind} predictor, predictor.kind is {kind}")
    if saved.learned is not None and saved.horizon_steps != horizon_steps:
        raise ConfigError(
            f"predictor.model: {model} was fitted for horizon_steps {saved.horizon_steps}, not {horizon_steps}"
        )
    since = list(rows)
    predictor.start([*saved.rows, *since])
    if saved.learned is not None and isinstance(predictor, LearnedPredictor):
        predictor.adopt(saved.learned)
        predictor.ring.pending = min(len(since), len(predictor.ring))  # its trees have seen the others
    return predictor

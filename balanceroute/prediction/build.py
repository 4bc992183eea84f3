"""Makes the predictor that a configuration names."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from balanceroute.errors import ConfigError
from balanceroute.plugins import check_predictor_name, make_predictor, of_others

from .contract import AnchorPredictor, FinishedRequest
from .exact_match import ExactMatchPredictor
from .learned import LearnedPredictor
from .model_file import load_model
from .observations import DEFAULT_ROWS
from .own import OwnPredictor
from .survival import SurvivalPredictor

KINDS = ("none", "survival", "exact_match", "learned")
MAX_ROWS_IN_MEMORY = 200_000  # a history file may hold more; a curve doesn't get better, only slower to fit

BuiltPredictor = AnchorPredictor | SurvivalPredictor | ExactMatchPredictor | LearnedPredictor | OwnPredictor


def build_predictor(
    kind: str,
    horizon_steps: int,
    *,
    rows: Iterable[FinishedRequest] = (),
    model: Path | str | None = None,
    max_rows: int = DEFAULT_ROWS,
    max_age_s: float | None = None,
    size_buckets: int = 0,
    options: Mapping[str, bool | int | float | str] | None = None,
) -> BuiltPredictor:
    """Return the predictor named `kind`, warm with a model file and then with `rows` of a history, oldest first.

    Starting is quick: a learned predictor takes its trees from the model file, and without one answers from
    the marginal curve until its first re-fit. `size_buckets` (exact_match): on a miss look at requests of
    like prompt size before the marginal distribution; 0 for the paper's plain fallback. One of your own, by its name,
    takes `options` and is shown the rows one by one. Raises: ConfigError for an unknown kind or a model of another kind
    or horizon; InputError for a bad model file.
    """
    if kind not in KINDS:
        return _own(kind, horizon_steps, rows, model, options or {})
    if options:
        raise ConfigError(f"predictor.options: {kind} takes none")
    max_rows = min(max_rows, MAX_ROWS_IN_MEMORY)
    predictor: SurvivalPredictor | ExactMatchPredictor | LearnedPredictor
    if kind == "survival":
        predictor = SurvivalPredictor(horizon_steps, max_rows=max_rows, max_age_s=max_age_s)
    elif kind == "exact_match":
        predictor = ExactMatchPredictor(
            horizon_steps, max_rows=max_rows, max_age_s=max_age_s, size_buckets=size_buckets
        )
    elif kind == "learned":
        predictor = LearnedPredictor(horizon_steps, max_rows=max_rows, max_age_s=max_age_s)
    else:
        return AnchorPredictor(horizon_steps)
    if model is None:
        predictor.start(rows)
        return predictor
    _start_from(predictor, Path(model), kind, horizon_steps, rows)
    return predictor


def _start_from(
    predictor: SurvivalPredictor | ExactMatchPredictor | LearnedPredictor,
    model: Path,
    kind: str,
    horizon_steps: int,
    rows: Iterable[FinishedRequest],
) -> None:
    """Start a predictor with a saved model, and the rows that have finished since.

    Raises: ConfigError: the model is of another kind or horizon; InputError: its file is bad.
    """
    saved = load_model(model)
    if saved.kind != kind:
        raise ConfigError(f"predictor.model: {model} holds a {saved.kind} predictor, predictor.kind is {kind}")
    if saved.learned is not None and saved.horizon_steps != horizon_steps:
        raise ConfigError(
            f"predictor.model: {model} was fitted for horizon_steps {saved.horizon_steps}, not {horizon_steps}"
        )
    since = list(rows)
    predictor.start([*saved.rows, *since])
    predictor.ring.of_model = len(saved.rows)
    if saved.learned is not None and isinstance(predictor, LearnedPredictor):
        predictor.adopt(saved.learned)
        predictor.ring.pending = min(len(since), len(predictor.ring))  # its trees have seen the others


def _own(
    name: str,
    horizon_steps: int,
    rows: Iterable[FinishedRequest],
    model: Path | str | None,
    options: Mapping[str, bool | int | float | str],
) -> OwnPredictor:
    check_predictor_name(name, KINDS)
    if model is not None:
        raise ConfigError(f"predictor.model: {name} reads its files itself; name them in predictor.options")
    predictor = OwnPredictor(name, make_predictor(name, horizon_steps, options), horizon_steps)
    with of_others(f"predictor {name}, shown the history"):
        for row in rows:
            predictor.observe(row)
    return predictor

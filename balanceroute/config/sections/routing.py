"""`routing` and `predictor`: which request goes to which decode worker, and what is known of its length."""

from typing import Any

from pydantic import Field, model_validator

from balanceroute.config.sections.section import Section
from balanceroute.config.values import (
    PREDICTOR_NAMES,
    FilePath,
    HeaderName,
    Options,
    Period,
    PolicyName,
    PredictorName,
    SecondsOrEndless,
)
from balanceroute.core.knobs import ALL, CandidateOrder, Guard, SlackPlacement


def _knob(name: str, more: str = "", *, unset: bool = False) -> Any:
    """A knob of the core as a setting, with its default, its bounds and its meaning.

    Args: more: a sentence to add to the meaning. unset: whether the default is None, as it depends on other settings.
    """
    knob = ALL[name]
    default = None if unset else knob.default
    meaning = f"{knob.meaning} {more}".rstrip()
    if knob.least is None or knob.most is None or knob.endless:  # its type says what it may be
        return Field(default, description=meaning)
    number = int if isinstance(knob.default, int) else float
    least, most = number(knob.least), number(knob.most)
    over, at_least = (least, None) if knob.above_least else (None, least)
    return Field(default, gt=over, ge=at_least, le=most, description=meaning)


class Routing(Section):
    """Which request goes to which decode worker, and when: the knobs of `core/knobs.py`."""

    policy: PolicyName = _knob("policy")
    horizon_steps: int = _knob("horizon_steps", f"`auto`: {ALL['horizon_steps'].default} with horizon_auto.")
    alpha: float = _knob("alpha")
    beta: float | None = _knob("beta")
    gamma: float = _knob("gamma")
    s_greedy: int = _knob("s_greedy")
    r_max: int = _knob("r_max")
    candidate_order: CandidateOrder = _knob("candidate_order")
    slack_placement: SlackPlacement = _knob("slack_placement")
    guard: Guard = _knob("guard")
    max_wait_s: SecondsOrEndless | None = _knob(
        "max_wait_s",
        f"Unset: {ALL['max_wait_s'].default:g}, or half of pool.ttl_s where that is less. .inf: nobody goes first for "
        "having waited, until pool.ttl_s.",
        unset=True,
    )
    hold_s: SecondsOrEndless = _knob("hold_s")
    pool_bypass: bool = _knob("pool_bypass")
    bypass_margin: int = _knob("bypass_margin")
    horizon_auto: bool = _knob("horizon_auto")
    seed: int = _knob("seed")
    options: Options = Field(
        default_factory=dict, description="Keyword arguments of a policy of your own; the others take none."
    )

    @model_validator(mode="before")
    @classmethod
    def _auto_horizon(cls, given: object) -> object:
        """`horizon_steps: auto` in full."""
        if isinstance(given, dict) and given.get("horizon_steps") == "auto":
            if given.get("horizon_auto") is False:
                raise ValueError("horizon_steps auto is horizon_auto true, not false; leave one of them out")
            return {"horizon_auto": True, **{key: value for key, value in given.items() if key != "horizon_steps"}}
        return given


class Predictor(Section):
    """How br_h estimates the remaining output of a request."""

    kind: PredictorName = Field(
        "survival",
        description="What br_h knows of the lengths of answers. survival: history of output lengths; "
        "exact_match: history per prompt; learned: gradient-boosted trees (extra `learned`; needs "
        "predictor.model or predictor.history); none: br_h assumes that nothing finishes within the horizon.",
    )
    options: Options = Field(
        default_factory=dict,
        description="Keyword arguments of a predictor of your own, beside the horizon; the others take none.",
    )
    history: FilePath | None = Field(
        None,
        description="SQLite file of finished requests, so that a restart starts warm. Unset: in memory only.",
    )
    model: FilePath | None = Field(
        None,
        description="File written by `balanceroute predictor fit`, used until the first re-fit.",
    )
    max_rows: int = Field(200_000, ge=100, le=50_000_000, description="Most finished requests kept in the history.")
    max_age_s: float = Field(
        7 * 86_400.0, gt=0, le=10 * 366 * 86_400, description="Older rows leave the history (default a week)."
    )
    refit_interval_s: Period = Field(60.0, description="How often the predictor is fitted anew from the history.")
    period_steps: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Generated tokens between two predictions for a running request. Unset: half of "
        "routing.horizon_steps, at least 1.",
    )
    size_buckets: int = Field(
        0,
        ge=0,
        le=64,
        description="exact_match: where the key is unknown, use the history of requests of similar prompt size, "
        "in so many buckets. 0: the history of all requests.",
    )
    key_header: HeaderName | None = Field(
        None,
        description="Request header that names the kind of request, as the key of exact_match and learned; set "
        "it if clients can name kinds of similar length. Unset, or absent from a request: a salted hash of the "
        "prompt.",
    )

    @property
    def of_ones_own(self) -> bool:
        """Whether `kind` names a predictor that is none of ours."""
        return self.kind not in PREDICTOR_NAMES

    @property
    def by_key(self) -> bool:
        """Whether the predictor tells requests apart by their key."""
        return self.kind not in ("none", "survival")

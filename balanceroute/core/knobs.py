"""Every knob of every policy, declared once: name, default, bounds, meaning.

These declarations define the configuration's `routing` section with its checks and docs, the command line's `--param`
and defaults, and the fields of journals and snapshots. Only the standard library is imported, so that the command line
can look up a default at no cost.
"""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, get_args

Option = bool | int | float | str
CandidateOrder = Literal["fifo", "ascending", "descending"]
SlackPlacement = Literal["free_slots", "load"]
Guard = Literal["pool", "head"]

BR_H_BETA: Final = 43.0  # with gamma 0.86 the paper's own operating point, and the best here on both synthetic traces
DAY_S: Final = 86_400  # the largest finite time


@dataclass(frozen=True, slots=True)
class Knob:
    """The accepted values of a knob.

    Numbers are from `least` to `most`; `above_least`: without `least` itself; `endless`: also infinity, which is null
    in JSON. Texts are one of `choices`. With neither: true or false, or as the knob says.
    """

    default: Any
    meaning: str
    least: float | None = None
    most: float | None = None
    above_least: bool = False
    endless: bool = False
    choices: tuple[str, ...] = ()


def _knob(default: Any, meaning: str, least: float | None = None, most: float | None = None, **more: Any) -> Any:
    return field(default=default, metadata={"knob": Knob(default, meaning, least, most, **more)})


def _choice(default: str, meaning: str, among: Any) -> Any:
    return field(default=default, metadata={"knob": Knob(default, meaning, choices=get_args(among))})


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The values of all knobs; each policy reads its own. Times in seconds, see `BalanceRouteParams`.

    The defaults are measured: short waits at about the same imbalance as the paper's.
    """

    policy: str = _knob(
        "level_fit",
        "Which waiting request goes to which decode worker, and when. level_fit and target_fit go beyond the "
        "paper; br_0 and br_h are the paper's; the others are baselines ([which policy](policies.md)). One of your "
        "own is module:Class, or what a package offers in the entry point group balanceroute.policies.",
    )
    horizon_steps: int = _knob(
        80, "H: how many decode steps br_h looks ahead; 0 looks at the current step only.", least=0, most=4096
    )
    alpha: float = _knob(
        1.0,
        "Reward per token of admitted load (br_0, br_h). Only its ratio to beta matters.",
        least=0,
        most=1_000_000,
        above_least=True,
    )
    beta: float | None = _knob(
        None,
        f"Penalty per token above the margin (br_0, br_h). Unset: the policy's own, {BR_H_BETA:g} for br_h and the "
        "number of decode workers for br_0.",
        least=0,
        most=1_000_000,
    )
    gamma: float = _knob(0.86, "Discount per step of the horizon (br_h).", least=0, most=1, above_least=True)
    s_greedy: int = _knob(
        4,
        "br_0, br_h: stage 1 places single requests while more slots than this are free, stage 2 picks subsets "
        "below. Raise it if large prompts wait too long; 0 balances best and lets them wait for minutes.",
        least=0,
        most=65_536,
    )
    r_max: int = _knob(
        8,
        "Candidates that stage 2 of br_0 and br_h looks at (the paper: 4). Lower it if decisions take too long.",
        least=1,
        most=64,
    )
    candidate_order: CandidateOrder = _choice(
        "fifo",
        "Order in which stage 2 takes its candidates: by arrival or by prompt size. By size, in either order, some "
        "requests wait without end.",
        CandidateOrder,
    )
    slack_placement: SlackPlacement = _choice(
        "load",
        "br_0, br_h: where requests go when everything waiting fits. load: to the lightest worker; free_slots: to "
        "the one with most free slots, as the paper prints it (imbalance 2 to 3 times that of least_kv at low "
        "load).",
        SlackPlacement,
    )
    guard: Guard = _choice(
        "pool",
        "br_0, br_h: when no subset has a positive score, admit the single best request of the whole pool (pool), "
        "or of the candidates only (head, as the paper prints it).",
        Guard,
    )
    max_wait_s: float = _knob(
        60.0,
        "Wait in the pool after which a request goes before all younger ones of its priority. Lower it if large "
        "prompts wait too long: that is fairer and balances less. Prompts far above the mean may wait up to 6 "
        "times as long, and none longer than three quarters of pool.ttl_s. level_fit derives shorter limits from "
        "it ([tuning](tuning.md#how-long-level_fit-lets-a-request-wait)).",
        least=0,
        most=DAY_S,
        endless=True,
    )
    hold_s: float = _knob(
        0.5,
        "How long level_fit and target_fit may hold a request back beside a free slot when it would raise the "
        "largest load; level_fit only while every worker has half of its slots in use. At most a tenth of the mean "
        "answer's time, not at all where that is less than a step, and not while the pool is full. Prompts far above "
        "the mean are held up to 6 times as long. 0: never; set it if the first token is late although slots are "
        "free. .inf: that tenth, once it is known.",
        least=0,
        most=DAY_S,
        endless=True,
    )
    pool_bypass: bool = _knob(
        False,
        "br_0 only: send a request to a decode worker as soon as its prefill is done, without a pool. The KV moves "
        "earlier, and there is less choice.",
    )
    bypass_margin: int = _knob(
        4, "With pool_bypass, requests in flight per worker beyond its decode slots.", least=0, most=4096
    )
    horizon_auto: bool = _knob(
        False,
        "Whether br_h looks ahead a sixth of the mean answer's length only, and at most horizon_steps: better "
        "where answers are short.",
    )
    seed: int = _knob(0, "Seed of the policies that draw at random, or break ties at random.", least=0, most=2**63 - 1)
    options: tuple[tuple[str, Option], ...] = ()
    """Names and values that the class of a policy of one's own is called with; none for the others."""


ALL: Final[dict[str, Knob]] = {f.name: f.metadata["knob"] for f in fields(PolicySettings) if "knob" in f.metadata}
"""Every knob by its name; `options` is none of ours."""
DEFAULTS: Final[dict[str, Any]] = {name: value for name, value in asdict(PolicySettings()).items() if name in ALL}


def is_accepted(key: str, value: object) -> bool:
    """Whether the knob `key` may have this value."""
    knob = ALL[key]
    if knob.choices:
        return value in knob.choices
    if isinstance(knob.default, bool) or isinstance(value, bool):
        return isinstance(knob.default, bool) and isinstance(value, bool)
    if value is None:
        return knob.default is None
    if knob.least is None or knob.most is None:
        return False
    if not isinstance(value, int if isinstance(knob.default, int) else int | float):
        return False
    within = knob.least < value <= knob.most if knob.above_least else knob.least <= value <= knob.most
    return within or (knob.endless and value == math.inf)


def accepted(key: str) -> str:
    """The accepted values of the knob `key`, in words."""
    knob = ALL[key]
    if knob.choices:
        return " or ".join(knob.choices)
    if isinstance(knob.default, bool):
        return "true or false"
    kind = "whole number" if isinstance(knob.default, int) else "number"
    above = f"above {knob.least} and at most {knob.most}"
    bounds = above if knob.above_least else f"from {knob.least} to {knob.most}"
    return f"a {kind} {bounds}" + (", or inf" if knob.endless else ", or null" if knob.default is None else "")

"""Knobs and options as they are written on a command line."""

import math
import re
from dataclasses import replace

import pytest

from balanceroute.core.knobs import DEFAULTS, PolicySettings
from balanceroute.core.policies import KNOBS, POLICIES, make_policy
from balanceroute.core.policy import AdmissionPolicy
from balanceroute.errors import ConfigError, InputError
from balanceroute.parameters import parse_params


def test_params_become_knobs_of_their_types() -> None:
    texts = ["beta=43", "s_greedy=0", "pool_bypass=true", "guard=head", "max_wait_s=inf"]
    knobs = parse_params(PolicySettings(policy="br_0"), texts)
    assert (knobs.beta, knobs.s_greedy, knobs.pool_bypass, knobs.guard) == (43.0, 0, True, "head")
    assert (knobs.max_wait_s, parse_params(PolicySettings(), ["hold_s=0"]).hold_s) == (math.inf, 0.0)
    assert parse_params(knobs, ["beta=null"]).beta is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_has_exactly_the_knobs_that_change_what_it_is(policy: str) -> None:
    other: dict[str, object] = {n: value * 2 + 1 for n, value in DEFAULTS.items() if type(value) in (int, float)}
    other |= {"gamma": 0.5, "beta": 7.0, "candidate_order": "ascending", "slack_placement": "free_slots"}
    other |= {"guard": "head", "pool_bypass": True, "horizon_auto": True}
    made = {name: made_with(policy, name, value) for name, value in other.items()}
    before = inside(make_policy(PolicySettings(policy=policy)))
    if policy == "br_0":  # the first step is never discounted; the margin is for the bypass alone
        made["gamma"] = before
        bypass = PolicySettings(policy=policy, pool_bypass=True)
        assert inside(make_policy(bypass)) != inside(make_policy(replace(bypass, bypass_margin=9)))
        made["bypass_margin"] = []
    assert {name for name, found in made.items() if found != before} == set(KNOBS[policy])
    for name in set(other) - {"seed", *KNOBS[policy]}:
        with pytest.raises(InputError, match=f"{policy} does not have this knob"):
            parse_params(PolicySettings(policy=policy), [f"{name}={str(other[name]).lower()}"])


def made_with(policy: str, name: str, value: object) -> list[str]:
    try:
        return inside(make_policy(replace(PolicySettings(policy=policy), **{name: value})))
    except ConfigError:  # the same as without the knob: br_h has no bypass
        return inside(make_policy(PolicySettings(policy=policy)))


def inside(policy: AdmissionPolicy) -> list[str]:
    names = getattr(policy, "__mypyc_attrs__", None) or vars(policy)
    return [type(policy).__name__, *(f"{name} {getattr(policy, name)}" for name in sorted(names))]


@pytest.mark.parametrize(
    ("param", "accepted"),
    [
        ("beta", "name=value with a name of max_wait_s, hold_s$"),
        ("nothing=1", "name=value with a name of max_wait_s, hold_s$"),
        ("s_greedy=many", "a whole number from 0 to 65536"),
        ("r_max=1e400", "a whole number from 1 to 64"),
        ("horizon_steps=-1", "a whole number from 0 to 4096"),
        ("horizon_steps=100000000", "a whole number from 0 to 4096"),
        ("pool_bypass=perhaps", "true or false"),
        ("bypass_margin=-1000", "a whole number from 0 to 4096"),
        ("guard=haed", "pool or head"),
        ("candidate_order=foo", "fifo or ascending or descending"),
        ("beta=inf", "a number from 0 to 1000000, or null"),
        ("alpha=nan", "a number above 0 and at most 1000000"),
        ("gamma=5", "a number above 0 and at most 1"),
        ("max_wait_s=nan", "a number from 0 to 86400, or inf"),
        ("hold_s=-1", "a number from 0 to 86400, or inf"),
    ],
)
def test_a_param_that_no_policy_can_have_is_refused_with_what_is_accepted(param: str, accepted: str) -> None:
    with pytest.raises(InputError, match=f"^--param {re.escape(param)}: accepted is {accepted}"):
        parse_params(PolicySettings(), [param])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("br_h", "accepted is name=value with a name of alpha, beta,.* horizon_steps, horizon_auto, gamma$"),
        ("least_kv", "least_kv has no knobs$"),
    ],
)
def test_an_unknown_param_is_refused_with_the_knobs_of_the_requested_policy(policy: str, expected: str) -> None:
    with pytest.raises(InputError, match=f"^--param nothing=1: {expected}"):
        parse_params(PolicySettings(policy=policy), ["nothing=1"])


@pytest.mark.parametrize("name", ["policy", "seed"])
def test_a_setting_with_its_own_option_is_no_param(name: str) -> None:
    with pytest.raises(InputError, match=f"--param {name}=6: the {name} has an option of its own, --{name}"):
        parse_params(PolicySettings(seed=5), [f"{name}=6"])

"""From a configuration to what the core is made of."""

from dataclasses import fields

import pytest

from balanceroute.build import policy_settings
from balanceroute.config.models import Routing
from balanceroute.core.policies import PolicySettings
from tests.unit.proxy.stage import a_config

FILLED_IN = {"beta", "max_wait_s", "options"}  # what unset means depends on other settings; options are made hashable


def test_a_field_of_the_routing_section_is_a_knob_of_the_core_and_the_other_way_round() -> None:
    assert set(Routing.model_fields) == {knob.name for knob in fields(PolicySettings)}


@pytest.mark.parametrize("name", sorted(set(Routing.model_fields) - FILLED_IN))
def test_a_knob_of_the_core_has_the_default_of_the_configuration(name: str) -> None:
    assert getattr(PolicySettings(), name) == Routing.model_fields[name].get_default(call_default_factory=True)


def test_every_knob_that_is_set_reaches_the_core() -> None:
    told = {
        "policy": "br_h",
        "horizon_steps": 7,
        "horizon_auto": True,
        "alpha": 2.0,
        "beta": 3.0,
        "gamma": 0.5,
        "s_greedy": 1,
        "r_max": 2,
        "candidate_order": "ascending",
        "slack_placement": "free_slots",
        "guard": "head",
        "max_wait_s": 9.0,
        "hold_s": 4.0,
        "bypass_margin": 6,
        "seed": 5,
    }
    settings = policy_settings(a_config(routing=told, predictor={"kind": "survival"}))
    assert {name: getattr(settings, name) for name in told} == told
    assert {*told, "pool_bypass", "options"} == set(Routing.model_fields), "name the new knob above"

"""From a configuration to what the core is made of."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from balanceroute.build import bounds, policy_settings
from balanceroute.config.sections.routing import Routing
from balanceroute.core.knobs import ALL, BR_H_BETA, PolicySettings
from tests.unit.proxy.virtual_time import a_config

PACKAGE = Path(__file__).parents[2] / "balanceroute"


def test_a_field_of_the_routing_section_is_a_knob_of_the_core_and_the_other_way_round() -> None:
    assert set(Routing.model_fields) == {knob.name for knob in fields(PolicySettings)}


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_setting_has_default_and_meaning_of_its_knob(name: str) -> None:
    setting, knob = Routing.model_fields[name], ALL[name]
    assert setting.default == (None if name == "max_wait_s" else knob.default)
    assert (setting.description or "").startswith(knob.meaning)


@pytest.mark.parametrize("layer", ["config", "cli", "library.py", "demo", "simulator", "proxy"])
def test_a_knobs_default_is_written_only_once(layer: str) -> None:
    """A default that is a word or a number of its own kind; 0, 1, true and false are everywhere."""
    place = PACKAGE / layer
    telling = {ALL[name].default for name in ("policy", "horizon_steps", "gamma")} | {BR_H_BETA}
    for path in [place] if place.is_file() else place.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            written = []
            if isinstance(node, ast.arguments):
                written = [*node.defaults, *node.kw_defaults]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                written = [node.value]
            found = {each.value for each in written if isinstance(each, ast.Constant) and type(each.value) is not bool}
            assert not found & telling, f"{path}: {found & telling} comes from core/knobs.py"


def test_every_knob_that_is_set_reaches_the_core() -> None:
    options = {
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
    settings = policy_settings(a_config(routing=options, predictor={"kind": "survival"}))
    assert {name: getattr(settings, name) for name in options} == options
    assert {*options, "pool_bypass", "options"} == set(Routing.model_fields), "name the new knob above"


@pytest.mark.parametrize(
    ("decode", "groups", "shared"),
    [
        ({}, (None, None, None), True),
        ({"shared_barrier": False}, (None, None, None), False),
        ({"shared_barrier": False}, ("a", "a", None), True),
        ({"shared_barrier": False}, ("a", "b", None), False),
        ({}, ("a", "b", "c"), False),
        ({}, ("a", "b", None), False),
    ],
    ids=["all together", "each alone", "two together", "named alone", "all named alone", "one left"],
)
def test_workers_share_a_barrier_where_two_of_them_wait_for_each_other(
    decode: dict[str, bool], groups: tuple[str | None, ...], shared: bool
) -> None:
    workers = [
        {"url": f"http://d{n}:1"} | ({} if group is None else {"barrier_group": group})
        for n, group in enumerate(groups)
    ]
    assert bounds(a_config(decode={"workers": workers, **decode})).shared_barrier is shared
    assert bounds(a_config(decoders=1)).shared_barrier, "one is as good as together"

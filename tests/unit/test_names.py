"""Names that several layers list, because they may not import each other, are the same everywhere."""

from typing import get_args

import pytest
from typer.main import get_command

from balanceroute.cli import app
from balanceroute.cli.probe import CONNECTORS
from balanceroute.config.sections.tiers import Prefill
from balanceroute.config.values import KV_PIN_S, POLICY_NAMES, PREDICTOR_NAMES, Connector, PrefillPolicyName
from balanceroute.core.policies import BUILT_IN
from balanceroute.core.prefill import PREFILL_POLICIES
from balanceroute.emulator import connectors as emulated
from balanceroute.experiments.figures import LABELS, STYLES
from balanceroute.prediction import build


def help_of(command: str, option: str) -> str:
    """What `--help` says of an option."""
    options = {name: each for each in get_command(app).commands[command].params for name in each.opts}  # type: ignore[attr-defined]
    return str(options[option].help)


def test_every_connector_is_known_to_the_emulator_and_to_the_probe() -> None:
    names = set(get_args(Connector))
    assert names == set(KV_PIN_S) == set(CONNECTORS.values()) == {each.value for each in emulated.Connector}
    assert set(emulated.CLASS_NAMES) == set(emulated.DEFAULT_LEASE_S) == set(emulated.Connector)


def test_every_prefill_policy_can_be_configured_and_is_described() -> None:
    assert set(get_args(PrefillPolicyName)) == set(PREFILL_POLICIES)
    described = Prefill.model_fields["policy"].description or ""
    assert [name for name in PREFILL_POLICIES if name not in described] == []


def test_every_policy_can_be_configured_and_drawn() -> None:
    assert set(POLICY_NAMES) == BUILT_IN == set(LABELS)
    assert [label for label in LABELS.values() if label not in STYLES] == []


def test_every_predictor_can_be_configured() -> None:
    assert PREDICTOR_NAMES == build.KINDS


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [
        ("serve", "--connector", get_args(Connector)),
        ("emulate", "--connector", get_args(Connector)),
        ("replay", "--prefill-policy", tuple(PREFILL_POLICIES)),
        ("replay", "--predictor", PREDICTOR_NAMES),
    ],
    ids=["serve", "emulate", "replay-prefill", "replay-predictor"],
)
def test_the_help_of_an_option_lists_all_accepted_names(command: str, option: str, names: tuple[str, ...]) -> None:
    assert [name for name in names if name not in help_of(command, option)] == []

"""The example configurations load, and are what their names say."""

from dataclasses import replace
from pathlib import Path

import pytest

from balanceroute.build import policy_settings
from balanceroute.config import load, validate
from balanceroute.core.knobs import BR_H_BETA, PolicySettings
from balanceroute.experiments.methods import BR_H_EXACT

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_an_example_configuration_loads_and_explains_itself(path: Path) -> None:
    load(path, {})
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(("name", "prefill_machines", "n_workers"), [("2p1d", 2, 4), ("4p1d", 4, 8), ("5p1d", 5, 16)])
def test_a_topology_has_the_papers_size(name: str, prefill_machines: int, n_workers: int) -> None:
    config = load(CONFIGS / f"{name}.yaml", {})
    hosts = {worker.url.rsplit(":", 1)[0] for worker in config.prefill.workers}
    assert (len(hosts), len(config.decode.workers)) == (prefill_machines, n_workers)
    assert config.routing.policy == "level_fit"


def test_the_as_printed_configuration_equals_the_papers_table_rows() -> None:
    config = load(CONFIGS / "as_printed.yaml", {})
    assert policy_settings(config) == replace(BR_H_EXACT.policy, guard="head")
    assert (config.predictor.kind, config.refresh_period_steps) == (BR_H_EXACT.predictor, 40)


@pytest.mark.parametrize("name", ["br_0", "br_h", "target_fit", "level_fit"])
def test_a_policy_configuration_uses_its_policy(name: str) -> None:
    assert load(CONFIGS / f"{name}.yaml", {}).routing.policy == name


def test_settings_that_are_left_out_are_the_defaults_of_the_policies() -> None:
    workers = {"prefill": {"workers": [{"url": "http://p:1"}]}, "decode": {"workers": [{"url": "http://d:1"}]}}
    assert policy_settings(validate(workers)) == PolicySettings(beta=BR_H_BETA)

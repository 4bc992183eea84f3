"""Defaults that commands write down again, because `--help` imports no numpy, are those of what the commands make."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from balanceroute.cli.emulate import emulate
from balanceroute.cli.replay import replay
from balanceroute.cli.trace import generate
from balanceroute.emulator import ClusterShape
from balanceroute.engine import StepTimeModel
from balanceroute.simulator import Setting
from balanceroute.traces import ReferenceSetting


def by_field(names: str, **flags: str) -> dict[str, str]:
    """Flags by the field that each sets: those of the same name, and others."""
    return {name: name for name in names.split()} | flags


OF_REPLAY = by_field(
    "slots pool prefillers prefill_policy transfer_steps transfers_by_size transfers_beside_full request_tokens "
    "cost_aware barrier_groups draft_tokens draft_acceptance",
    n_workers="workers",
    step_cost_s="step_cost",
    step_overhead_s="step_overhead",
    prefill_tokens_per_s="prefill_rate",
    prefix_cache_tokens="prefix_cache",
    telemetry_lag_steps="telemetry_lag",
    kv_capacity_tokens="kv_capacity",
    engine_balancer_blocks="engine_balancer",
)
OF_GENERATE = by_field("slots", n_workers="workers", step_cost_s="step_cost", step_overhead_s="step_overhead")
OF_EMULATE = by_field(  # without the cluster's size, which is smaller in tests
    "ranks_per_url connector model max_model_len block_size transfers_beside_full preemption stream_interval "
    "prefix_caching prompt_tokens_details time_scale",
    decode_blocks="kv_blocks",
    prefill_blocks="prefill_kv_blocks",
    prefill_tokens_per_s="prefill_rate",
    transfer_s="transfer",
    transfer_s_per_token="transfer_per_token",
    lease_s="lease",
)
OF_STEP_TIME = by_field("", per_token_s="step_cost", overhead_s="step_overhead")


def defaults_of(command: Callable[..., Any], flags: Iterable[str]) -> list[Any]:
    parameters = inspect.signature(command).parameters
    return [parameters[flag].default for flag in flags]


@pytest.mark.parametrize(
    ("command", "made", "flags"),
    [
        (replay, Setting(), OF_REPLAY),
        (generate, ReferenceSetting(), OF_GENERATE),
        (emulate, ClusterShape(), OF_EMULATE),
        (emulate, StepTimeModel(), OF_STEP_TIME),
    ],
    ids=["replay", "trace generate", "emulate", "emulate's step time"],
)
def test_a_flag_has_the_default_of_the_field_that_it_sets(
    command: Callable[..., Any], made: object, flags: Mapping[str, str]
) -> None:
    assert defaults_of(command, flags.values()) == [getattr(made, field) for field in flags]


def test_the_emulators_steps_take_as_long_as_those_of_the_reference_setting() -> None:
    reference = ReferenceSetting()
    assert StepTimeModel() == StepTimeModel(reference.step_cost_s, reference.step_overhead_s)

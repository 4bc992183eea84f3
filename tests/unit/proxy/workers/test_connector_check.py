"""What a prefiller's first parameters say of the configured connector."""

import orjson
import pytest

from balanceroute.config import Config
from balanceroute.proxy.telemetry.conditions import CONNECTOR, Conditions
from balanceroute.proxy.wire.connectors import connector_of
from balanceroute.proxy.workers.connector_check import (
    NO_PARAMETERS,
    WrongConnector,
    note_connector,
    shortened,
)
from balanceroute.proxy.workers.fleet import Worker
from tests.unit.proxy.virtual_time import a_config, a_router, with_virtual_time

OF_NIXL = orjson.dumps({"remote_engine_id": "e", "tp_size": 4})
OF_NOBODY = orjson.dumps({"remote_engine_id": "e"})


def named(connector: str) -> Config:
    return a_config().model_copy(update={"connector": connector})


def a_prefiller() -> tuple[Worker, Conditions]:
    services = a_router()
    return services.fleet["p0"], services.metrics.conditions


@with_virtual_time
async def test_the_configured_connector_is_recorded_and_clears_its_condition() -> None:
    worker, conditions = a_prefiller()
    conditions.hold(CONNECTOR, worker.id, "before")
    assert note_connector(worker, connector_of(OF_NIXL), named("nixl"), conditions) is None
    assert worker.kv_connector == "nixl" and conditions.reasons == []


@with_virtual_time
async def test_another_pulling_connector_is_reported_and_served() -> None:
    worker, conditions = a_prefiller()
    assert note_connector(worker, connector_of(OF_NIXL), named("mooncake_v1"), conditions) == "nixl"
    assert any("connector: nixl" in reason for reason in conditions.reasons)


@with_virtual_time
async def test_a_pulling_prefiller_is_refused_where_the_decode_worker_is_chosen_first() -> None:
    worker, conditions = a_prefiller()
    for _ in range(2):  # and the next one too
        with pytest.raises(WrongConnector):
            note_connector(worker, connector_of(OF_NIXL), named("mooncake_layerwise"), conditions)


@with_virtual_time
async def test_parameters_without_a_connector_change_nothing() -> None:
    worker, conditions = a_prefiller()
    assert note_connector(worker, connector_of(OF_NOBODY), named("mooncake_v1"), conditions) is None
    assert conditions.reasons == []


@with_virtual_time
async def test_a_prefiller_that_never_pinned_is_reported_and_one_that_has_is_not() -> None:
    services = a_router()
    worker, conditions = services.fleet["p0"], services.metrics.conditions
    services.doubt_connector(worker, NO_PARAMETERS.format("nixl"))
    assert any("kv_producer" in reason for reason in conditions.reasons)
    note_connector(worker, connector_of(OF_NIXL), named("nixl"), conditions)
    services.doubt_connector(worker, NO_PARAMETERS.format("nixl"))
    assert conditions.reasons == []


def test_kv_times_are_shortened_to_the_engines_connector() -> None:
    config = a_config()
    short = shortened(config, ["nixl"])
    assert short.kv_pin_s is not None and config.kv_pin_s is not None and short.kv_pin_s < config.kv_pin_s
    assert short.pool_ttl_s <= short.kv_pin_s
    assert shortened(config, [None, "mooncake_v1"]) is config


def test_the_operators_kv_pin_s_is_not_shortened() -> None:
    config = a_config(prefill={"kv_pin_s": 400.0})
    assert shortened(config, ["nixl"]) is config

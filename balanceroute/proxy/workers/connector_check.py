"""Checks whether prefillers run the connector that the configuration names.

The first kv_transfer_params of a prefiller show its connector. Both pulling connectors use the same messages, so a
wrong name fails only later: the router assumes too long a KV timeout, and sends a decoder to KV that is gone. So the
timeout is shortened at once to the engine's, a condition reports it, and requests are served. If the order of calls
differs (a pulling prefiller under mooncake_layerwise), they can't be.
"""

from collections.abc import Iterable
from typing import Final

from balanceroute.config import Config
from balanceroute.config.values import KV_PIN_S
from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.telemetry.conditions import CONNECTOR, Conditions
from balanceroute.proxy.workers.fleet import Worker

NO_PARAMETERS: Final = "it returns no kv_transfer_params: it is no kv_producer, or its connector is not {}"


class WrongConnector(BadUpstreamReply):
    """The engine expects its calls in another order; retries do not help before the setting is changed."""

    retryable = False


def note_connector(worker: Worker, found: str | None, config: Config, conditions: Conditions) -> str | None:
    """Note the connector of a prefiller's first parameters; returns it if it is not the configured one.

    Args: found: None: the parameters do not tell. Raises: WrongConnector.
    """
    worker.kv_connector = found or ""
    if found is None or found == config.connector:
        conditions.clear(CONNECTOR, worker.id)
        return None
    reason = f"its kv_transfer_params are of {found}, the configuration says {config.connector}; set connector: {found}"
    conditions.hold(CONNECTOR, worker.id, reason)
    if config.decode_first:
        worker.kv_connector = None  # so that the next request is refused, too
        raise worker.failure(WrongConnector, reason)
    return found


def shortened(config: Config, found: Iterable[str | None]) -> Config:
    """The configuration with KV times shortened to those of engines with these connectors.

    A `prefill.kv_pin_s` that the operator has set stays.
    """
    if config.prefill.kv_pin_s is not None:
        return config
    for name in found:
        pin_s, share = KV_PIN_S.get(name or "", (None, 1.0))
        default_s = config.kv_pin_s
        if pin_s is None or default_s is None or pin_s >= default_s:
            continue
        pool = config.pool.model_copy(update={"ttl_s": min(config.pool_ttl_s, pin_s * share)})
        prefill = config.prefill.model_copy(update={"kv_pin_s": pin_s})
        config = config.model_copy(update={"pool": pool, "prefill": prefill})
    return config

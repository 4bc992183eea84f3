"""Whether the prefillers' engines have the connector that the configuration names.

The first kv_transfer_params of a prefiller tell. Both pulling connectors take the same messages, so a wrong name breaks
nothing at once: it makes the router believe that KV stays pinned for longer than it does, and a decoder is then sent to
KV that is gone. So what is believed is shortened at once to what the engine keeps to, a condition says so, and requests
are served on. Where the order of calls differs (a pulling prefiller under mooncake_layerwise), they can't be.
"""

from collections.abc import Iterable

from balanceroute.config import Config
from balanceroute.config.values import KV_PIN_S
from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.telemetry.conditions import CONNECTOR, Conditions
from balanceroute.proxy.workers.fleet import Worker


class WrongConnector(BadUpstreamReply):
    """The engine expects its calls in another order: no try elsewhere helps before somebody has changed the setting."""

    retryable = False


def note_connector(worker: Worker, found: str | None, config: Config, conditions: Conditions) -> str | None:
    """Take note of what the first parameters of a prefiller tell; returns its connector if that is not the named one.

    Args: found: None where they don't tell. Raises: WrongConnector.
    """
    worker.kv_connector = found or ""
    if found is None or found == config.connector:
        conditions.clear(CONNECTOR, worker.id)
        return None
    reason = f"its kv_transfer_params are of {found}, the configuration says {config.connector}; set connector: {found}"
    conditions.hold(CONNECTOR, worker.id, reason)
    if config.decode_first:
        worker.kv_connector = None  # the next one is refused too
        raise WrongConnector(reason, worker=worker.id, tier="prefill")
    return found


def pinned_nothing(worker: Worker, config: Config, conditions: Conditions) -> None:
    """A probe was answered without parameters; a prefiller that never gave any is none, or has another connector."""
    if worker.kv_connector is None:
        reason = f"it returns no kv_transfer_params: it is no kv_producer, or its connector is not {config.connector}"
        conditions.hold(CONNECTOR, worker.id, reason)


def shortened(config: Config, found: Iterable[str | None]) -> Config:
    """The configuration, with KV pinned and pooled for no longer than engines with these connectors keep it.

    A `prefill.kv_pin_s` that is set is the operator's word on that, and stays.
    """
    if config.prefill.kv_pin_s is not None:
        return config
    for name in found:
        pin_s, share = KV_PIN_S.get(name or "", (None, 1.0))
        believed_s = config.kv_pin_s
        if pin_s is None or believed_s is None or pin_s >= believed_s:
            continue
        pool = config.pool.model_copy(update={"ttl_s": min(config.pool_ttl_s, pin_s * share)})
        prefill = config.prefill.model_copy(update={"kv_pin_s": pin_s})
        config = config.model_copy(update={"pool": pool, "prefill": prefill})
    return config
